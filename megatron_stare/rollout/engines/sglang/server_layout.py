"""Describes which part of each Hugging Face tensor a rank of an SGLang server holds. Pure.

The sharding follows these source files of the supported SGLang releases: `layers/linear.py`,
`layers/vocab_parallel_embedding.py` and `layers/moe`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_stare.errors import ConfigError
from megatron_stare.models import FAMILIES, family_of
from megatron_stare.models.rules import Rule, numbered
from megatron_stare.models.shape import ModelShape
from megatron_stare.rollout.engines.sglang.protocol import FP8, SGLangError

_HEAD = "output_layer.weight"  # Megatron's name; a tied model's head is its embedding
VOCAB_MULTIPLE = 64  # SGLang pads embedding and head with zero rows to a multiple of this
CPU_WIDTHS = 32  # on CPUs, SGLang pads a rank's feed-forward columns to a multiple of this


@dataclass(frozen=True)
class ServerLayout:
    """Device of one server, and sharding of the model over the server's tensor-parallel ranks. The
    model's experts are sharded over the same tensor-parallel ranks as its other weights.

    With SGLang's attention DP (data-parallel attention), each group of ranks computes attention for
    its own requests. With attention DP, every group of ranks has its own copy of the attention
    weights and of the embedding. The ranks of a group shard this copy among themselves.
    """

    device: str = "cpu"
    tensor: int = 1
    expert: int = 1  # groups of ranks, each with its own whole experts; a divisor of `tensor`
    data: int = 1  # groups of ranks with separate requests; a divisor of `tensor`
    head_by_group: bool = False  # the head is sharded like the embedding
    eight_bits: bool = False  # matrices are stored in 8 bits, see fp8_weights.py

    @classmethod
    def of(cls, info: Mapping[str, Any], where: str) -> ServerLayout:
        """Reads a layout from a server's /server_info. Raises SGLangError for unsupported kinds of
        parallelism."""
        data, copies = int(info.get("attn_dp_size") or 1), int(info.get("dp_size") or 1)
        if data == 1 and info.get("enable_dp_attention"):
            data, copies = copies, 1  # 0.5.21 reports one number for both
        for ranks, what in (
            (int(info.get("pp_size") or 1), "pipeline stages"),
            (int(info.get("attn_cp_size") or 1), "context-parallel ranks of attention"),
            (copies, "data-parallel ranks"),
        ):
            if ranks > 1:
                raise SGLangError(
                    f"the server cuts the model over {ranks} {what}, and this release does not"
                    " know the parts that each of them holds",
                    where=where,
                    fix="start it with tensor parallelism alone, and more servers instead",
                )
        tensor, expert = int(info.get("tp_size") or 1), int(info.get("ep_size") or 1)
        return cls(
            str(info["device"]),
            tensor,
            expert,
            data,
            data > 1 and bool(info.get("enable_dp_lm_head")),
            info.get("quantization") == FP8,
        )

    def require_family(self, shape: ModelShape, where: str) -> None:
        """Raises ConfigError if the server uses attention DP for a model that does not support
        attention DP. For a model that does not support attention DP, SGLang would silently ignore
        attention DP and sample wrong tokens."""
        if self.data > 1 and not family_of(shape).served_by_groups:
            can = ", ".join(
                name for name, family in sorted(FAMILIES.items()) if family.served_by_groups
            )
            raise ConfigError(
                f"SGLang cuts the attention of {shape.family} over all ranks of a server, so"
                f" groups of ranks cannot have requests of their own; for {can} they can",
                where=where,
                fix="use tensor parallelism alone, and more servers instead",
            )

    @property
    def group(self) -> int:
        """Number of ranks that together compute attention for the same requests."""
        return self.tensor // self.data

    def parts(self, name: str, tensor: Tensor, shape: ModelShape, rank: int) -> Sequence[Tensor]:
        """Returns one rank's parts of a Hugging Face tensor. The caller concatenates the parts. The
        parts are views of the tensor if possible.

        Returns no parts for an expert that another rank owns.

        Args:
            name: name of the tensor. A tensor whose name the model family does not know counts as
                replicated.
            tensor: full tensor without padding.
        """
        rule = _rule(name, shape)
        ranks = self.tensor
        if family_of(shape).served(name, shape).whole:
            return [tensor]
        if _is_expert(name):
            if rank // self._ranks_an_expert != _expert(name) // (shape.experts // self.expert):
                return []
            rank, ranks = rank % self._ranks_an_expert, self._ranks_an_expert
        elif rule is not None and self._by_group(rule):
            rank, ranks = rank % self.group, self.group
        match rule.layout if rule else "replicated":
            case "vocab":
                return [_padded_rows(tensor, _vocab_rows(len(tensor), ranks), rank)]
            case "row":
                return [_share(tensor, 1, rank, ranks)]
            case "column" | "gated" | "qkv":
                assert rule is not None
                return [
                    self._rows(part, kind, shape, rank, ranks)
                    for kind, part in _split(rule, name, tensor, shape)
                ]
        return [tensor]

    def elements(self, name: str, sizes: Sequence[int], shape: ModelShape) -> int:
        """Returns how many elements of a Hugging Face tensor the first rank stores. The number is 0
        for a tensor of an expert that only other ranks hold. Summed over all tensors of a model,
        every rank stores the same number of elements.

        Args:
            name: see parts.
            sizes: shape of the full tensor.
        """
        if _is_expert(name):  # a model has thousands of these tensors
            mine = _expert(name) < shape.experts // self.expert
            return math.prod(sizes) // self._ranks_an_expert if mine else 0
        parts = self.parts(name, torch.empty(tuple(sizes), device="meta"), shape, 0)
        return sum(part.numel() for part in parts)

    def first_expert(self, shape: ModelShape, rank: int) -> int:
        """Returns the index of the first expert that a rank holds, or 0 if the model has no
        experts."""
        return rank // self._ranks_an_expert * (shape.experts // self.expert)

    @property
    def _ranks_an_expert(self) -> int:
        return self.tensor // self.expert

    def _by_group(self, rule: Rule) -> bool:
        """Returns True if the tensors of a rule are sharded over one attention-DP group. Returns
        False if these tensors are sharded over all ranks of the server."""
        if rule.megatron == _HEAD:
            return self.head_by_group
        return rule.layout == "vocab" or "self_attention" in rule.megatron

    @staticmethod
    def _rows(part: Tensor, kind: str, shape: ModelShape, rank: int, ranks: int) -> Tensor:
        if kind == "kv" and shape.kv_heads < ranks:  # several ranks share a head
            rank, ranks = rank // (ranks // shape.kv_heads), shape.kv_heads
        return _share(part, 0, rank, ranks)


def _vocab_rows(rows: int, ranks: int) -> int:
    """Returns the number of vocabulary rows on each rank."""
    multiple = VOCAB_MULTIPLE
    if -(-rows // multiple) * multiple % ranks:
        multiple *= ranks
    return -(-rows // multiple) * multiple // ranks


def _rule(name: str, shape: ModelShape) -> Rule | None:
    _, pattern = numbered(name)
    return next((rule for rule in family_of(shape).rules if pattern in rule.hf), None)


def _is_expert(name: str) -> bool:
    return len(numbered(name)[0]) == 2


def _expert(name: str) -> int:
    return int(numbered(name)[0][1])


def _split(rule: Rule, name: str, tensor: Tensor, shape: ModelShape) -> list[tuple[str, Tensor]]:
    """Splits a fused tensor into the parts that are sharded separately. If the tensor is not fused,
    returns the whole tensor as a single part. Also returns the kind of each part, because keys and
    values are sharded differently from other parts."""
    kinds = ("q", "kv", "kv") if rule.layout == "qkv" else ("rows",) * len(rule.sources)
    if len(rule.hf) == len(kinds):
        return [(kinds[rule.hf.index(numbered(name)[1])], tensor)]
    return [
        (kind, tensor[a:b])
        for kind, (a, b) in zip(kinds, rule.spans([len(tensor)], shape), strict=True)
    ]


def _share(tensor: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    size = tensor.shape[dim] // ranks
    return tensor.narrow(dim, rank * size, size)


def _padded_rows(tensor: Tensor, rows: int, rank: int) -> Tensor:
    mine = tensor[rank * rows : (rank + 1) * rows]
    if len(mine) == rows:
        return mine
    return torch.cat([mine, mine.new_zeros(rows - len(mine), *mine.shape[1:])])
