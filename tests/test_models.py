"""Model families: found by their files, read from config.json, and refused by name for what they do
not do here."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import FAMILIES as TINY
from support.models import GONE, HARMLESS, REFUSED, UNDOES_YARN, save_model
from torch import Tensor

from megatron_stare import models
from megatron_stare.errors import DataError
from megatron_stare.models import FAMILIES, cost_of, family_of, read_shape, rule_for
from megatron_stare.models.rope import scaled_frequencies
from megatron_stare.models.rules import Rule, numbered, shard
from megatron_stare.weights.files.check import rules

A_FILE = """
from megatron_stare.models.family import ModelFamily

class Mine(ModelFamily):
    model_type = "mine"
    qkv_bias = True
    rope_scalings = ()

    def window(self, config):
        return config.get("window")

FAMILY = Mine()
"""


def folder(path: Path, family: str, **changed: Any) -> Path:
    """A folder with the config.json of a tiny model, with other fields."""
    path.mkdir(exist_ok=True)
    fields = json.loads(TINY[family]().to_json_string()) | changed
    (path / "config.json").write_text(
        json.dumps({k: v for k, v in fields.items() if v is not GONE})
    )
    return path


def test_every_family_is_tried_on_a_tiny_model() -> None:
    assert {TINY[name]().model_type for name in TINY} == set(FAMILIES)


def test_a_file_is_all_that_a_family_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(A_FILE)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    found = models._found()
    assert set(found) == {*FAMILIES, "mine"}
    monkeypatch.setattr(models, "FAMILIES", found)
    shape = read_shape(folder(tmp_path / "model", "llama", model_type="mine"))
    assert (shape.family, shape.layers, shape.qkv_bias) == ("mine", 4, True)
    assert rule_for("decoder.layers.3.self_attention.linear_qkv.bias", shape).layout == "qkv"
    with pytest.raises(DataError, match="RoPE scaling 'yarn' is not supported\n  fix: known: none"):
        read_shape(folder(tmp_path / "model", "qwen2_yarn", model_type="mine"))
    # as far as there are positions
    folder(tmp_path / "model", "llama", model_type="mine", window=64)
    read_shape(tmp_path / "model")
    with pytest.raises(
        DataError, match=r"the last 63 of 64 positions \(sliding_window\)(.|\n)*set max_position"
    ):
        read_shape(folder(tmp_path / "model", "llama", model_type="mine", window=63))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs a package `brought` whose entry point of the model_type "mine" is what is given."""
    monkeypatch.setattr(models, "FAMILIES", {**FAMILIES})
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "brought", raising=False)

    def install(entry: str, source: str = A_FILE) -> None:
        info = tmp_path / "site/brought-1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[megatron_stare.model_families]\nmine = {entry}\n")
        (tmp_path / "site/brought.py").write_text(source)
        importlib.invalidate_caches()

    yield install
    sys.modules.pop("brought", None)


def test_a_package_brings_a_family_that_is_loaded_when_a_model_needs_it(
    tmp_path: Path, installed: Callable[..., None]
) -> None:
    installed("brought:FAMILY")
    read_shape(folder(tmp_path / "other", "llama"))
    assert "brought" not in sys.modules and "mine" not in models.FAMILIES
    shape = read_shape(folder(tmp_path / "model", "llama", model_type="mine"))
    assert (shape.family, shape.qkv_bias) == ("mine", True)
    models.FAMILIES.pop("mine")  # as in a worker, which is handed the shape and read no folder
    assert rule_for("decoder.layers.3.self_attention.linear_qkv.bias", shape).layout == "qkv"


