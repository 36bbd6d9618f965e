"""What the entropy forecast costs: the log-prob pass with and without the two sums over the vocabulary, turn by turn.

Both run on the same micro-batches of the same model in one process, alternating, so that a change of the machine's
speed meets both. Without CUDA the seconds are of the processor, so that other programs do not count. A tall vocabulary
over a small model is the hard case: the head is then most of the pass.

    python benchmarks/forecast_overhead.py
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
from megatron_stare.megatron.passes import Head, score
from megatron_stare.ops.plan import PlanRules, plan_micro_batches
from megatron_stare.ops.vocab_parallel import log_prob_and_entropy
from megatron_stare.weights.hf_folder import HfFolder
from megatron_stare.weights.shape import read_shape

RESULT = Path(__file__).parent / "results/forecast_overhead.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Medians over the repeats with and without, of the pass and of the head's operator alone, and their ratios."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=args.vocab,
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
    batch = random_batch(args)
    rules = PlanRules(data_parallel=1, budget=args.budget, packed=True, hidden=shape.hidden)
    rank_batch = RankBatch(batch, plan_micro_batches(batch.lengths.tolist(), rules), 0, device(), packed=True)
    logits = 3 * torch.randn(args.budget, args.vocab, device=device())
    targets = torch.randint(0, args.vocab, (args.budget,), device=device())

    def whole_pass(second_moment: bool) -> None:
        score(model, rank_batch, head, second_moment=second_moment)

    @torch.no_grad()
    def operator(second_moment: bool) -> None:
        log_prob_and_entropy(logits, targets, vocab_size=args.vocab, second_moment=second_moment)

    measured = {"pass": compare(whole_pass, args.repeats), "operator": compare(operator, args.repeats)}
    parallel_layout.leave()
    clock = "wall" if torch.cuda.is_available() else "processor time"
    return {
        "machine": machine(),
        "clock": clock,
        "settings": vars(args),
        "tokens": int(batch.lengths.sum()),
        **measured,
    }


def compare(run: Any, repeats: int) -> dict[str, Any]:
    """Seconds of `run(True)` and `run(False)`, taken in turns, which of them first changing from turn to turn."""
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


def random_batch(args: argparse.Namespace) -> RolloutBatch:
    """Random tokens, responses of one length."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for i in range(args.samples):
        ids = torch.randint(0, args.vocab, (args.length,), generator=generator).tolist()
        prompt = Prompt(i, str(i), "", "", (1, 2, 3, 4, 5, 6, 7, 8))
        samples.append(Sample(prompt, 0, ids, [0.0] * len(ids), [0] * len(ids), "stop"))
    return RolloutBatch.from_samples(samples)


if __name__ == "__main__":
    main()
