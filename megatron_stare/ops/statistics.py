"""Answers what a method asks about the whole batch, locally or over the ranks that share it.

Methods (algorithms/) name requests, this executor answers them, token by token the same in every layout; it is the
only distributed code a method depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from megatron_stare.ops.select import kth_largest
from megatron_stare.statistics import (
    Count,
    Max,
    Mean,
    Request,
    Statistics,
    Sum,
    Threshold,
    TopK,
    ordering_key,
    top_k_count,
    value_of_key,
)

MAX_ROUNDS = 8


def gather_statistics(ask: Callable[[Statistics], Mapping[str, Request]], group: ProcessGroup | None) -> Statistics:
    """Asks until nothing new is asked: `ask(known)` may build on answers it already has.

    Args:
        ask: a method's `requests`, bound to its batch.
        group: ranks that hold different tokens of the batch (data and context parallel); None: one rank holds all.

    Raises:
        RuntimeError: the method keeps asking.
    """
    known: Statistics = {}
    for _ in range(MAX_ROUNDS):
        new = {name: request for name, request in ask(known).items() if name not in known}
        if not new:
            return known
        known |= answer(new, group)
    raise RuntimeError(f"still asking after {MAX_ROUNDS} rounds: {sorted(new)}")


def answer(requests: Mapping[str, Request], group: ProcessGroup | None) -> Statistics:
    """One round: a single all-reduce for all sums and counts, one for all maxima, six for all selects together."""
    sums = _sums(requests, group)
    answers: Statistics = {}
    selects: dict[str, TopK] = {}
    maxima: dict[str, Max] = {}
    for name, request in requests.items():
        total, count = sums[name]
        match request:
            case Mean():
                answers[name] = total / count.clamp_min(1)
            case Sum():
                answers[name] = total
            case Count():
                answers[name] = count
            case Max():
                maxima[name] = request
            case TopK():
                selects[name] = request
    if maxima:
        answers |= _maxima(maxima, group)
    if selects:
        answers |= _select(selects, {name: sums[name][1].to(torch.int64) for name in selects}, group)
    return answers


def _sums(requests: Mapping[str, Request], group: ProcessGroup | None) -> dict[str, tuple[Tensor, Tensor]]:
    """name -> (masked sum, masked count) as float64 scalars: exact for counts, and stable whatever the layout."""
    rows = []
    for request in requests.values():
        mask = request.mask
        if isinstance(request, (Mean, Sum)):
            # where, not multiplication: a masked position may hold inf or NaN
            total = torch.where(mask, request.x.detach().to(torch.float64), 0.0).sum()
        else:
            total = torch.zeros((), dtype=torch.float64, device=mask.device)
        rows.append(torch.stack([total, mask.sum(dtype=torch.float64)]))
    table = torch.stack(rows)
    if group is not None:
        all_reduce(table, group=group)
    return {name: (table[i, 0], table[i, 1]) for i, name in enumerate(requests)}


def _maxima(requests: Mapping[str, Max], group: ProcessGroup | None) -> Statistics:
    lowest = torch.full((1,), -torch.inf, dtype=torch.float64)
    table = torch.stack(
        [
            torch.cat([lowest.to(r.x.device), torch.where(r.mask, r.x.detach().to(torch.float64), -torch.inf)]).max()
            for r in requests.values()
        ]
    )
    if group is not None:
        all_reduce(table, ReduceOp.MAX, group=group)
    return {name: table[i] for i, name in enumerate(requests)}


def _select(requests: Mapping[str, TopK], counts: Mapping[str, Tensor], group: ProcessGroup | None) -> Statistics:
    n = torch.stack([counts[name] for name in requests])
    k = torch.stack([top_k_count(counts[name], request.share) for name, request in requests.items()])
    keys = [ordering_key(request.key.detach(), request.index) for request in requests.values()]
    found = kth_largest(keys, [request.mask for request in requests.values()], k, group)
    value = torch.where(k > 0, value_of_key(found), float("inf"))
    return {name: Threshold(key=found[i], k=k[i], n=n[i], value=value[i]) for i, name in enumerate(requests)}
