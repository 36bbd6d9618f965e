"""Experts and attention are cut over the ranks of a server. Dense layers are in
test_sglang_hash.py; both are held on real servers in test_sglang_tensor_parallel.py."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_stare.errors import ConfigError
from megatron_stare.models import FAMILIES, read_shape
from megatron_stare.rollout.engines.sglang.fingerprint import Fingerprint
from megatron_stare.rollout.engines.sglang.protocol import SGLangError
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout

EXPERTS, HIDDEN, WIDTH = 4, 6, 8
TINY = read_shape(Path(__file__).parents[2] / "assets" / "tiny-adder")
SHAPE = replace(
    TINY, family="qwen3_moe", hidden=HIDDEN, experts=EXPERTS, experts_per_token=2, expert_ffn=WIDTH
)
LAYER = "model.layers.2.mlp.experts"


def experts():
    """By Hugging Face name, and stacked: [experts, rows, columns] of gate, up and down."""
    generator = torch.Generator().manual_seed(3)
    stacks = [
        torch.randn(EXPERTS, *size, generator=generator)
        for size in ((WIDTH, HIDDEN),) * 2 + ((HIDDEN, WIDTH),)
    ]
    named = {
        f"{LAYER}.{number}.{part}_proj.weight": stack[number]
        for part, stack in zip(("gate", "up", "down"), stacks, strict=True)
        for number in range(EXPERTS)
    }
    return named, stacks


@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("backwards", [False, True])
def test_experts_lie_with_their_owners_and_their_columns_with_the_ranks_that_share_them(
    tensor, expert, backwards
):
    named, (gate, up, down) = experts()
    fingerprint = Fingerprint(SHAPE, torch.float32, ServerLayout("cpu", tensor, expert))
    for name in reversed(named) if backwards else named:
        fingerprint.add(name, named[name])
    owners, own, sharing = tensor // expert, EXPERTS // expert, WIDTH // (tensor // expert)
    for rank, found in enumerate(fingerprint.checksums()):
        mine = slice(rank // owners * own, (rank // owners + 1) * own)
        columns = slice(rank % owners * sharing, (rank % owners + 1) * sharing)
        wanted = {
            f"{LAYER}.w13_weight": torch.cat([gate[mine, columns], up[mine, columns]], dim=1),
            f"{LAYER}.w2_weight": down[mine, :, columns],
        }
        assert found == {
            n: hashlib.sha256(t.contiguous().numpy()).hexdigest()[:16] for n, t in wanted.items()
        }


def test_a_lost_expert_is_missed_on_its_owner_alone():
    named, _ = experts()
    whole, lacking = (
        Fingerprint(SHAPE, torch.float32, ServerLayout("cpu", 2, 2)) for _ in range(2)
    )
    for name, value in named.items():
        whole.add(name, value)
        if name != f"{LAYER}.3.up_proj.weight":
            lacking.add(name, value)
    (first, second), (other_first, other_second) = whole.checksums(), lacking.checksums()
    assert first == other_first
    assert {name for name in second if second[name] != other_second.get(name)} == {
        f"{LAYER}.w13_weight"
    }


def dense():
    """A layer of qwen3, embedding and head, by Hugging Face name: 4 heads of 6, of which 2 are
    keys', 9 words."""
    generator, layer = torch.Generator().manual_seed(5), "model.layers.1."
    sizes = {
        f"{layer}self_attn.{kind}_proj.weight": (rows, 24)
        for kind, rows in (("q", 24), ("k", 12), ("v", 12))
    }
    sizes |= {f"{layer}self_attn.o_proj.weight": (24, 24), f"{layer}self_attn.q_norm.weight": (6,)}
    sizes |= {f"{layer}mlp.{kind}_proj.weight": (32, 24) for kind in ("gate", "up")}
    sizes |= {
        f"{layer}mlp.down_proj.weight": (24, 32),
        "model.embed_tokens.weight": (9, 24),
        "lm_head.weight": (9, 24),
    }
    shape = replace(
        TINY, family="qwen3", qk_norm=True, hidden=24, heads=4, kv_heads=2, head_dim=6, ffn=32
    )
    return replace(shape, vocab_size=9), {
        name: torch.randn(*size, generator=generator) for name, size in sizes.items()
    }


