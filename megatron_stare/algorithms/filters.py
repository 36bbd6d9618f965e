"""Filters remove tokens from the loss, one filter after the other, before the method requests its
own statistics.

A filter can also request statistics of its own. Each filter sees only the tokens that all earlier
filters kept. The order is therefore fixed: rejection by importance ratio comes first, then the mask
of the method, then the method's quantiles over the kept tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Request, Statistics


class Filter(Protocol):
    """One filter of the chain."""

    @property
    def leaves_count(self) -> bool:
        """Returns True if the removed tokens also leave the denominator of the loss."""

    def requests(self, batch: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        """Returns requests for statistics over the tokens that earlier filters kept."""

    def keep(self, batch: TokenBatch, known: Statistics) -> Tensor | None:
        """Returns the mask of the tokens that stay in the loss, [N] bool. Returns None while the
        filter's statistics are not known."""


@dataclass(frozen=True)
class Narrowed:
    """Batch after the filters, and the statistics that the filters request."""

    # kept.loss_mask: tokens with policy loss; kept.in_baseline: tokens of baseline responses
    kept: TokenBatch
    counted: Tensor  # [N] bool, tokens in the denominator
    asked: dict[str, Request]
    complete: bool  # False: more rounds of statistics are needed


def narrow(filters: Iterable[Filter], batch: TokenBatch, known: Statistics) -> Narrowed:
    """Applies the filters in order. Stops at the first filter whose statistics are not in
    `known`."""
    kept, counted = batch, batch.loss_mask
    asked: dict[str, Request] = {}
    for each in filters:
        asked.update(each.requests(kept, known))
        keep = each.keep(kept, known)
        if keep is None:
            return Narrowed(kept, counted, asked, complete=False)
        kept = replace(kept, loss_mask=kept.loss_mask & keep, baseline_mask=kept.in_baseline & keep)
        if each.leaves_count:
            counted = counted & keep
    return Narrowed(kept, counted, asked, complete=True)
