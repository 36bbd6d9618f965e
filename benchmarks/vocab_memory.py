"""Proof of the memory floor: log-prob, entropy and both their gradients at 8k x 152k bfloat16 on a
CPU, in a process that may not hold more than its imports, its logits and 360 MB: below 600 MB
beside the logits with PyTorch's CPU build, whose imports take 240. With its build with CUDA they
take 535.

Once everything is imported, RLIMIT_DATA is set: it makes an allocation above it fail. It leaves out
the files that libraries are mapped from, so the largest resident memory, which has all, is held
against the same limit. 64 random rows are checked against float64. Exits 1 where one is off or the
memory was above the limit.

    python benchmarks/vocab_memory.py
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results/vocab_memory.json"
ROOM = 360 * 10**6  # beside imports and logits
CHECKED_ROWS = 64
TEMPERATURE = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=151936)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    # threads that are never used would have stacks all the same
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    result = {"rows": args.rows, "columns": args.columns, "threads": args.threads}
    result |= run(args.rows, args.columns, 2 * args.rows * args.columns + ROOM)
    peak = high_water() / 1e6
    result["peak_rss_mb"] = peak
    result["within"] = (
        peak <= result["limit_mb"] and result["largest_error"]["allowed_share"] <= 1.0
    )
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return int(not result["within"])


def run(rows: int, columns: int, more: int) -> dict[str, Any]:
    """Forward and backward with so many bytes more than imports take, and the largest errors of the
    checked rows."""
    import time

    import torch
    from machine import process_memory

    from megatron_stare.ops.vocab_parallel import log_prob_and_entropy

    imported = high_water()
    most = int(process_memory("VmData")) + more
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    generator = torch.Generator().manual_seed(0)
    logits = torch.empty(rows, columns, dtype=torch.bfloat16)
    for row in logits:
        row.copy_(3 * torch.randn(columns, generator=generator))
    targets = torch.randint(0, columns, (rows,), generator=generator)
    upstream = torch.randn(2, rows, generator=generator)
    checked = torch.randperm(rows, generator=generator)[:CHECKED_ROWS]
    kept = logits[checked]
    leaf = logits.requires_grad_()
    mine = leaf.view(rows, columns)  # not a leaf, because it is written over
    start = time.perf_counter()
    log_prob, entropy = log_prob_and_entropy(
        mine,
        targets,
        vocab_size=columns,
        temperature=TEMPERATURE,
        entropy_gradient=True,
        overwrite_logits=True,
    )
    (gradient,) = torch.autograd.grad((log_prob, entropy), mine, tuple(upstream))
    seconds = time.perf_counter() - start
    assert gradient.data_ptr() == logits.data_ptr()
    worst = {"log_prob": 0.0, "entropy": 0.0, "gradient": 0.0, "allowed_share": 0.0}
    for row, z in zip(checked, kept, strict=True):
        truth = z.double().requires_grad_()
        log_p = (truth / TEMPERATURE).log_softmax(0)
        wanted = log_p[targets[row]], -(log_p.exp() * log_p).sum()
        (of_z,) = torch.autograd.grad(wanted, truth, tuple(upstream[:, row].double()))
        errors = [
            float((got[row].double() - want).abs())
            for got, want in zip((log_prob, entropy), wanted, strict=True)
        ]
        off = (gradient[row].double() - of_z).abs()
        # float32 sums for the outputs; for the gradient bfloat16's rounding, 2^-9, and that of what
        # it is made from
        shares = [
            errors[0] / 1e-5,
            errors[1] / 1e-5,
            float((off / (2**-8 * of_z.abs() + 1e-8)).max()),
        ]
        found = [*errors, float(off.max()), max(shares)]
        worst = {name: max(old, new) for (name, old), new in zip(worst.items(), found, strict=True)}
    limit = (imported + more) / 1e6
    return {
        "limit_mb": limit,
        "imports_mb": imported / 1e6,
        "seconds": round(seconds, 3),
        "largest_error": worst,
    }


def high_water() -> float:
    """Bytes of the largest resident memory so far."""
    from machine import process_memory

    return process_memory("VmHWM")


if __name__ == "__main__":
    sys.exit(main())