def rows_of(tensor, number, count):
    """Rows of a rank's share of a vocabulary: 64 rows are cut, and rows that are not there are
    zeros."""
    return torch.cat([tensor, torch.zeros(64 - len(tensor), tensor.shape[1])]).chunk(count)[number]


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize(("tensor", "data"), [(2, 2), (4, 2), (4, 4), (8, 2)])
def test_attention_is_cut_over_the_ranks_of_a_group(tensor, data, by_group):
    """Rank r is number r % group of its group. By qwen3.py of 0.5.23: linear layers of attention
    have `parallel_group="attn_tp"`, the embedding `use_attn_tp_group`, the head only with
    --enable-dp-lm-head; norms are whole, feed-forward layers are cut over all ranks."""
    shape, whole = dense()
    fingerprint = Fingerprint(shape, torch.float32, ServerLayout("cpu", tensor, 1, data, by_group))
    for name, value in whole.items():
        fingerprint.add(name, value)
    group, attention, mlp = tensor // data, "model.layers.1.self_attn.", "model.layers.1.mlp."
    for rank, found in enumerate(fingerprint.checksums()):
        mine = rank % group
        # two key heads over four ranks: each is on two of them
        query, key = mine, mine * min(group, 2) // group
        wanted = {
            attention + "qkv_proj.weight": torch.cat(
                [
                    whole[attention + "q_proj.weight"].chunk(group)[query],
                    whole[attention + "k_proj.weight"].chunk(min(group, 2))[key],
                    whole[attention + "v_proj.weight"].chunk(min(group, 2))[key],
                ]
            ),
            attention + "o_proj.weight": whole[attention + "o_proj.weight"].chunk(group, 1)[mine],
            attention + "q_norm.weight": whole[attention + "q_norm.weight"],
            mlp + "gate_up_proj.weight": torch.cat(
                [whole[mlp + f"{kind}_proj.weight"].chunk(tensor)[rank] for kind in ("gate", "up")]
            ),
            mlp + "down_proj.weight": whole[mlp + "down_proj.weight"].chunk(tensor, 1)[rank],
            "model.embed_tokens.weight": rows_of(whole["model.embed_tokens.weight"], mine, group),
            "lm_head.weight": rows_of(
                whole["lm_head.weight"], *((mine, group) if by_group else (rank, tensor))
            ),
        }
        assert found == {
            n: hashlib.sha256(t.contiguous().numpy()).hexdigest()[:16] for n, t in wanted.items()
        }


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_with_requests_of_their_own_are_for_families_that_sglang_cuts_so(family):
    """The attention of the others asks for the whole server's size (`get_parallel().tp_size`), and
    nothing refuses it there."""
    shape, layout = replace(SHAPE, family=family), ServerLayout("cuda", 4, 1, 2)
    ServerLayout("cuda", 4).require_family(shape, "sglang.attention_data_parallel")
    if family in ("qwen3", "qwen3_moe", "glm4_moe"):
        layout.require_family(shape, "sglang.attention_data_parallel")
        return
    with pytest.raises(
        ConfigError, match=f"cuts the attention of {family} over all ranks"
    ) as error:
        layout.require_family(shape, "sglang.attention_data_parallel")
    assert error.value.where == "sglang.attention_data_parallel"


def test_the_layout_is_what_the_server_says():
    info = {"device": "cuda", "tp_size": 8, "ep_size": 4, "pp_size": 1, "dp_size": 1}
    assert ServerLayout.of(info, "http://one") == ServerLayout("cuda", 8, 4)
    assert ServerLayout.of({"device": "cpu"}, "http://one") == ServerLayout()
    for name, message in (
        ("pp_size", "2 pipeline stages"),
        ("dp_size", "2 data-parallel ranks"),
        ("attn_cp_size", "2 context-parallel ranks of attention"),
    ):
        with pytest.raises(SGLangError, match=message):
            ServerLayout.of(info | {name: 2}, "http://one")


def test_groups_with_requests_of_their_own_are_what_the_server_says():
    """Releases 0.5.22 and 0.5.23 have a number for such groups; 0.5.21 has one for them and for
    copies of a server."""
    info = {"device": "cuda", "tp_size": 8, "ep_size": 4, "pp_size": 1, "dp_size": 1}
    said = {"attn_dp_size": 2, "enable_dp_attention": True}
    assert ServerLayout.of(info | said, "http://one") == ServerLayout("cuda", 8, 4, 2)
    before = {"dp_size": 2, "enable_dp_attention": True}
    assert ServerLayout.of(info | before, "http://one") == ServerLayout("cuda", 8, 4, 2)
    head = {"enable_dp_lm_head": True}
    assert ServerLayout.of(info | said | head, "http://one") == ServerLayout("cuda", 8, 4, 2, True)
    assert ServerLayout.of(info | head, "http://one") == ServerLayout("cuda", 8, 4)
    with pytest.raises(SGLangError, match="2 data-parallel ranks"):
        ServerLayout.of(info | said | {"dp_size": 2}, "http://one")
