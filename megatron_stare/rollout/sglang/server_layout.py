"""How the ranks of one SGLang server cut the model: which part of a Hugging Face tensor each of them holds. Pure.

As the layers of the supported releases are written: `layers/linear.py`, `layers/vocab_parallel_embedding.py` and
`layers/moe`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_stare.models import family_of
from megatron_stare.models.rules import Rule, numbered
from megatron_stare.models.shape import ModelShape
from megatron_stare.rollout.sglang.protocol import SGLangError

VOCAB_MULTIPLE = 64  # SGLang pads embedding and head with rows of zeros up to a multiple
CPU_WIDTHS = 32  # columns of a rank's feed-forward layers, on CPUs: SGLang pads them to a multiple


@dataclass(frozen=True)
class ServerLayout:
    """Of one server: the device it computes on, and its tensor-parallel ranks, which it also cuts experts over."""

    device: str = "cpu"
    tensor: int = 1
    expert: int = 1  # groups of ranks that hold whole experts, a divisor of `tensor`

    @classmethod
    def of(cls, info: Mapping[str, Any], where: str) -> ServerLayout:
        """Of a server's /server_info. Raises SGLangError for ways of cutting a model that are not known here."""
        for name, what in (
            ("pp_size", "pipeline stages"),
            ("dp_size", "data-parallel ranks"),
            ("attn_dp_size", "data-parallel ranks of attention"),
        ):
            if (ranks := int(info.get(name) or 1)) > 1:
                raise SGLangError(
                    f"the server cuts the model over {ranks} {what}, and what each of them holds is not known here",
                    where=where,
                    fix="start it with tensor parallelism alone, and more servers instead",
                )
        return cls(str(info["device"]), int(info.get("tp_size") or 1), int(info.get("ep_size") or 1))

    def parts(self, name: str, tensor: Tensor, shape: ModelShape, rank: int) -> Sequence[Tensor]:
        """What a rank holds of a Hugging Face tensor, to be laid end to end; views where it can be. Nothing of an
        expert that another rank owns.

        Args:
            name: of the tensor; one that the family does not know counts as replicated.
            tensor: whole, its padding left out.
        """
        rule = _rule(name, shape)
        ranks = self.tensor
        if _is_expert(name):
            if rank // self._ranks_an_expert != _expert(name) // (shape.experts // self.expert):
                return []
            rank, ranks = rank % self._ranks_an_expert, self._ranks_an_expert
        match rule.layout if rule else "replicated":
            case "vocab":
                return [_padded_rows(tensor, self._vocab_rows(len(tensor)), rank)]
            case "row":
                return [_share(tensor, 1, rank, ranks)]
            case "column" | "gated" | "qkv":
                assert rule is not None
                return [self._rows(part, kind, shape, rank, ranks) for kind, part in _split(rule, name, tensor, shape)]
        return [tensor]

    def first_expert(self, shape: ModelShape, rank: int) -> int:
        """The first of the experts that a rank holds; 0 without experts."""
        return rank // self._ranks_an_expert * (shape.experts // self.expert)

    @property
    def _ranks_an_expert(self) -> int:
        return self.tensor // self.expert

    def _vocab_rows(self, rows: int) -> int:
        """Rows of the vocabulary that a rank holds."""
        multiple = VOCAB_MULTIPLE
        if -(-rows // multiple) * multiple % self.tensor:
            multiple *= self.tensor
        return -(-rows // multiple) * multiple // self.tensor

    @staticmethod
    def _rows(part: Tensor, kind: str, shape: ModelShape, rank: int, ranks: int) -> Tensor:
        if kind == "kv" and shape.kv_heads < ranks:  # several ranks hold the same head
            rank, ranks = rank // (ranks // shape.kv_heads), shape.kv_heads
        return _share(part, 0, rank, ranks)


def _rule(name: str, shape: ModelShape) -> Rule | None:
    _, pattern = numbered(name)
    return next((rule for rule in family_of(shape).rules if pattern in rule.hf), None)


def _is_expert(name: str) -> bool:
    return len(numbered(name)[0]) == 2


def _expert(name: str) -> int:
    return int(numbered(name)[0][1])


def _split(rule: Rule, name: str, tensor: Tensor, shape: ModelShape) -> list[tuple[str, Tensor]]:
    """A tensor's parts that are cut by themselves: a fused one's, or itself; keys and values apart from the others."""
    kinds = ("q", "kv", "kv") if rule.layout == "qkv" else ("rows",) * len(rule.sources)
    if len(rule.hf) == len(kinds):
        return [(kinds[rule.hf.index(numbered(name)[1])], tensor)]
    return [(kind, tensor[a:b]) for kind, (a, b) in zip(kinds, rule.spans([len(tensor)], shape), strict=True)]


def _share(tensor: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    size = tensor.shape[dim] // ranks
    return tensor.narrow(dim, rank * size, size)


def _padded_rows(tensor: Tensor, rows: int, rank: int) -> Tensor:
    mine = tensor[rank * rows : (rank + 1) * rows]
    if len(mine) == rows:
        return mine
    return torch.cat([mine, mine.new_zeros(rows - len(mine), *mine.shape[1:])])
