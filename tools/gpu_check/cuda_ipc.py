"""A tensor that another process reads and writes where it lies: CUDA's memory handles, shared
memory on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from verdict import Bound

GPU_ONLY: tuple[str, ...] = ()
BOUNDS: dict[str, Bound] = {
    "sum seen there, difference": ("<=", 0.0),
    "numbers written there and missing here": ("<=", 0.0),
}
TIMEOUT_S = 120


def run(cpu: bool) -> dict[str, Any]:
    where, count = ("cpu", 10_000) if cpu else ("cuda", 64 * 2**20)
    tensor = torch.arange(count, dtype=torch.int64, device=where)
    wanted = int(tensor.sum())
    context = multiprocessing.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=_other, args=(there, back), daemon=True)
    process.start()
    there.put(tensor)
    seen = back.get(timeout=TIMEOUT_S)
    if not cpu:
        torch.cuda.synchronize()
    missing = int((tensor != torch.arange(count, device=where) + 1).sum())
    there.put(None)  # the tensor may go
    process.join(TIMEOUT_S)
    return {
        "figures": {
            "sum seen there, difference": float(abs(seen - wanted)),
            "numbers written there and missing here": float(missing),
        },
        "bytes": tensor.nbytes,
    }


def _other(there: Any, back: Any) -> None:
    tensor = there.get(timeout=TIMEOUT_S)
    seen = int(tensor.sum())
    tensor += 1
    if tensor.is_cuda:
        torch.cuda.synchronize()
    back.put(seen)
    there.get(timeout=TIMEOUT_S)  # the memory is held until this process has let go of it
