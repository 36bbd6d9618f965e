"""Filters: what takes tokens out of the loss, one after the other, before a method's own statistics
are asked for.

A filter may itself ask for statistics; the next one sees only the tokens it left. So an order is
fixed by
construction: importance rejection, then a method's mask, then its quantiles over the tokens kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Request, Statistics


class Filter(Protocol):
    """One step of the chain."""

    @property
    def leaves_count(self) -> bool:
        """Tells whether tokens taken out also leave the denominator of the loss."""

    def requests(self, batch: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        """Statistics of the tokens that earlier filters left."""

    def keep(self, batch: TokenBatch, known: Statistics) -> Tensor | None:
        """[N] bool, the tokens that stay; None while the statistics it rests on are not known."""


@dataclass(frozen=True)
class Narrowed:
    """A batch after the filters, and the statistics that the filters ask for."""

    # kept.loss_mask: tokens whose policy loss counts; kept.in_baseline: responses that others are
    # judged against
    kept: TokenBatch
    counted: Tensor  # [N] bool, tokens in the denominator
    asked: dict[str, Request]
    complete: bool  # False: more rounds of statistics are needed


def narrow(filters: Iterable[Filter], batch: TokenBatch, known: Statistics) -> Narrowed:
    """Applies the filters in turn, as far as `known` allows."""
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
