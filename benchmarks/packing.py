"""Packed against padded micro-batches on a ragged batch: tokens a second of the log-prob pass and
of the gradient.

Both run the same samples under the same token budget in one process, turn by turn, so that a change
of the machine's speed meets both. Lengths are log-normal, as those of long chains of thought are.

    python benchmarks/packing.py
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
from megatron_stare.megatron.step.passes import accumulate_gradients, compute_log_probs
from megatron_stare.models import cost_of
from megatron_stare.ops.plan import PlanRules, plan_micro_batches

RESULT = Path(__file__).parent / "results/packing.json"
VOCAB = 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--median", type=float, default=60, help="median response length, tokens")
    parser.add_argument("--sigma", type=float, default=0.9, help="spread of the lengths' logarithm")
    parser.add_argument("--longest", type=int, default=500)
    parser.add_argument("--budget", type=int, default=4096, help="tokens a micro-batch")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = measure(args)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the repeats, and the ratio packed / padded pair by pair."""
    batch = ragged_batch(
        args.samples, VOCAB, median=args.median, sigma=args.sigma, longest=args.longest
    )
    tokens = int(batch.lengths.sum())
    with tiny_policy(VOCAB, args.hidden, args.layers) as (model, shape, layout):
        head = Head(shape.vocab_size, 1.0, layout)

        def once(packed: bool) -> tuple[float, int]:
            rules = PlanRules(
                data_parallel=1, budget=args.budget, packed=packed, cost=cost_of(shape)
            )
            start = time.perf_counter()
            plan = plan_micro_batches(batch.lengths.tolist(), rules)
            share = batch.share(plan.branches_of(0))
            rank_batch = RankBatch(share, plan, 0, device(), WholeSequences(packed=packed))
            compute_log_probs(model, rank_batch, head)
            accumulate_gradients(
                model, rank_batch, head, lambda lp, _, __: (lp.sum() / tokens, {"lp": lp.detach()})
            )
            return time.perf_counter() - start, len(rank_batch.micro_batches)

        once(True), once(False)  # warm up
        pairs = [(once(True), once(False)) for _ in range(args.repeats)]
    return {
        "machine": machine(),
        "settings": vars(args),
        "tokens": tokens,
        "mean_length": round(float(batch.lengths.double().mean()), 1),
        "longest": int(batch.lengths.max()),
        "micro_batches": {"packed": pairs[0][0][1], "padded": pairs[0][1][1]},
        "tokens_per_s": {
            "packed": round(tokens / statistics.median(p[0] for p, _ in pairs)),
            "padded": round(tokens / statistics.median(q[0] for _, q in pairs)),
        },
        "speedup": [round(q[0] / p[0], 3) for p, q in pairs],
        "speedup_median": round(statistics.median(q[0] / p[0] for p, q in pairs), 3),
    }


if __name__ == "__main__":
    main()