def test_a_package_may_bring_a_family_that_is_missing_here(
    tmp_path: Path, installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not models.MISSING.keys() & FAMILIES.keys()
    monkeypatch.setitem(models.MISSING, "mine", ("Mine", "everything"))
    with pytest.raises(
        DataError, match=r"Mine \(model family 'mine'\) is not supported; missing: everything"
    ):
        read_shape(folder(tmp_path / "model", "llama", model_type="mine"))
    installed("brought:FAMILY")
    assert read_shape(folder(tmp_path / "model", "llama", model_type="mine")).family == "mine"


def test_a_family_of_ours_is_not_replaced(tmp_path: Path, installed: Callable[..., None]) -> None:
    installed("brought:FAMILY", "raise RuntimeError('imported')\n")
    file = tmp_path / "site/brought-1.0.dist-info/entry_points.txt"
    file.write_text(file.read_text().replace("mine", "llama"))
    assert read_shape(folder(tmp_path / "model", "llama")).qkv_bias is False


@pytest.mark.parametrize(
    ("entry", "source", "said"),
    [
        (
            "brought:FAMILY",
            "1 / 0\n",
            "'mine' of brought:FAMILY cannot be loaded: ZeroDivisionError",
        ),
        ("brought:GONE", A_FILE, "'mine' of brought:GONE cannot be loaded: AttributeError"),
        (
            "brought:ModelFamily",
            A_FILE,
            "brought:ModelFamily is no ModelFamily of the model_type 'mine'",
        ),
        (
            "brought:FAMILY",
            A_FILE.replace('"mine"', '"yours"'),
            "is no ModelFamily of the model_type 'mine'",
        ),
    ],
)
def test_a_package_that_brings_none_is_an_error_with_its_name(
    tmp_path: Path, installed: Callable[..., None], entry: str, source: str, said: str
) -> None:
    installed(entry, source)
    with pytest.raises(DataError, match=re.escape(said)):
        read_shape(folder(tmp_path / "model", "llama", model_type="mine"))


@pytest.mark.parametrize(("family", "changed", "message"), REFUSED)
def test_what_is_not_done_here_is_refused_by_name(
    tmp_path: Path, family: str, changed: dict, message: str
) -> None:
    read_shape(folder(tmp_path, family))
    with pytest.raises(DataError) as refused:
        read_shape(folder(tmp_path, family, **changed))
    assert message in str(refused.value)
    assert refused.value.where == str(tmp_path / "config.json")


@pytest.mark.parametrize(("family", "changed"), HARMLESS)
def test_settings_that_change_nothing_are_not_refused(
    tmp_path: Path, family: str, changed: dict
) -> None:
    shape = read_shape(folder(tmp_path, family))
    assert read_shape(folder(tmp_path, family, **changed)) == shape


def test_old_configs_name_rotary_parameters_otherwise(tmp_path: Path) -> None:
    old = {
        "rope_parameters": GONE,
        "rope_theta": 5e5,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    shape = read_shape(folder(tmp_path, "llama", **old))
    assert shape.rope_theta == 5e5
    assert shape.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert (
        read_shape(folder(tmp_path, "llama", rope_parameters=GONE, rope_theta=7.0)).rope_scaling
        is None
    )


def test_llamas_first_configs_have_no_base_of_the_rotary_frequencies(tmp_path: Path) -> None:
    from transformers import AutoConfig

    first = folder(tmp_path, "llama", rope_parameters=GONE, rope_scaling=None)
    assert read_shape(first).rope_theta == 1e4
    assert AutoConfig.from_pretrained(first).rope_parameters["rope_theta"] == 1e4


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("factors", "scale"),
    [
        ({"attention_factor": 1.0, "attn_factor": UNDOES_YARN}, 1.0),
        ({"attn_factor": 1.0}, 0.1 * math.log(4) + 1),
        ({"attention_factor": None}, 0.1 * math.log(4) + 1),
    ],
)
def test_yarn_on_whose_factor_all_readers_agree(
    tmp_path: Path, factors: dict, scale: float
) -> None:
    shape = read_shape(
        folder(tmp_path, "qwen2", rope_parameters={**YARN, **factors}, rope_theta=1e4)
    )
    assert scaled_frequencies(shape)[1] == pytest.approx(scale**2 / math.sqrt(shape.head_dim))


@pytest.mark.parametrize(
    ("newer", "older", "base"),
    [
        # a model card's advice over what transformers wrote
        ({"rope_type": "default", "rope_theta": 1e6}, YARN, GONE),
        ({**YARN, "rope_theta": 1e6}, {**YARN, "factor": 2.0}, 1e6),
        ({**YARN, "rope_theta": 1e6}, YARN, GONE),  # the base of the first is lost
        ({**YARN, "rope_theta": 1e6}, YARN, 1e4),
        ({**YARN, "rope_theta": 1e6}, {"type": "linear", "factor": 4.0}, 1e6),
    ],
)
def test_two_rotary_embeddings_are_refused(
    tmp_path: Path, newer: dict, older: dict, base: Any
) -> None:
    two = {"rope_parameters": newer, "rope_scaling": older, "rope_theta": base}
    with pytest.raises(
        DataError, match="rope_parameters and rope_scaling describe two different"
    ) as refused:
        read_shape(folder(tmp_path, "qwen2", **two))
    assert refused.value.where == str(tmp_path / "config.json") and "keep one of them" in str(
        refused.value
    )


def test_the_same_rotary_embedding_twice_is_one(tmp_path: Path) -> None:
    one = {"rope_parameters": {**YARN, "rope_theta": 1e6}, "rope_theta": 1e6}
    shape = read_shape(folder(tmp_path, "qwen2", **one))
    assert (shape.rope_theta, dict(shape.rope_scaling)["factor"]) == (1e6, 4.0)  # type: ignore[arg-type]
    for older in (YARN, {**YARN, "rope_theta": 1e6}, None, {}):
        again = read_shape(folder(tmp_path, "qwen2", **one, rope_scaling=older))
        assert (again.rope_theta, dict(again.rope_scaling)["factor"]) == (1e6, 4.0)  # type: ignore[arg-type]


def test_transformers_takes_the_older_name_which_is_why(tmp_path: Path) -> None:
    """Were this to change upstream, the refusal could go."""
    from transformers import AutoConfig

    two = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": YARN,
        "rope_theta": GONE,
    }
    read = AutoConfig.from_pretrained(folder(tmp_path, "qwen2", **two)).rope_parameters
    assert read["rope_type"] == "yarn" and read["rope_theta"] != 1e6


