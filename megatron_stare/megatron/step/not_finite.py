"""Finds where NaN or infinite numbers on this rank come from, after they caused an update to be
skipped.

When gradients are reduced over data-parallel ranks, a NaN or infinite number spreads to all these
ranks. Before the reduction, each rank therefore records whether its own gradient is finite. After a
skipped update, a call of `look` finds the weights, gradients and samples with NaN or infinite
numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.export.export import main_grad
from megatron_stare.megatron.model.model import named_parameters
from megatron_stare.records.batch import TokenBatch


@dataclass(frozen=True)
class NotFinite:
    """Weights, gradients and samples with NaN or infinite numbers on one rank.

    `own_gradient`: whether the rank's own gradient had NaN or infinite numbers before it was
        reduced over data-parallel ranks.
    `weights`: the first parameter, in forward order, with NaN or infinite values.
    `gradient`: the first parameter, in backward order, with NaN or infinite values in its gradient.
    `samples`: indices in the whole batch, ascending, of the samples for which this rank holds a NaN
        or infinite log-prob, advantage or loss.
    """

    rank: int
    data_rank: int
    tensor_rank: int
    stage: int
    own_gradient: bool
    weights: str | None
    gradient: str | None
    samples: tuple[int, ...]


class OwnGradients:
    """Records the largest magnitude in each bucket of this rank's gradients, just before the bucket
    is reduced over data-parallel ranks.

    The recording costs one more pass over the gradients per update. Nothing is read from the device
    until `not_finite` is called.
    """

    def __init__(self, model: Iterable[nn.Module]) -> None:
        self._largest: dict[int, Tensor] = {}
        for chunk in model:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):  # type: ignore[misc]
                group.start_grad_sync = self._watched(group, group.start_grad_sync)

    def _watched(self, group: Any, reduce: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(reduce)
        def reduce_after_a_look(*args: Any, **kwargs: Any) -> Any:
            # with a handle the gradient is being reduced, so it is no longer this rank's own
            if group.grad_reduce_handle is None:
                for bucket in group.buckets:
                    # the infinity norm: large finite gradients do not overflow, and NaN stays NaN
                    self._largest[id(bucket)] = torch.linalg.vector_norm(
                        bucket.grad_data.detach(), ord=torch.inf
                    )
            return reduce(*args, **kwargs)

        return reduce_after_a_look

    def not_finite(self) -> bool:
        """Returns True if this rank's own gradient had NaN or infinite numbers in the last update.
        Waits for the device."""
        return any(not bool(largest.isfinite()) for largest in self._largest.values())


def look(
    model: list[nn.Module],
    layout: Layout,
    own: OwnGradients,
    tokens: TokenBatch | None,
    lost: Tensor | None,
) -> NotFinite:
    """Finds weights, gradients and samples with NaN or infinite numbers on this rank. Call `look`
    after an update was skipped.

    Args:
        tokens: this rank's tokens, on the last stage.
        lost: [k] int64 samples with a token whose loss was not finite in the last update, or None
            if this rank does not hold the loss.
    """
    named = list(named_parameters(model))
    samples: set[int] = set() if lost is None else set(lost.tolist())
    if tokens is not None:
        for column in (tokens.old_log_prob, tokens.rollout_log_prob, tokens.advantage):
            samples |= set(tokens.sequence[~column.isfinite() & tokens.loss_mask].unique().tolist())
    gradients = (name for name, parameter in reversed(named) if not _finite(main_grad(parameter)))
    return NotFinite(
        rank=layout.rank,
        data_rank=layout.dp_rank,
        tensor_rank=layout.tp_rank,
        stage=layout.pp_rank,
        own_gradient=own.not_finite(),
        weights=next((name for name, parameter in named if not _finite(parameter.detach())), None),
        gradient=next(gradients, None),
        samples=tuple(sorted(samples)),
    )


def _finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())
