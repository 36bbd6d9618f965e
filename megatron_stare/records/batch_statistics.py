"""Defines a method's requests for statistics of the whole batch, and the answers to these requests.
Torch is the only library that this module imports.

A training method, such as STARE, chooses a name for each of its requests. To answer a request,
`ops/statistics_executor.py` combines the values of all ranks that hold tokens of the batch. A
method's statistics therefore cover the whole batch exactly, in every parallel layout.

Shape legend: N = response positions held by this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Interpolation = Literal["linear", "lower", "higher", "nearest"]


@dataclass(frozen=True)
class TopK:
    """Request for the k positions with the largest `key` among the positions in `mask`. If two keys
    are equal, the position with the lower `index` is preferred.

    Here n is the number of positions where `mask` is True. If `count` is given, k is min(n, count).
    Otherwise k is top_k_count(n, share).
    """

    key: Tensor  # [N] float32
    index: Tensor  # [N] int64 in [0, 2^32), unique over the whole batch
    mask: Tensor  # [N] bool
    share: float = 0.0
    count: Tensor | None = None  # 0-dim, the same on every rank


@dataclass(frozen=True)
class Quantile:
    """Request for the q-quantile of the values of `x` at the positions in `mask`. The values are
    converted to float32 before the quantile is computed. The quantile is NaN if no position is in
    `mask`.

    The quantile is at position (n - 1) q of the n sorted values, counted from 0. If (n - 1) q is
    not an integer, the position is between two sorted values. The field `interpolation` then names
    a method of numpy.quantile, and the quantile is computed by this method. The method 'nearest'
    selects the sorted value at the integer position nearest to (n - 1) q. If two integer positions
    are equally near, the method 'nearest' selects the value at the even position. The conversion to
    float32 can round a value of `x` up. The quantile can be equal to such a rounded value, and is
    then larger than the original value in `x`. Callers must therefore convert `x` to float32 before
    they compare `x` with the quantile.
    """

    x: Tensor  # [N]
    mask: Tensor  # [N] bool
    q: float  # in [0, 1]
    interpolation: Interpolation = "linear"


@dataclass(frozen=True)
class SegmentSum:
    """Request for the sum of `x` over each segment, computed in float64. `number` is the number of
    segments. The sum of a segment covers the positions of the segment at which `mask` is True. The
    sum of a segment without positions in `mask` is 0."""

    x: Tensor  # [N]
    segment: Tensor  # [N] int64 in [0, number)
    number: int  # the same on every rank
    mask: Tensor  # [N] bool


@dataclass(frozen=True)
class Mean:
    """Request for the mean of `x` over the positions in `mask`. The mean is NaN if no position is
    in `mask`. Controllers ignore NaN. `exact`: as in Sum."""

    x: Tensor  # [N]
    mask: Tensor  # [N] bool
    exact: bool = False


@dataclass(frozen=True)
class Sum:
    """Request for the sum of `x` over the positions in `mask`. If `exact` is True, the way in which
    positions are distributed over ranks and micro-batches does not change the bits of the sum. The
    bits of the sum are guaranteed only if the magnitude of every value is below 2^40. Values of
    larger magnitude are added in plain float64, so the order of these values can change the
    rounding of the sum."""

    x: Tensor  # [N]
    mask: Tensor  # [N] bool
    exact: bool = False


@dataclass(frozen=True)
class Max:
    """Request for the largest `x` over the positions in `mask`. The maximum is -inf if no position
    is in `mask`."""

    x: Tensor  # [N]
    mask: Tensor  # [N] bool


@dataclass(frozen=True)
class Count:
    """Request for the number of positions in `mask`."""

    mask: Tensor  # [N] bool


Request = TopK | Quantile | SegmentSum | Mean | Sum | Max | Count


@dataclass(frozen=True)
class Threshold:
    """Answer to a TopK request. A TopK request selects the positions in its mask whose ordering key
    (see `ordering_key`) is equal to or above `Threshold.key`. If `Threshold.k` is 0, the request
    selects no position. All tensors are 0-dim and stay on the device."""

    key: Tensor  # int64, the smallest selected ordering key (see ordering_key)
    k: Tensor  # int64, number of selected positions
    n: Tensor  # int64, number of masked positions
    value: Tensor  # float32, the smallest selected value; +inf if k = 0

    def select(self, key: Tensor, index: Tensor, mask: Tensor) -> Tensor:
        """Returns a mask, [N] bool, which is True for the selected positions."""
        return mask & (ordering_key(key, index) >= self.key) & (self.k > 0)


Statistics = dict[str, Tensor | Threshold]


def scalar(statistics: Statistics, name: str) -> Tensor:
    """Returns the 0-dim tensor that answers the request with the given name. The request must be a
    Mean, Sum, Max, Count or Quantile."""
    return tensor(statistics, name)


def tensor(statistics: Statistics, name: str) -> Tensor:
    """Returns the tensor that answers the request with the given name. Raises TypeError if this
    request is a TopK request, because a TopK request is answered by a Threshold and not by a
    tensor."""
    value = statistics[name]
    if isinstance(value, Threshold):
        raise TypeError(f"{name} is the answer to a TopK")
    return value


def ordering_key(x: Tensor, index: Tensor) -> Tensor:
    """Returns int64 keys [N] that sort like `x`. If two values of `x` are equal, the value with the
    lower index has the larger key. The keys are unique if the indices are unique.

    The high 32 bits of a key contain the bits of the float32 value of `x`. If the value is
    negative, the 31 bits after the sign bit are inverted, so that the keys sort in the right order.
    The low 32 bits contain the complement of `index`.
    """
    bits = (x.to(torch.float32) + 0.0).view(torch.int32).to(torch.int64)
    # int32 values in the order of the floats
    monotone = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (monotone << 32) | (0xFFFFFFFF - index)


def threshold(statistics: Statistics, name: str) -> Threshold:
    """Returns the Threshold that answers the TopK request with the given name. Raises TypeError if
    the request with the given name is not a TopK request."""
    value = statistics[name]
    if not isinstance(value, Threshold):
        raise TypeError(f"{name} is not the answer to a TopK")
    return value


def value_of_key(key: Tensor) -> Tensor:
    """Returns the float32 value `x` from which `ordering_key` made the key."""
    high = key >> 32
    return torch.where(high < 0, high ^ 0x7FFFFFFF, high).to(torch.int32).view(torch.float32)


def top_k_count(n: Tensor, share: float) -> Tensor:
    """Returns the number of positions to select from n positions. The returned number is 0 if n is
    0 or `share` is at most 0. In all other cases, the returned number is the product of `n` and
    `share`, rounded up: `min(n, max(1, int(n * share + 0.999999)))`. The formula does not use
    `ceil`. A rounding error can make the product slightly larger than an integer, and `ceil` would
    then return a number that is too large by 1.

    Source: STARE's released code (arXiv 2606.19236).
    """
    if share <= 0:
        return torch.zeros_like(n)
    k = (n.to(torch.float64) * share + 0.999999).floor().to(n.dtype)
    return torch.minimum(k.clamp_min(1), n)
