"""Defines the rules that map Hugging Face tensors to Megatron parameters. A rule names the tensors
that make up a parameter, and defines how the parameter is split over tensor-parallel ranks.

Every model family has a table of rules. The same rules serve to load, export, stream and convert
weights, and to export gradients. Rules use Megatron's parameter names, with layers numbered as in
the whole model. Rules cover both layer specs. In the local spec, a norm is a parameter of its own,
and so is the matrix of each expert. In Transformer Engine's spec, a norm is usually fused into the
linear layer that follows the norm. In Transformer Engine's spec, each expert's matrices are weights
of a grouped GEMM, and the names of these weights end with the expert's number.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_stare.models.shape import ModelShape

# replicated: equal on every rank      vocab: rows cut, padded
# column: rows cut                     row: columns cut
# qkv: q, k, v interleaved by query group, groups cut
# gated: gate and up rows each cut, then stacked
Layout = Literal["replicated", "vocab", "column", "row", "qkv", "gated"]
_PARTS = {"qkv": 3, "gated": 2}  # parts of a Megatron tensor; 1 for other layouts


@dataclass(frozen=True)
class Rule:
    """The name of a Megatron parameter, and the names, in order, of the Hugging Face tensors that
    make up this parameter. The names have {} in place of layer and expert numbers.

    If a checkpoint has separate tensors for q, k and v, or for `gate` and `up`, `hf` names each of
    these tensors. A checkpoint can instead have one fused tensor, which is the concatenation of q,
    k and v, or of `gate` and `up`. For a fused tensor, `hf` contains only the name of the fused
    tensor.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
    float32: bool = False  # keep float32 whatever the model's dtype

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the Hugging Face tensors that contain the parts of the Megatron parameter, such
        as q, k and v. The result contains one name for each part of the Megatron parameter, in the
        order of the parts. The name of a fused tensor is repeated for each of its parts."""
        return self.hf * (_PARTS.get(self.layout, 1) // len(self.hf))

    def spans(self, rows: Sequence[int], shape: ModelShape) -> list[tuple[int, int]]:
        """Returns, for each part of the Megatron parameter, the rows [start, stop) that the part
        takes in its Hugging Face tensor. The property `sources` names the Hugging Face tensor of
        each part.

        Args:
            rows: number of rows of each tensor in hf, or of each part.
        """
        if len(rows) == len(self.sources):
            return [(0, n) for n in rows]
        if self.layout == "gated":
            starts = [0, rows[0] // 2]
        else:
            starts = [
                0,
                shape.heads * shape.head_dim,
                (shape.heads + shape.kv_heads) * shape.head_dim,
            ]
        return list(itertools.pairwise([*starts, rows[0]]))

    @property
    def cut(self) -> int:
        """Dimension along which the Hugging Face tensors are split over tensor-parallel ranks."""
        return 1 if self.layout == "row" else 0


ATTENTION, MLP = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
LAYER = "decoder.layers.{}."

DENSE = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab"),
    Rule("output_layer.weight", ("lm_head.weight",), "vocab"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated"),
    Rule(
        LAYER + "input_layernorm.weight", ("model.layers.{}.input_layernorm.weight",), "replicated"
    ),
    Rule(
        LAYER + "self_attention.linear_qkv.layer_norm_weight",
        ("model.layers.{}.input_layernorm.weight",),
        "replicated",
    ),
    Rule(
        LAYER + "self_attention.linear_qkv.weight",
        (ATTENTION + "q_proj.weight", ATTENTION + "k_proj.weight", ATTENTION + "v_proj.weight"),
        "qkv",
    ),
    Rule(
        LAYER + "self_attention.linear_qkv.bias",
        (ATTENTION + "q_proj.bias", ATTENTION + "k_proj.bias", ATTENTION + "v_proj.bias"),
        "qkv",
    ),
    Rule(LAYER + "self_attention.linear_proj.weight", (ATTENTION + "o_proj.weight",), "row"),
    Rule(LAYER + "self_attention.q_layernorm.weight", (ATTENTION + "q_norm.weight",), "replicated"),
    Rule(LAYER + "self_attention.k_layernorm.weight", (ATTENTION + "k_norm.weight",), "replicated"),
    Rule(
        LAYER + "pre_mlp_layernorm.weight",
        ("model.layers.{}.post_attention_layernorm.weight",),
        "replicated",
    ),
    Rule(
        LAYER + "mlp.linear_fc1.layer_norm_weight",
        ("model.layers.{}.post_attention_layernorm.weight",),
        "replicated",
    ),
    Rule(
        LAYER + "mlp.linear_fc1.weight", (MLP + "gate_proj.weight", MLP + "up_proj.weight"), "gated"
    ),
    Rule(LAYER + "mlp.linear_fc2.weight", (MLP + "down_proj.weight",), "row"),
)

_NUMBER = re.compile(r"(?<=layers\.|xperts\.|\.weight)\d+")


def numbered(name: str) -> tuple[list[str], str]:
    """Returns the layer and expert numbers in a Megatron name, and the name with {} in place of
    each number."""
    return _NUMBER.findall(name), _NUMBER.sub("{}", name)


def shard(rule: Rule, parts: Sequence[Tensor], shape: ModelShape, tp_rank: int, tp: int) -> Tensor:
    """Builds this rank's shard of a Megatron tensor from whole Hugging Face tensors.

    Args:
        parts: tensors of rule.hf in order, or the parts of a fused tensor. Safetensors slices,
            which are read lazily, may be passed instead of tensors.
    """
    match rule.layout:
        case "replicated":
            return parts[0][:]
        case "vocab":
            rows = shape.padded_vocab(tp) // tp
            mine = parts[0][tp_rank * rows : (tp_rank + 1) * rows]
            padding = mine.new_zeros(rows - mine.shape[0], *mine.shape[1:])
            return torch.cat([mine, padding])
        case "column":
            return _Rows(parts[0], 0, _size(parts[0])[0]).share(tp_rank, tp)
        case "row":
            columns = _size(parts[0])[1] // tp
            return parts[0][:, tp_rank * columns : (tp_rank + 1) * columns]
        case "gated":
            return torch.cat([part.share(tp_rank, tp) for part in _parts(rule, parts, shape)])
        case "qkv" if shape.kv_heads % tp == 0:
            q, k, v = (part.share(tp_rank, tp) for part in _parts(rule, parts, shape))
            return _interleave(q, k, v, shape.kv_heads // tp, shape.head_dim)
        # With fewer query groups than ranks Megatron cuts through a group, at any row.
        case "qkv":
            q, k, v = (part.share(0, 1) for part in _parts(rule, parts, shape))
            whole = _interleave(q, k, v, shape.kv_heads, shape.head_dim)
            return _Rows(whole, 0, len(whole)).share(tp_rank, tp)


def blocks(rule: Rule, shard: Tensor, shape: ModelShape, tp_rank: int, tp: int) -> list[Tensor]:
    """Splits this rank's shard of a Megatron tensor into blocks, one for each part in rule.sources.
    The Megatron tensor is a weight or a gradient.

    To rebuild a part of the Megatron tensor, take every rank's block for this part, and concatenate
    the blocks along the dimension `rule.cut`. If the layout is `replicated`, concatenation is not
    needed, because every rank's block already contains the complete Hugging Face tensor. Blocks are
    views of the shard, unless Megatron has split a query group over ranks. In the layout `qkv`, a
    block can have the leading dimensions [query groups, heads, head_dim] in place of one dimension
    for the rows. Flatten the block's leading dimensions to get the block's rows in order.
    """
    match rule.layout:
        case "replicated" | "column" | "row":
            return [shard]
        case "vocab":
            # rows beyond the vocabulary are padding
            return [shard[: max(shape.vocab_size - tp_rank * shard.shape[0], 0)]]
        case "gated":
            return list(shard.chunk(2))
        case "qkv" if shape.kv_heads % tp == 0:
            grouped = shard.reshape(shape.kv_heads // tp, -1, shape.head_dim, *shard.shape[1:])
            return list(grouped.split([grouped.shape[1] - 2, 1, 1], dim=1))
        case "qkv":
            return _cut_groups(shard, shape, tp_rank)


def _size(part: Tensor) -> Sequence[int]:
    # safetensors slices have get_shape instead of shape
    return part.get_shape() if hasattr(part, "get_shape") else part.shape


@dataclass(frozen=True)
class _Rows:
    """Rows [start, stop) of a tensor. The method `share` reads only the rows that it returns."""

    tensor: Tensor
    start: int
    stop: int

    def share(self, rank: int, ranks: int) -> Tensor:
        rows = (self.stop - self.start) // ranks
        first = self.start + rank * rows
        return self.tensor[first : first + rows]


def _parts(rule: Rule, tensors: Sequence[Tensor], shape: ModelShape) -> list[_Rows]:
    spans = rule.spans([_size(tensor)[0] for tensor in tensors], shape)
    held = tensors if len(tensors) == len(spans) else [tensors[0]] * len(spans)
    return [_Rows(tensor, *span) for tensor, span in zip(held, spans, strict=True)]


def _interleave(q: Tensor, k: Tensor, v: Tensor, groups: int, head_dim: int) -> Tensor:
    """Returns the rows of q, k and v in Megatron's order. In Megatron's order, each query group has
    its q heads first, then its k head, then its v head."""
    rest = q.shape[1:]
    grouped = [x.reshape(groups, -1, head_dim, *rest) for x in (q, k, v)]
    return torch.cat(grouped, dim=1).reshape(-1, *rest)


def _cut_groups(shard: Tensor, shape: ModelShape, tp_rank: int) -> list[Tensor]:
    """Returns the q, k and v rows of a shard that does not consist of whole query groups."""
    first = tp_rank * shard.shape[0]  # first row among the interleaved rows of all groups
    queries = shape.heads // shape.kv_heads
    found = []
    for head, heads in ((0, queries), (queries, 1), (queries + 1, 1)):
        starts = [
            (group * (queries + 2) + head) * shape.head_dim - first
            for group in range(shape.kv_heads)
        ]
        rows = heads * shape.head_dim
        found.append(torch.cat([shard[max(start, 0) : max(start + rows, 0)] for start in starts]))
    return found
