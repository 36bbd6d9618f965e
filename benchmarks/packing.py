"""Packed against padded micro-batches on a ragged batch: tokens a second of the log-prob pass and of the gradient.

Both run the same samples under the same token budget in one process, turn by turn, so that a change of the machine's
speed meets both. Lengths are log-normal, as those of long chains of thought are.

    python benchmarks/packing.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from machine import machine
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_stare.batch import Prompt, RolloutBatch, Sample
from megatron_stare.config.schema import ModelConfig, ParallelConfig
from megatron_stare.megatron import layout as parallel_layout
from megatron_stare.megatron.cpu_backend import device
from megatron_stare.megatron.microbatch import RankBatch
from megatron_stare.megatron.model import build_policy, load_hf
from megatron_stare.megatron.passes import Head, accumulate_gradients, score
from megatron_stare.ops.plan import PlanRules, plan_micro_batches
from megatron_stare.weights.hf_folder import HfFolder
from megatron_stare.weights.shape import read_shape

RESULT = Path(__file__).parent / "results/packing.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Medians over the repeats, and the ratio packed / padded pair by pair."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    shape, parallel = read_shape(folder), ParallelConfig()
    layout = parallel_layout.join(parallel, 0, f"file://{folder}/ranks", seed=1, timeout_s=60)
    model = build_policy(shape, ModelConfig(path=str(folder)), parallel, layout, distributed_optimizer=False)
    load_hf(model, HfFolder(folder), shape, layout)
    head = Head(shape.vocab_size, 1.0, layout)
    batch = ragged(args)
    tokens = int(batch.lengths.sum())

    def once(packed: bool) -> tuple[float, int]:
        rules = PlanRules(data_parallel=1, budget=args.budget, packed=packed, hidden=shape.hidden)
        start = time.perf_counter()
        rank_batch = RankBatch(batch, plan_micro_batches(batch.lengths.tolist(), rules), 0, device(), packed=packed)
        score(model, rank_batch, head)
        accumulate_gradients(model, rank_batch, head, lambda lp, ent, micro: (lp.sum() / tokens, {"lp": lp.detach()}))
        return time.perf_counter() - start, len(rank_batch.micro_batches)

    once(True), once(False)  # warm up
    pairs = [(once(True), once(False)) for _ in range(args.repeats)]
    parallel_layout.leave()
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


def ragged(args: argparse.Namespace) -> RolloutBatch:
    """Random tokens with log-normal response lengths."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for i in range(args.samples):
        length = int(args.median * torch.randn((), generator=generator).mul(args.sigma).exp())
        ids = torch.randint(0, 1000, (min(max(length, 2), args.longest),), generator=generator).tolist()
        prompt = Prompt(i, str(i), "", "", (1, 2, 3, 4, 5, 6, 7, 8))
        samples.append(Sample(prompt, 0, ids, [0.0] * len(ids), [0] * len(ids), "stop"))
    return RolloutBatch.from_samples(samples)


if __name__ == "__main__":
    main()
