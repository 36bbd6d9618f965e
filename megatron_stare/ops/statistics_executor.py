"""Answers a method's requests for statistics of the whole batch, on one rank or over all ranks that
share the batch.

A method (algorithms/) requests statistics, and chooses a name for each statistic. This executor
gives the same answers in every parallel layout. A method therefore needs no distributed code of its
own.

Thresholds are exact. Each token has a unique 64-bit key. Six rounds find the k-th largest key over
all ranks. Each round fixes at most eleven bits of the k-th largest key, by means of a histogram
that is all-reduced over the ranks. Keys are neither gathered from other ranks nor compacted into
shorter lists, and the host never waits for the device. Because all keys differ, there are no ties,
and the same tokens are selected in every layout.

Shape legend: S is the number of selections in one call of `kth_largest`, which finds one key for
each selection. N is the number of positions that this rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from megatron_stare.records.batch_statistics import (
    Count,
    Max,
    Mean,
    Quantile,
    Request,
    SegmentSum,
    Statistics,
    Sum,
    Threshold,
    TopK,
    ordering_key,
    top_k_count,
    value_of_key,
)

MAX_ROUNDS = 8
DIGIT_BITS = 11
ROUNDS = 6  # 6 * 11 >= 64
# keys processed at a time, few enough to stay in the CPU cache between operations
CHUNK = 2**18
# of exact sums: multiples of a unit lie below 2^24, so float64 adds 2^29 of them without rounding
_MOST = 2.0**40
_UNITS = tuple(2.0**power for power in range(16, -153, -24))
_SMALLEST, _LARGEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


def gather_statistics(
    ask: Callable[[Statistics], Mapping[str, Request]], group: ProcessGroup | None
) -> Statistics:
    """Calls `ask(known)` and answers the returned requests, until `ask` returns no new request.
    `known` contains the earlier answers, so a request can depend on these answers. Returns all
    answers.

    Args:
        ask: a method's `requests`, bound to its batch.
        group: ranks that hold different tokens of the batch (data and context parallel); None: one
            rank holds all tokens.

    Raises:
        RuntimeError: the method still makes new requests after MAX_ROUNDS rounds.
    """
    known: Statistics = {}
    for _ in range(MAX_ROUNDS):
        new = {name: request for name, request in ask(known).items() if name not in known}
        if not new:
            return known
        known |= answer(new, group)
    raise RuntimeError(f"still asking after {MAX_ROUNDS} rounds: {sorted(new)}")


def answer(requests: Mapping[str, Request], group: ProcessGroup | None) -> Statistics:
    """Answers one round of requests. A round needs one all-reduce for all sums and counts, one for
    all exact sums, one for all segment sums, one for all maxima, and six for all selections and
    quantiles together."""
    sums = _sums(requests, group)
    answers: Statistics = {}
    selects: dict[str, TopK | Quantile] = {}
    segments: dict[str, SegmentSum] = {}
    maxima: dict[str, Max] = {}
    for name, request in requests.items():
        total, count = sums[name]
        match request:
            case Mean():
                answers[name] = total / count  # 0 / 0 is NaN
            case Sum():
                answers[name] = total
            case Count():
                answers[name] = count
            case Max():
                maxima[name] = request
            case SegmentSum():
                segments[name] = request
            case TopK() | Quantile():
                selects[name] = request
    if segments:
        answers |= _segment_sums(segments, group)
    if maxima:
        answers |= _maxima(maxima, group)
    if selects:
        answers |= _select(
            selects, {name: sums[name][1].to(torch.int64) for name in selects}, group
        )
    return answers


def _sums(
    requests: Mapping[str, Request], group: ProcessGroup | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns a dict that maps the name of each request to two float64 scalars: the sum of x where
    the mask is True, and the number of positions where the mask is True. Float64 represents every
    count exactly. If a request sets `exact`, and every value is smaller in magnitude than `_MOST`,
    the sum has the same bits in every parallel layout. Without `exact`, the sums in two parallel
    layouts can differ by rounding errors."""
    rows = []
    exact: dict[str, Tensor] = {}
    for name, request in requests.items():
        mask = request.mask
        total = torch.zeros((), dtype=torch.float64, device=mask.device)
        if isinstance(request, (Mean, Sum)):
            # where, not multiplication: a masked position may hold inf or NaN
            x = torch.where(mask, request.x.detach().to(torch.float64), 0.0)
            if request.exact:
                exact[name] = _exact_parts(x)
            else:
                total = x.sum()
        rows.append(torch.stack([total, mask.sum(dtype=torch.float64)]))
    table = torch.stack(rows)
    if group is not None:
        all_reduce(table, group=group)
    answers = {name: (table[i, 0], table[i, 1]) for i, name in enumerate(requests)}
    if exact:
        parts = torch.stack([*exact.values()])
        if group is not None:
            all_reduce(parts, group=group)
        for name, (rest, *multiples) in zip(exact, parts, strict=True):
            total = torch.zeros_like(rest)
            for unit, multiple in zip(reversed(_UNITS), reversed(multiples), strict=True):
                total = total + multiple * unit
            answers[name] = (total + rest, answers[name][1])
    return answers


