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
CHUNK = 2**18  # keys gone through at a time: few enough to stay in a processor's cache from one operation to the next
_SMALLEST, _LARGEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


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
    # k is at most the number of masked keys, so the others may stand below them all
    keys = [torch.where(mask, key, _SMALLEST) for key, mask in zip(keys, masks, strict=True)]
    buffer = torch.empty(min(CHUNK, max(map(len, keys))), dtype=torch.int64, device=k.device)
    ones = torch.ones_like(buffer)
    remaining = k
    found = torch.zeros_like(k)  # the bits that are fixed, as a number
    for round_ in range(ROUNDS):
        shift = max(64 - DIGIT_BITS * (round_ + 1), 0)
        width = 64 - DIGIT_BITS * round_ - shift  # 11, and 9 in the last round
        # what the first bucket of the round holds, of the bits above `shift`
        first = found << width if round_ else torch.full_like(k, _SMALLEST >> shift)
        # bucket 0 and the last one take the keys that earlier rounds decided, below and above
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
        chosen = (at_or_above >= remaining[:, None]).sum(1).sub(1).clamp_min(0)  # highest bucket that reaches k
        above = at_or_above.gather(1, chosen[:, None]) - undecided.gather(1, chosen[:, None])
        remaining = remaining - above.squeeze(1)
        found = first + chosen
    return torch.where(k > 0, found, _LARGEST)
