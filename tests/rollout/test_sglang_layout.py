"""What the ranks of a server hold of experts; dense layers are in test_sglang_hash.py, both on real servers in
test_sglang_tensor_parallel.py."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_stare.models import read_shape
from megatron_stare.rollout.sglang.fingerprint import Fingerprint
from megatron_stare.rollout.sglang.protocol import SGLangError
from megatron_stare.rollout.sglang.server_layout import ServerLayout

EXPERTS, HIDDEN, WIDTH = 4, 6, 8
TINY = read_shape(Path(__file__).parents[2] / "assets" / "tiny-adder")
SHAPE = replace(TINY, family="qwen3_moe", hidden=HIDDEN, experts=EXPERTS, experts_per_token=2, expert_ffn=WIDTH)
LAYER = "model.layers.2.mlp.experts"


def experts():
    """By Hugging Face name, and stacked: [experts, rows, columns] of gate, up and down."""
    generator = torch.Generator().manual_seed(3)
    stacks = [torch.randn(EXPERTS, *size, generator=generator) for size in ((WIDTH, HIDDEN),) * 2 + ((HIDDEN, WIDTH),)]
    named = {
        f"{LAYER}.{number}.{part}_proj.weight": stack[number]
        for part, stack in zip(("gate", "up", "down"), stacks, strict=True)
        for number in range(EXPERTS)
    }
    return named, stacks


@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("backwards", [False, True])
def test_experts_lie_with_their_owners_and_their_columns_with_the_ranks_that_share_them(tensor, expert, backwards):
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
        assert found == {n: hashlib.sha256(t.contiguous().numpy()).hexdigest()[:16] for n, t in wanted.items()}


def test_a_lost_expert_is_missed_on_its_owner_alone():
    named, _ = experts()
    whole, lacking = (Fingerprint(SHAPE, torch.float32, ServerLayout("cpu", 2, 2)) for _ in range(2))
    for name, value in named.items():
        whole.add(name, value)
        if name != f"{LAYER}.3.up_proj.weight":
            lacking.add(name, value)
    (first, second), (other_first, other_second) = whole.checksums(), lacking.checksums()
    assert first == other_first
    assert {name for name in second if second[name] != other_second.get(name)} == {f"{LAYER}.w13_weight"}


def test_the_layout_is_what_the_server_says():
    info = {"device": "cuda", "tp_size": 8, "ep_size": 4, "pp_size": 1, "dp_size": 1}
    assert ServerLayout.of(info, "http://one") == ServerLayout("cuda", 8, 4)
    assert ServerLayout.of({"device": "cpu"}, "http://one") == ServerLayout()
    for name, message in (
        ("pp_size", "2 pipeline stages"),
        ("dp_size", "2 data-parallel ranks"),
        ("attn_dp_size", "of attention"),
    ):
        with pytest.raises(SGLangError, match=message):
            ServerLayout.of(info | {name: 2}, "http://one")
