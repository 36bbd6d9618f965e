"""Divides the rows of a model's tensors into blocks. Offline conversion handles one block at a
time, and so does the comparison of the converted weights with the original weights.

A block contains some rows of one Megatron tensor of the whole model, and the corresponding rows of
the Hugging Face tensors. By default, a block has at most 16 MiB, unless a single row or query group
is larger. A conversion in either direction holds at most one block in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_stare.models import rules as layouts
from megatron_stare.models.rules import Rule
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.files.check import expected, rules

BLOCK_BYTES = 16 << 20
_WIDEST = 4  # bytes an element


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of a Hugging Face tensor."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Block:
    """Rows [start, stop) of a Megatron tensor, and the corresponding rows of Hugging Face tensors.
    `rule` names the Megatron tensor. `hf` lists the ranges of Hugging Face rows, in the order in
    which `rule.sources` lists the parts of the Megatron tensor."""

    rule: Rule
    start: int
    stop: int
    size: tuple[int, ...]  # size of the whole Megatron tensor, [rows, columns] or [rows]
    hf: tuple[Rows, ...]

    @property
    def elements(self) -> int:
        return (self.stop - self.start) * math.prod(self.size[1:])

    def dtype(self, model: torch.dtype) -> torch.dtype:
        """Returns the dtype in which a checkpoint stores the block's tensor.

        Args:
            model: dtype of the model's weights.
        """
        return torch.float32 if self.rule.float32 else model


def cut(shape: ModelShape, block_bytes: int = BLOCK_BYTES) -> list[Block]:
    """Returns all blocks of a model. Every row of every Hugging Face tensor is in exactly one
    block."""
    sizes = expected(shape)
    return [block for rule in rules(shape) for block in _cut(rule, sizes, shape, block_bytes)]


def _cut(
    rule: Rule, sizes: dict[str, tuple[int, ...]], shape: ModelShape, block_bytes: int
) -> Iterator[Block]:
    rows = [sizes[name][0] for name in rule.hf]
    parts = list(zip(rule.sources, rule.spans(rows, shape), strict=True))
    rest = sizes[rule.hf[0]][1:]
    step = max(1, block_bytes // (math.prod(rest) * _WIDEST))
    size = (sum(rows), *rest)
    if rule.layout == "qkv":  # blocks hold whole query groups
        # heads of a query group in each part
        heads = [(stop - start) // (shape.kv_heads * shape.head_dim) for _, (start, stop) in parts]
        unit = sum(heads) * shape.head_dim
        for group, end in _spans(shape.kv_heads, max(1, step // unit)):
            hf = [
                Rows(name, start + group * n * shape.head_dim, start + end * n * shape.head_dim)
                for (name, (start, _)), n in zip(parts, heads, strict=True)
            ]
            yield Block(rule, group * unit, end * unit, size, tuple(hf))
        return
    first = 0  # in gated layouts, gate's rows precede up's
    for name, (low, high) in parts:
        for start, stop in _spans(high - low, step):
            yield Block(
                rule, first + start, first + stop, size, (Rows(name, low + start, low + stop),)
            )
        first += high - low


def _spans(n: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + step, n)) for start in range(0, n, step))


def to_megatron(block: Block, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """Converts a block's Hugging Face rows to the block's Megatron rows. The tensors in `parts`
    must have the same order as the ranges of rows in `block.hf`."""
    return (
        layouts.shard(block.rule, parts, _of(block, shape), 0, 1)
        if block.rule.layout == "qkv"
        else parts[0]
    )


def to_hf(block: Block, rows: Tensor, shape: ModelShape) -> list[Tensor]:
    """Converts a block's Megatron rows to the block's Hugging Face rows. The returned tensors have
    the same order as the ranges of rows in `block.hf`."""
    if block.rule.layout != "qkv":
        return [rows]
    return [
        p.reshape(-1, *rows.shape[1:])
        for p in layouts.blocks(block.rule, rows, _of(block, shape), 0, 1)
    ]


def _of(block: Block, shape: ModelShape) -> ModelShape:
    """Returns a copy of `shape` in which the numbers of query heads and key/value heads are those
    of the block. A block may contain only some of the layer's query groups."""
    groups = (block.hf[1].stop - block.hf[1].start) // shape.head_dim
    return replace(shape, kv_heads=groups, heads=groups * (shape.heads // shape.kv_heads))


@dataclass(frozen=True)
class Place:
    """Place of a parameter in a checkpoint. A place consists of a tensor's key and of indices in
    the tensor's leading dimensions (layer, expert)."""

    key: str
    lead: tuple[int, ...] = ()
    dims: tuple[str, ...] = ()  # names of the leading dimensions: layers, experts


# Names of norms that Transformer Engine fuses into the next linear layer. Megatron's local layers
# save them under either name; the first is the more common one.
_NORMS = {
    "input_layernorm.weight": (
        "self_attention.linear_qkv.layer_norm_weight",
        "input_layernorm.weight",
    ),
    "pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "self_attention.q_layernorm.weight": (
        "self_attention.q_layernorm.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
    ),
    "self_attention.kv_layernorm.weight": (
        "self_attention.kv_layernorm.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


def places(megatron: str) -> list[Place]:
    """Returns every place at which a checkpoint can store a parameter. In most checkpoints, the
    parameters whose names differ only in the number of the layer, or of the expert, are stacked in
    one tensor. Other checkpoints have a separate tensor for each layer, or for each expert of each
    layer."""
    in_layer = _LAYER.fullmatch(megatron)
    if not in_layer:
        return [Place(megatron)]
    layer, rest = int(in_layer[1]), in_layer[2]
    if in_expert := _EXPERT.fullmatch(rest):
        expert, rest, inside = int(in_expert[1]), in_expert[2], "mlp.experts.experts"
        return [
            Place(f"decoder.layers.{inside}.{rest}", (layer, expert), ("layers", "experts")),
            Place(f"decoder.layers.{layer}.{inside}.{rest}", (expert,), ("experts",)),
            Place(f"decoder.layers.{layer}.{inside}.{expert}.{rest}"),
        ]
    names = _NORMS.get(rest, (rest,))
    stacked = [Place(f"decoder.layers.{name}", (layer,), ("layers",)) for name in names]
    return stacked + [Place(f"decoder.layers.{layer}.{name}") for name in names]


def written_places(megatron: str, shape: ModelShape) -> list[Place]:
    """Returns the places of a parameter in a converted checkpoint. If the layers of the model
    differ, each layer is stored under a name of its own, as in Megatron.

    A norm directly before a layer's experts has two names: one in Megatron's local layers, and the
    other in Transformer Engine's layers. In models with latent attention, every norm of a layer has
    two names. A norm with two names is written under both names, so that Megatron's local layers
    and Transformer Engine's layers can both load the norm.
    """
    found = places(megatron)
    if shape.dense_layers:
        found = [place for place in found if "layers" not in place.dims]
    in_layer = _LAYER.fullmatch(megatron)
    if in_layer is None or in_layer[2] not in _NORMS:
        return found[:1]
    routed = shape.experts > 0 and int(in_layer[1]) >= shape.dense_layers
    both = shape.latent is not None or (routed and in_layer[2] == "pre_mlp_layernorm.weight")
    return found[: 2 if both else 1]
