"""From padded [B, L] arrays to the flat tokens that methods see, and back; and a method's answers
about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_stare.algorithms.aggregate import coefficients
from megatron_stare.algorithms.entropy_bonus import EntropyBonus
from megatron_stare.algorithms.method import Method
from megatron_stare.ops.statistics_executor import gather_statistics
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Statistics


@dataclass
class Padded:
    """Valid tokens of some sequences, laid end to end."""

    batch: TokenBatch
    mask: Tensor  # [B, L] bool, of these sequences

    def spread(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """[N] -> [B, L], `fill` elsewhere."""
        return torch.full(self.mask.shape, fill, dtype=torch.float64).masked_scatter(
            self.mask, x.to(torch.float64)
        )


def pad(mask: Tensor, rows: list[int] | None = None, /, **given: Tensor) -> Padded:
    """Args: per-token fields of TokenBatch as [B, L], `advantage` as [B, L] or [B]; `rewards` [B]
    of a single group."""
    length = mask.shape[1]
    here = torch.zeros_like(mask)
    here[list(range(len(mask))) if rows is None else rows] = True
    here &= mask
    where = here.nonzero()
    rewards = given.pop("rewards", None)
    flat = {
        name: (x[:, None].expand(mask.shape) if x.dim() == 1 else x)[here]
        for name, x in given.items()
    }
    zero = torch.zeros(len(where), dtype=torch.float64)
    log_prob = flat.pop("log_prob", zero)
    own: dict[str, Any] = {
        "old_log_prob": log_prob,
        "rollout_log_prob": log_prob,
        "entropy": zero,
        "advantage": zero,
        "selection_log_prob": log_prob,  # selections read the policy of the update
        **flat,
    }
    batch = TokenBatch(
        log_prob=log_prob,
        loss_mask=torch.ones(len(where), dtype=torch.bool),
        sequence=where[:, 0],
        position=where[:, 1],
        index=where[:, 0] * length + where[:, 1],
        num_sequences=len(mask),
        sequence_lengths=mask.sum(1),
        groups=torch.zeros(len(mask), dtype=torch.int64),
        rewards=rewards,
        num_groups=1,
        max_length=length,
        **own,
    )
    return Padded(batch, here)


def ask(method: Method, batch: TokenBatch) -> Statistics:
    return gather_statistics(lambda known: method.requests(batch, known), None)


def total(method: Method, batch: TokenBatch, state: dict[str, Tensor] | None = None) -> Tensor:
    """The loss of a batch as training sums it."""
    statistics = ask(method, batch)
    loss = method.token_loss(batch, statistics, initial(method) if state is None else state).loss
    return (method.coefficients(batch, statistics) * loss).sum()


def initial(method: Method | EntropyBonus) -> dict[str, Tensor]:
    return {
        name: torch.tensor(x, dtype=torch.float64) for name, x in method.initial_state().items()
    }


def aggregate(batch: TokenBatch, loss: Tensor, how: Any, length: int | None = None) -> Tensor:
    return (coefficients(batch, how, batch.loss_mask.sum(), length_norm=length) * loss).sum()


def first_and_rest(mask: Tensor) -> list[list[int]]:
    """The two micro-batches that the file's key names speak of."""
    return [[0], list(range(1, len(mask)))] if len(mask) > 1 else [[0]]


def by_sequence(x: Tensor, batch: TokenBatch) -> Tensor:
    """[B] of a value that is the same for all tokens of a sequence."""
    return torch.zeros(batch.num_sequences, dtype=x.dtype).scatter(0, batch.sequence, x)
