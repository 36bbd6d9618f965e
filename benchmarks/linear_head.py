"""The three ways through the output layer: time and extra memory of forward and backward, against
materialised logits.

All three run on the same tensors in one process, turn by turn, with a token-local loss and a
float32 buffer for the weight's gradient, as Megatron has one.

    python benchmarks/linear_head.py
    python benchmarks/linear_head.py --rows 32768 --hidden 5120 --columns 151936 \\
        --dtype bfloat16 --chunk 2048                                    on a GPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import machine
from torch import Tensor
from vocab_parallel import memory

from megatron_stare.ops.linear_head import LinearHead
from megatron_stare.ops.vocab_parallel import Problem

RESULTS = Path(__file__).parent / "results"
RESULT = RESULTS / ("linear_head_gpu.json" if torch.cuda.is_available() else "linear_head.json")
MODES = ("materialised", "gradient_in_forward", "recompute")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--columns", type=int, default=32768)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--entropy-gradient", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = {"machine": machine(), "settings": {**vars(args), "out": None}, "heads": measure(args)}
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """By mode: median seconds, extra MB, both as shares of materialised logits', and the largest
    error of the weight's gradient against it, relative to the largest entry."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype)
    generator = torch.Generator().manual_seed(0)
    hidden = (
        torch.randn(args.rows, args.hidden, generator=generator).to(where, dtype).requires_grad_()
    )
    weight = (torch.randn(args.columns, args.hidden, generator=generator) / args.hidden**0.5).to(
        where, dtype
    )
    weight = weight.requires_grad_()
    targets = torch.randint(0, args.columns, (args.rows,), generator=generator).to(where)
    advantage = torch.randn(args.rows, generator=generator).to(where)
    problem = Problem(args.columns, entropy_gradient=args.entropy_gradient)

    def loss_of(log_prob: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        bonus = 0.01 * entropy if args.entropy_gradient else 0.0
        ratio = (log_prob - log_prob.detach()).exp()
        each = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) + bonus
        return -each.mean(), {}

    buffer = torch.zeros(args.columns, args.hidden, device=where)

    def once(mode: str) -> tuple[float, float]:
        head = LinearHead(problem, mode, args.chunk)  # type: ignore[arg-type]
        buffer.zero_()
        before = memory(where, reset=True)
        seconds = timed(
            lambda: head.loss(hidden, weight, targets, loss_of, buffer)[0].backward(), where
        )
        extra = memory(where) - before
        if weight.grad is not None:  # as Megatron's hook does
            buffer.add_(weight.grad)
        hidden.grad = weight.grad = None
        return seconds, extra

    gradients = {}
    for mode in MODES:
        once(mode)  # warm up
        gradients[mode] = buffer.clone()
    runs = [{mode: once(mode) for mode in MODES} for _ in range(args.repeats)]
    whole = gradients["materialised"]
    found = {}
    for mode in MODES:
        found[mode] = {
            "seconds": statistics.median(run[mode][0] for run in runs),
            "extra_mb": statistics.median(run[mode][1] for run in runs) / 1e6,
            "time_share": statistics.median(run[mode][0] / run["materialised"][0] for run in runs),
            "memory_share": statistics.median(
                run[mode][1] / run["materialised"][1] for run in runs
            ),
            "gradient_error": float((gradients[mode] - whole).abs().max() / whole.abs().max()),
        }
    return {
        mode: {name: float(f"{x:.4g}") for name, x in each.items()} for mode, each in found.items()
    }


def timed(run: Callable[[], Any], where: str) -> float:
    """Wall seconds."""
    if where == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if where == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
