"""The exact distributed select: the k-th largest of keys that are spread over ranks.

Six all-reduced histograms of eleven bits fix a 64-bit key. Nothing is gathered or compacted, nothing is read by the
host, and because keys are unique there are no ties: the same tokens are selected in every layout.
Shape legend: S selects answered together, N positions held by this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce

DIGIT_BITS = 11
ROUNDS = 6  # 6 * 11 >= 64


def kth_largest(keys: list[Tensor], masks: list[Tensor], k: Tensor, group: ProcessGroup | None) -> Tensor:
    """The k[s]-th largest masked key of every select, over all ranks of `group`.

    Args:
        keys: S tensors [N_s] int64, unique among the masked positions of all ranks.
        masks: S tensors [N_s] bool.
        k: [S] int64, at least 0 and at most the number of masked positions of all ranks.
        group: ranks that hold different positions; None: this rank holds them all.

    Returns:
        [S] int64. Where k is 0 the largest int64, which selects nothing.
    """
    device = k.device
    selects = len(keys)
    row = torch.cat([torch.full_like(key, s) for s, key in enumerate(keys)])
    unsigned = torch.cat(keys) ^ -(2**63)  # flipping the sign bit makes bit order equal to signed order
    alive = torch.cat(masks)
    remaining = k.clone()
    prefix = torch.zeros(selects, dtype=torch.int64, device=device)
    for round_ in range(ROUNDS):
        shift = max(64 - DIGIT_BITS * (round_ + 1), 0)
        width = 64 - DIGIT_BITS * round_ - shift  # 11, and 9 in the last round
        buckets = 2**width
        digit = (unsigned >> shift) & (buckets - 1)
        histogram = torch.zeros(selects * buckets, dtype=torch.int64, device=device)
        histogram.scatter_add_(0, row * buckets + digit, alive.to(torch.int64))
        if group is not None:
            all_reduce(histogram, group=group)
        histogram = histogram.view(selects, buckets)
        at_or_above = histogram.flip(1).cumsum(1).flip(1)  # keys in this bucket or a higher one
        chosen = (at_or_above >= remaining[:, None]).sum(1).sub(1).clamp_min(0)  # highest bucket that reaches k
        above = at_or_above.gather(1, chosen[:, None]) - histogram.gather(1, chosen[:, None])
        remaining = remaining - above.squeeze(1)
        prefix = (prefix << width) | chosen
        alive = alive & (digit == chosen[row])
    return torch.where(k > 0, prefix ^ -(2**63), torch.iinfo(torch.int64).max)