def test_one_expert_a_token_with_its_weight_renormalised_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"one expert a token whose weight is renormalised \(norm_topk_prob\)"
    ):
        read_shape(folder(tmp_path, "qwen3_moe", num_experts_per_tok=1, norm_topk_prob=True))
    assert (
        read_shape(
            folder(tmp_path, "qwen3_moe", num_experts_per_tok=1, norm_topk_prob=False)
        ).experts_per_token
        == 1
    )
    assert read_shape(
        folder(tmp_path, "qwen3_moe", num_experts_per_tok=2, norm_topk_prob=True)
    ).renormalise_experts


@pytest.mark.parametrize("name", TINY)
def test_every_rule_is_found_again_by_its_megatron_name(tmp_path: Path, name: str) -> None:
    shape = read_shape(folder(tmp_path, name))
    assert len(rules(shape)) > 4 * shape.layers
    for rule in rules(shape):
        assert rule_for(rule.megatron, shape) == rule
    with pytest.raises(KeyError, match=f"is not in the {shape.family} table"):
        rule_for("decoder.layers.0.mlp.linear_fc3.weight", shape)


def test_numbers_of_layers_and_experts(tmp_path: Path) -> None:
    name = "decoder.layers.12.mlp.experts.local_experts.3.linear_fc1.weight"
    assert numbered(name) == (
        ["12", "3"],
        "decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight",
    )
    grouped = "decoder.layers.12.mlp.experts.linear_fc1.weight3"
    assert numbered(grouped) == (["12", "3"], "decoder.layers.{}.mlp.experts.linear_fc1.weight{}")
    shape = read_shape(folder(tmp_path, "qwen3_moe"))
    assert rule_for(grouped, shape) == replace(rule_for(name, shape), megatron=grouped)
    assert rule_for(grouped, shape).hf[0] == "model.layers.12.mlp.experts.3.gate_proj.weight"


@pytest.mark.parametrize("name", TINY)
def test_a_sequences_cost_is_its_length_and_the_square_of_it(tmp_path: Path, name: str) -> None:
    # 32 wide: attention costs as much as the rest at 384 tokens
    cost = cost_of(read_shape(folder(tmp_path, name)))
    assert [cost(0), cost(192), cost(384), cost(3840)] == [0, 192 * 1.5, 768, 3840 * 11]


@pytest.mark.parametrize("name", TINY)
def test_servers_keep_every_tensor_somewhere_and_none_on_top_of_another(
    tmp_path: Path, name: str
) -> None:
    save_model(tmp_path, name)
    shape = read_shape(tmp_path)
    family = family_of(shape)
    places = [family.served(hf, shape) for rule in rules(shape) for hf in rule.hf]
    for kept in {place.name for place in places}:
        parts = [place for place in places if place.name == kept]
        assert sorted(part.index for part in parts) == list(range(len(parts))), kept
        assert {part.count for part in parts} in ({len(parts)}, {None}), kept


class Recorded:
    """A tensor that notes which of its rows are read."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.rows = tensor, [*range(len(tensor))]
        self.shape, self.read = tensor.shape, []

    def __getitem__(self, at: slice) -> Tensor:
        self.read += self.rows[at]
        return self.tensor[at]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["qwen2", "llama_tied_llama3"])  # two key-value heads; one
def test_fused_projections_are_laid_out_as_separate_ones(
    tmp_path: Path, name: str, tp: int
) -> None:
    shape = read_shape(folder(tmp_path, name))
    for kind, rows in (("qkv", (32, shape.kv_heads * 8, shape.kv_heads * 8)), ("gated", (48, 48))):
        apart = Rule("megatron", ("q", "k", "v")[: len(rows)], kind)
        fused = Rule("megatron", ("fused",), kind)
        assert apart.sources == apart.hf and fused.sources == ("fused",) * len(rows)
        parts = list(torch.arange(sum(rows) * 3.0).view(-1, 3).split(rows))
        for rank in range(tp):
            whole = Recorded(torch.cat(parts))
            mine = shard(apart, parts, shape, rank, tp)
            assert torch.equal(shard(fused, [whole], shape, rank, tp), mine)
            assert len(whole.read) == sum(rows) // (
                1 if kind == "qkv" and shape.kv_heads % tp else tp
            )


def test_a_fused_tensor_with_too_many_rows_does_not_fit(tmp_path: Path) -> None:
    """They are the last part's: they are not left out."""
    shape = read_shape(folder(tmp_path, "qwen2"))
    assert Rule("megatron", ("fused",), "qkv").spans([65], shape) == [(0, 32), (32, 48), (48, 65)]
    assert Rule("megatron", ("fused",), "gated").spans([97], shape) == [(0, 48), (48, 97)]
