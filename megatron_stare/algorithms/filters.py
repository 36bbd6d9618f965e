"""Filters remove tokens from the loss, one filter after the other, before the method requests its
own statistics.

A filter can also request statistics of its own. Each filter sees only the tokens that all earlier
filters kept. The order of the filters therefore matters, and is fixed. The filter that rejects
tokens by their importance ratio comes first, and the method's own mask second. The method then
computes its quantiles over the tokens that passed all filters.
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
        """Returns True if the denominator of the loss does not count the tokens that this filter
        removes."""

    def requests(self, batch: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        """Returns requests for the statistics that this filter needs. The loss mask of `batch`
        contains only the tokens that all earlier filters kept. The requested statistics cover only
        tokens in this loss mask."""

    def keep(self, batch: TokenBatch, known: Statistics) -> Tensor | None:
        """Returns the mask of the tokens that stay in the loss, [N] bool. Returns None if `known`
        does not contain the filter's statistics yet."""


@dataclass(frozen=True)
class Narrowed:
    """Result of applying the filters: the batch with the kept tokens, and the statistics that the
    filters request."""

    # kept.loss_mask: tokens with policy loss; kept.in_baseline: tokens of baseline responses
    kept: TokenBatch
    counted: Tensor  # [N] bool, tokens in the denominator
    asked: dict[str, Request]
    complete: bool  # False: more rounds of statistics are needed


def narrow(filters: Iterable[Filter], batch: TokenBatch, known: Statistics) -> Narrowed:
    """Applies the filters in order. If `known` lacks a statistic that a filter needs, `narrow`
    stops at this filter, and the result's field `complete` is False. The result contains the
    requests of this filter and of all earlier filters."""
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