def _exact_parts(x: Tensor) -> Tensor:
    """Splits the sum of x into several numbers, which are then added over ranks. Returns these
    numbers as a float64 tensor [1 + len(_UNITS)].

    The first number is the sum of all values in x whose magnitude is `_MOST` or more, including inf
    and NaN. Each other number belongs to one unit in `_UNITS`. For every value whose magnitude is
    below `_MOST`, the function determines how many times the largest unit fits into the value, then
    how many times the next unit fits into the remainder, and so on. These counts are whole numbers
    with the sign of the value. The number for a unit is the sum, over all values, of each value's
    count for this unit. Float64 adds the counts without rounding, so the order of values and ranks
    does not matter. If a value is not a whole multiple of 2^-152, the smallest unit in `_UNITS`,
    the function drops the last remainder.
    """
    small = x.abs() < _MOST
    sums, left = [torch.where(small, 0.0, x).sum()], torch.where(small, x, 0.0)
    for unit in _UNITS:
        whole = (left / unit).trunc()
        sums.append(whole.sum())
        left = left - whole * unit
    return torch.stack(sums)


def _maxima(requests: Mapping[str, Max], group: ProcessGroup | None) -> Statistics:
    lowest = torch.full((1,), -torch.inf, dtype=torch.float64)
    table = torch.stack(
        [
            torch.cat(
                [
                    lowest.to(r.x.device),
                    torch.where(r.mask, r.x.detach().to(torch.float64), -torch.inf),
                ]
            ).max()
            for r in requests.values()
        ]
    )
    if group is not None:
        all_reduce(table, ReduceOp.MAX, group=group)
    return {name: table[i] for i, name in enumerate(requests)}


def _segment_sums(requests: Mapping[str, SegmentSum], group: ProcessGroup | None) -> Statistics:
    rows = []
    for request in requests.values():
        # where, not multiplication: a masked position may hold inf or NaN
        x = torch.where(request.mask, request.x.detach().to(torch.float64), 0.0)
        rows.append(
            torch.zeros(request.number, dtype=torch.float64, device=x.device).index_add_(
                0, request.segment, x
            )
        )
    table = torch.cat(rows)
    if group is not None:
        all_reduce(table, group=group)
    return dict(zip(requests, table.split([len(row) for row in rows]), strict=True))


def _select(
    requests: Mapping[str, TopK | Quantile],
    counts: Mapping[str, Tensor],
    group: ProcessGroup | None,
) -> Statistics:
    """Answers TopK and Quantile requests in one call of `kth_largest`. A TopK request needs one
    order statistic, and a Quantile request needs one or two."""
    keys, masks, k = [], [], []
    for name, request in requests.items():
        n = counts[name]
        if isinstance(request, TopK):
            keys.append(ordering_key(request.key.detach(), request.index))
            masks.append(request.mask)
            given = request.count
            k.append(
                top_k_count(n, request.share)
                if given is None
                else torch.minimum(given.to(n.dtype), n)
            )
        else:
            # ties need no order here, because equal values give equal answers
            key = ordering_key(
                request.x.detach(), torch.zeros_like(request.mask, dtype=torch.int64)
            )
            places = _places(request, n)
            keys += [key] * len(places)
            masks += [request.mask] * len(places)
            # the j-th smallest from 0 is the (n - j)-th largest
            k += [n - place.to(n.dtype) for place in places]
    counted = torch.stack(k)
    found = kth_largest(keys, masks, counted, group)
    answers: Statistics = {}
    row = 0
    for name, request in requests.items():
        if isinstance(request, TopK):
            value = torch.where(counted[row] > 0, value_of_key(found[row]), float("inf"))
            answers[name] = Threshold(key=found[row], k=counted[row], n=counts[name], value=value)
            row += 1
        else:
            end = row + len(_places(request, counts[name]))
            answers[name] = _interpolate(
                request, counts[name], value_of_key(found[row:end]).to(torch.float64)
            )
            row = end
    return answers


