"""Blocks cover a model once, and hold what the mapping makes of whole tensors."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from support.models import FAMILIES, save_model
from support.runs import ROOT
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_stare.models import family_of, read_shape
from megatron_stare.models.rules import shard
from megatron_stare.weights.files.blocks import (
    Place,
    cut,
    places,
    to_hf,
    to_megatron,
    written_places,
)
from megatron_stare.weights.files.check import expected, rules
from megatron_stare.weights.files.hf_folder import HfFolder


@pytest.mark.parametrize("family", FAMILIES)
def test_expected_tensors_are_those_that_transformers_saves(tmp_path: Path, family: str) -> None:
    save_model(tmp_path, family)
    folder = HfFolder(tmp_path)
    saved = {name: tuple(folder.slice(name).get_shape()) for name in folder.names()}
    assert expected(read_shape(tmp_path)) == saved


@pytest.mark.parametrize("name", ["glm-4.5-air", "deepseek-v3"])
def test_published_mixtures_hold_what_transformers_model_does(name: str) -> None:
    """Names and shapes of every tensor, of a model without data."""
    path = ROOT / "assets/architectures" / name
    shape, config = read_shape(path), AutoConfig.from_pretrained(path)
    family = family_of(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    held = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    for parameter_name, parameter in model.named_parameters():
        held |= family.checkpoint_views(parameter_name, parameter)
    assert {n: tuple(tensor.shape) for n, tensor in held.items()} == expected(shape)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_bytes", [1, 3000, 1 << 20])
def test_blocks_make_whole_tensors(tmp_path: Path, family: str, block_bytes: int) -> None:
    save_model(tmp_path, family)
    folder, shape = HfFolder(tmp_path), read_shape(tmp_path)
    blocks = cut(shape, block_bytes)
    rows = Counter(
        (at.name, row) for block in blocks for at in block.hf for row in range(at.start, at.stop)
    )
    assert rows == Counter(
        {(name, row): 1 for name, size in expected(shape).items() for row in range(size[0])}
    )
    for rule in rules(shape):
        mine = [block for block in blocks if block.rule == rule]
        parts = [[folder.slice(at.name)[at.start : at.stop] for at in block.hf] for block in mine]
        made = [to_megatron(block, part, shape) for block, part in zip(mine, parts, strict=True)]
        whole = shard(rule, [folder.slice(hf) for hf in rule.hf], shape, 0, 1)
        # the rest is padding of the vocabulary
        assert torch.equal(torch.cat(made), whole[: mine[-1].stop])
        for block, part, tensor in zip(mine, parts, made, strict=True):
            assert tensor.shape == (block.stop - block.start, *block.size[1:])
            for want, got in zip(part, to_hf(block, tensor, shape), strict=True):
                assert torch.equal(got, want)


def test_places_of_parameters(tmp_path: Path) -> None:
    assert places("embedding.word_embeddings.weight") == [Place("embedding.word_embeddings.weight")]
    keys = [place.key for place in places("decoder.layers.3.input_layernorm.weight")]
    assert keys == [
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.input_layernorm.weight",
        "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.3.input_layernorm.weight",
    ]
    expert = places("decoder.layers.3.mlp.experts.local_experts.2.linear_fc2.weight")
    assert expert[0] == Place(
        "decoder.layers.mlp.experts.experts.linear_fc2.weight", (3, 2), ("layers", "experts")
    )
    save_model(tmp_path, "qwen3_moe")
    written = written_places("decoder.layers.0.pre_mlp_layernorm.weight", read_shape(tmp_path))
    assert [place.key for place in written] == [
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",  # as local layers ask for it
        "decoder.layers.pre_mlp_layernorm.weight",  # as Transformer Engine's do
    ]
