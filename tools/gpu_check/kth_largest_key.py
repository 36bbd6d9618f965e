"""The exact select over as many keys as a large batch has tokens, on one device, against torch's
sort and top-k."""

from __future__ import annotations

from typing import Any

import torch
from clock import fastest
from verdict import Bound

from megatron_stare.ops.statistics_executor import kth_largest
from megatron_stare.records.batch_statistics import ordering_key

GPU_ONLY = ("time over an unsorted top-k",)
BOUNDS: dict[str, Bound] = {
    "keys at or above the threshold, less those asked for": ("<=", 0.0),
    "keys asked for, less those at or above the threshold": ("<=", 0.0),
    "thresholds that differ from the sort's": ("<=", 0.0),
    "time over an unsorted top-k": ("<=", 3.0),
}


def run(cpu: bool) -> dict[str, Any]:
    where, count = ("cpu", 10_007) if cpu else ("cuda", 67_000_000)
    surprisal = (
        torch.empty(count).exponential_(2.0, generator=torch.Generator().manual_seed(0)).to(where)
    )
    surprisal[1::1000] = surprisal[0].item()  # ties, which the token's number decides
    keys = ordering_key(surprisal, torch.arange(count, device=where))
    mask = torch.ones(count, dtype=torch.bool, device=where)
    k = count // 10
    asked = torch.tensor([k], device=where)
    (threshold,) = kth_largest([keys], [mask], asked, None)
    found = int((keys >= threshold).sum())
    wanted = keys.sort(descending=True).values[k - 1]
    seconds = fastest(lambda: kth_largest([keys], [mask], asked, None))
    top = fastest(lambda: torch.topk(surprisal, k, sorted=False))
    return {
        "figures": {
            "keys at or above the threshold, less those asked for": float(found - k),
            "keys asked for, less those at or above the threshold": float(k - found),
            "thresholds that differ from the sort's": float(threshold != wanted),
            "time over an unsorted top-k": seconds / top,
            "seconds": seconds,
        },
        "keys": count,
    }