def _place(request: Quantile, n: Tensor) -> Tensor:
    """Returns the position of the quantile among the n sorted values, as a 0-dim float64 tensor. If
    there are no values (n = 0), the position is 0."""
    return (n - 1).clamp_min(0).to(torch.float64) * request.q


def _places(request: Quantile, n: Tensor) -> list[Tensor]:
    """Returns the integer positions of the one or two sorted values that determine the quantile."""
    place = _place(request, n)
    match request.interpolation:
        case "linear":
            return [place.floor(), place.ceil()]
        case "lower":
            return [place.floor()]
        case "higher":
            return [place.ceil()]
        case "nearest":
            return [place.round()]  # half to even


def _interpolate(request: Quantile, n: Tensor, values: Tensor) -> Tensor:
    """Computes a quantile from `values`, the sorted values at the positions that `_places` returns.
    The quantile of an empty set of values (n = 0) is NaN."""
    value = values[0]
    if request.interpolation == "linear":
        place = _place(request, n)
        low, high = values
        value = torch.where(low == high, low, low + (high - low) * (place - place.floor()))
    return torch.where(n > 0, value, float("nan"))


def kth_largest(
    keys: list[Tensor], masks: list[Tensor], k: Tensor, group: ProcessGroup | None
) -> Tensor:
    """Returns one key for every selection, the k-th largest of the selection's keys. Only keys at
    positions where the selection's mask is True are ranked. The search covers the positions of all
    ranks in `group`. Every selection has its own k.

    Args:
        keys: S tensors [N_s] int64, unique among the masked positions of all ranks.
        masks: S tensors [N_s] bool.
        k: [S] int64, from 0 to the number of masked positions of all ranks.
        group: ranks that hold different positions; None: this rank holds all positions.

    Returns:
        [S] int64 keys. If k is 0, the key is the largest int64, which selects nothing.
    """
    # k is at most the number of masked keys, so unmasked keys may all become the smallest
    keys = [torch.where(mask, key, _SMALLEST) for key, mask in zip(keys, masks, strict=True)]
    buffer = torch.empty(min(CHUNK, max(map(len, keys))), dtype=torch.int64, device=k.device)
    ones = torch.ones_like(buffer)
    remaining = k
    found = torch.zeros_like(k)  # the bits found so far, as a number
    for round_ in range(ROUNDS):
        shift = max(64 - DIGIT_BITS * (round_ + 1), 0)
        width = 64 - DIGIT_BITS * round_ - shift  # 11, and 9 in the last round
        # bits above `shift` of the keys in the round's first bucket
        first = found << width if round_ else torch.full_like(k, _SMALLEST >> shift)
        # bucket 0 and the last bucket take keys that earlier rounds placed below or above
        histogram = torch.zeros(len(keys), 2**width + 2, dtype=torch.int64, device=k.device)
        for s, key in enumerate(keys):
            for part in key.split(CHUNK):
                bucket = buffer[: len(part)]
                torch.bitwise_right_shift(part, shift, out=bucket)
                bucket.sub_(first[s] - 1).clamp_(0, 2**width + 1)
                histogram[s].scatter_add_(0, bucket, ones[: len(part)])
        if group is not None:
            all_reduce(histogram, group=group)
        undecided = histogram[:, 1:-1]
        at_or_above = undecided.flip(1).cumsum(1).flip(1)  # keys in this bucket or a higher one
        # highest bucket whose cumulative count reaches k
        chosen = (at_or_above >= remaining[:, None]).sum(1).sub(1).clamp_min(0)
        above = at_or_above.gather(1, chosen[:, None]) - undecided.gather(1, chosen[:, None])
        remaining = remaining - above.squeeze(1)
        found = first + chosen
    return torch.where(k > 0, found, _LARGEST)
