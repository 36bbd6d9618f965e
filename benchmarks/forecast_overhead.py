"""Measures the entropy forecast's cost: the log-prob pass with and without two sums over the
vocabulary, by turns.

Both run on the same micro-batches of the same model in one process, alternating, so that a change
of the machine's speed meets both. Without CUDA the seconds are of the processor, so that other
programs do not count. A tall vocabulary over a small model is the hard case: the head is then most
of the pass.

    python benchmarks/forecast_overhead.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from machine import machine
from tiny import ragged_batch, tiny_policy

from megatron_stare.megatron.backend.cpu_backend import device
from megatron_stare.megatron.batching.microbatch import RankBatch
from megatron_stare.megatron.batching.sequence_layout import WholeSequences
from megatron_stare.megatron.model.head import Head
from megatron_stare.megatron.step.passes import compute_log_probs
from megatron_stare.models import cost_of
from megatron_stare.ops.plan import PlanRules, plan_micro_batches
from megatron_stare.ops.vocab_parallel import log_prob_and_entropy

RESULT = Path(__file__).parent / "results/forecast_overhead.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="tokens a response")
    parser.add_argument("--budget", type=int, default=512, help="tokens a micro-batch")
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = measure(args)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the repeats with and without, of the pass and of the head's operator alone, and
    their ratios."""
    batch = ragged_batch(
        args.samples, args.vocab, median=args.length, sigma=0.0, longest=args.length
    )
    logits = 3 * torch.randn(args.budget, args.vocab, device=device())
    targets = torch.randint(0, args.vocab, (args.budget,), device=device())
    with tiny_policy(args.vocab, args.hidden, args.layers) as (model, shape, layout):
        head = Head(shape.vocab_size, 1.0, layout)
        rules = PlanRules(data_parallel=1, budget=args.budget, packed=True, cost=cost_of(shape))
        plan = plan_micro_batches(batch.lengths.tolist(), rules)
        share = batch.share(plan.branches_of(0))
        rank_batch = RankBatch(share, plan, 0, device(), WholeSequences(packed=True))

        def whole_pass(second_moment: bool) -> None:
            compute_log_probs(model, rank_batch, head, second_moment=second_moment)

        @torch.no_grad()
        def operator(second_moment: bool) -> None:
            log_prob_and_entropy(
                logits, targets, vocab_size=args.vocab, second_moment=second_moment
            )

        measured = {
            "pass": compare(whole_pass, args.repeats),
            "operator": compare(operator, args.repeats),
        }
    clock = "wall" if torch.cuda.is_available() else "processor time"
    return {
        "machine": machine(),
        "clock": clock,
        "settings": vars(args),
        "tokens": int(batch.lengths.sum()),
        **measured,
    }


def compare(run: Any, repeats: int) -> dict[str, Any]:
    """Seconds of `run(True)` and `run(False)`, taken in turns, which of them first changing from
    turn to turn."""
    times: dict[bool, list[float]] = {True: [], False: []}
    run(True), run(False)  # warm up
    for i in range(repeats):
        for second_moment in (i % 2 == 0, i % 2 == 1):
            start = now()
            run(second_moment)
            times[second_moment].append(now() - start)
    with_sums, without = statistics.median(times[True]), statistics.median(times[False])
    return {
        "seconds_with": round(with_sums, 5),
        "seconds_without": round(without, 5),
        "ratio_of_medians": round(with_sums / without, 3),
        "ratios": [round(a / b, 3) for a, b in zip(times[True], times[False], strict=True)],
    }


def now() -> float:
    """Seconds: of the wall clock, with the GPU's work done, or of this process's processor time."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
