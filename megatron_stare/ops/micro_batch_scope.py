"""Computes a method's statistics separately for each micro-batch of each rank. Published code, such
as the released code of STARE, selects tokens separately within each micro-batch. This module exists
only for comparisons with published code.

Thresholds, quantiles, counts, means, maxima and sums over tokens are computed from one micro-batch
alone. Two kinds of statistics still cover the whole batch: the number of tokens by which the loss
is divided, and sums over a response or a prompt group. A prompt group can be spread over several
micro-batches, so a sum within one micro-batch would miss a part of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_stare.ops.statistics_executor import MAX_ROUNDS, answer
from megatron_stare.records.batch_statistics import (
    Count,
    Max,
    Mean,
    Quantile,
    Request,
    Statistics,
    Sum,
    Threshold,
    TopK,
    scalar,
    tensor,
    threshold,
)

Ask = Callable[[Statistics], Mapping[str, Request]]
DENOMINATOR = "tokens"  # see Method.requests


def gather_by_micro_batch(
    asks: Sequence[Ask], group: ProcessGroup | None, micro_batch_group: ProcessGroup | None = None
) -> list[Statistics]:
    """Answers a method's requests for statistics separately for each micro-batch, and returns the
    answers of every micro-batch.

    Args:
        asks: a method's function `requests`, bound to each micro-batch of this rank. All
            micro-batches request the same names.
        group: ranks that hold other tokens; None: this rank holds all tokens.
        micro_batch_group: ranks that hold other tokens of the same micro-batches; None: this rank
            holds whole micro-batches.

    Raises:
        RuntimeError: the method still makes new requests after MAX_ROUNDS rounds.
    """
    known: list[Statistics] = [{} for _ in asks]
    for _ in range(MAX_ROUNDS):
        new = [
            {name: request for name, request in ask(answers).items() if name not in answers}
            for ask, answers in zip(asks, known, strict=True)
        ]
        if not new[0]:
            return known
        together = {name for name, request in new[0].items() if not _is_own(name, request)}
        joined = {
            name: _joined([asked[name] for asked in new]) for name in new[0] if name in together
        }
        shared = answer(joined, group) if joined else {}
        for answers, asked in zip(known, new, strict=True):
            own = {name: request for name, request in asked.items() if name not in together}
            answers |= shared | (answer(own, micro_batch_group) if own else {})
    raise RuntimeError(f"still asking after {MAX_ROUNDS} rounds: {sorted(new[0])}")


def summary(
    requests: Mapping[str, Request],
    whole: Statistics,
    parts: Sequence[Statistics],
    group: ProcessGroup | None,
    micro_batch_group: ProcessGroup | None = None,
) -> Statistics:
    """Returns a copy of `whole`, the statistics of the whole batch, for the log. The copy differs
    from `whole` only in the selection thresholds and in the quantiles.

    In the copy, a threshold or quantile is the mean of the values that were computed separately in
    each micro-batch. The mean omits a micro-batch in which the threshold or quantile is not
    defined. In the copy, the `k` of each Threshold (the number of selected tokens) is the sum of
    `k` over the micro-batches. The field `key` of this Threshold is 0, because the Threshold is
    only logged and never used to select tokens. The parameters `group` and `micro_batch_group` are
    described in `gather_by_micro_batch`. If several ranks hold tokens of the same micro-batches,
    only the first of these ranks adds its values to the summary.
    """
    speaks = micro_batch_group is None or micro_batch_group.rank() == 0
    asked: dict[str, Request] = {}
    for name, request in requests.items():
        if isinstance(request, TopK):
            own = [threshold(part, name) for part in parts]
            k = torch.stack([each.k for each in own])
            value = torch.stack([each.value for each in own])
            asked[f"{name}/k"] = Sum(k, (k >= 0) & speaks)
            asked[f"{name}/value"] = Mean(value, (k > 0) & speaks)
        elif isinstance(request, Quantile):
            value = torch.stack([tensor(part, name) for part in parts])
            asked[f"{name}/value"] = Mean(value, ~value.isnan() & speaks)
    if not asked:
        return whole
    answers = answer(asked, group)
    merged = dict(whole)
    for name, request in requests.items():
        if isinstance(request, TopK):
            k = scalar(answers, f"{name}/k").to(torch.int64)
            value = scalar(answers, f"{name}/value")
            merged[name] = Threshold(
                torch.zeros_like(k), k, threshold(whole, name).n, value.to(torch.float32)
            )
        elif isinstance(request, Quantile):
            merged[name] = scalar(answers, f"{name}/value")
    return merged


def _is_own(name: str, request: Request) -> bool:
    return isinstance(request, (TopK, Quantile, Count, Mean, Sum, Max)) and name != DENOMINATOR


def _joined(requests: Sequence[Request]) -> Request:
    """Joins several requests of the same kind into one request, which covers the positions of all
    joined requests."""
    rows = [f.name for f in fields(requests[0]) if f.name in ("x", "segment", "mask")]
    whole: dict[str, Any] = {name: torch.cat([getattr(r, name) for r in requests]) for name in rows}
    return replace(requests[0], **whole)
