"""Rotary embeddings of packed sequences: gathered by position and applied at once, as here, against
Megatron's own, which cuts the row into its sequences. Forward and backward of one layer's queries,
turn by turn; the results are equal.

    python benchmarks/rotary.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import machine
from torch import Tensor

RESULT = Path(__file__).parent / "results/rotary.json"


class OneRank:
    """The context-parallel group that Megatron asks for its size."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=64, help="of a head")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "machine": machine(),
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "sequences": {},
    }
    for count in (8, 32, 128):
        result["sequences"][count] = compared(count, args)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def compared(count: int, args: argparse.Namespace) -> dict[str, float]:
    """Medians in ms, and the median of ours / Megatron's turn by turn."""
    from megatron.core.models.common.embeddings import rope_utils

    length = args.tokens // count
    bounds = torch.arange(0, args.tokens + 1, length, dtype=torch.int32)
    angles = torch.arange(length)[:, None] / 10_000 ** (
        torch.arange(args.size) % (args.size // 2) / (args.size / 2)
    )
    angles = angles[:, None, None]
    positions = torch.arange(args.tokens) % length
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(args.tokens, args.heads, args.size, generator=generator).requires_grad_()
    slopes = torch.randn(queries.shape, generator=generator)

    def ours() -> Tensor:
        return rope_utils._apply_rotary_pos_emb_bshd(
            queries, angles.index_select(0, positions).squeeze(1)
        )

    def megatrons() -> Tensor:
        return rope_utils._apply_rotary_pos_emb_thd(queries, bounds, angles, cp_group=OneRank())

    def once(way: Callable[[], Tensor]) -> float:
        start = time.perf_counter()
        way().backward(slopes)
        taken = time.perf_counter() - start
        queries.grad = None
        return 1e3 * taken

    torch.testing.assert_close(ours(), megatrons())
    turns = [(once(ours), once(megatrons)) for _ in range(args.repeats + 2)][2:]
    return {
        "ours_ms": round(statistics.median(a for a, _ in turns), 2),
        "megatrons_ms": round(statistics.median(b for _, b in turns), 2),
        "ratio": round(statistics.median(a / b for a, b in turns), 3),
    }


if __name__ == "__main__":
    main()
