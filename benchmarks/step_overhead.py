"""What STARE costs a training step: against GRPO with the same log-prob pass, and against GRPO without one.

One trainer takes the same step - score, measure, update, on a fixed batch - turn by turn as each case, in another order
every time, so that a change of the machine's speed meets all of them. A ratio is that of two steps of the same turn.

    python benchmarks/step_overhead.py
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch.distributed as dist
from machine import machine
from tiny import GROUP, ragged_batch, save_tiny

from megatron_stare.config.schema import Config
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.methods import build_method
from megatron_stare.ops.plan import plan_mini_batches
from megatron_stare.orchestration.groups import plan_rules
from megatron_stare.preflight import check

RESULT = Path(__file__).parent / "results/step_overhead.json"
TARGET = 1.01
VOCAB, PROMPT, LONGEST = 4096, 16, 400
# the same surrogate, so that the weights are all that differs
GRPO = {"name": "grpo", "aggregation": "token_mean", "clip_high": 0.28, "dual_clip": 10.0}
STARE = {"name": "stare", "variant": "C2", "entropy_target": 100.0}  # nats: the gate is open, both sides are selected
NO_PASS = {"surprisal": "rollout", "gate": "lagged"}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": GRPO},
    "stare": {"algorithm": STARE},
    "grpo without log-prob pass": {"algorithm": GRPO, "statistics": NO_PASS},
    "stare without log-prob pass": {"algorithm": STARE, "statistics": NO_PASS},
}
RATIOS = (
    ("stare", "grpo"),
    ("stare", "grpo without log-prob pass"),
    ("stare without log-prob pass", "grpo without log-prob pass"),
)
LAYOUTS = {"tp1": {"tensor": 1}, "tp2": {"tensor": 2}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4, help="of 8 responses each")
    parser.add_argument("--median", type=float, default=60, help="median response length, tokens")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1, help="a rank")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    result: dict[str, Any] = {"machine": machine(), "settings": settings, "target": {"stare / grpo": TARGET}}
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(folder, VOCAB, args.hidden, args.layers)
        for name, parallel in LAYOUTS.items():
            result[name] = measure(args, folder, parallel)
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def measure(args: argparse.Namespace, folder: str, parallel: dict[str, int]) -> dict[str, Any]:
    """Medians by case, and paired ratios with their spread, of one layout."""
    configs = {name: config_of(args, folder, parallel, case) for name, case in CASES.items()}
    world = next(iter(configs.values())).parallel.world_size
    with (
        tempfile.TemporaryDirectory() as meeting,
        multiprocessing.get_context("spawn").Pool(world) as pool,
    ):
        jobs = [(rank, f"file://{meeting}/ranks", args, configs) for rank in range(world)]
        (tokens, wall, cpu), *_ = pool.starmap(rank_times, jobs, chunksize=1)
    return {
        "tokens": tokens,
        "step_s": {name: round(statistics.median(each), 4) for name, each in wall.items()},
        "wall": {f"{a} / {b}": spread(wall[a], wall[b]) for a, b in RATIOS},
        "cpu of the first rank": {f"{a} / {b}": spread(cpu[a], cpu[b]) for a, b in RATIOS},
    }


def config_of(args: argparse.Namespace, folder: str, parallel: dict[str, int], case: dict[str, Any]) -> Config:
    tree = {
        "model": {"path": folder},
        "parallel": parallel,
        "batch": {"micro_batch_tokens": 1024},
        "rollout": {"max_prompt_tokens": PROMPT, "max_new_tokens": LONGEST},
        "optimizer": {"lr": 1e-9},  # every step is the same step
        "observability": {"entropy_forecast": False},  # it would be made in the log-prob pass, where there is one
        "runtime": {"trainer_threads": args.threads},
        **case,
    }
    return check(Config.model_validate(tree))


def rank_times(
    rank: int, init: str, args: argparse.Namespace, configs: dict[str, Config]
) -> tuple[int, dict[str, list[float]], dict[str, list[float]]]:
    """Tokens of the batch, and this rank's wall and CPU seconds of every step, by case, in order of the turns."""
    trainer = Trainer(next(iter(configs.values())), rank, init)
    batch = ragged_batch(args.prompts * GROUP, VOCAB, median=args.median, sigma=0.7, longest=LONGEST, prompt=PROMPT)
    methods = {name: build_method(config.algorithm) for name, config in configs.items()}
    plan = plan_mini_batches(batch.lengths.tolist(), batch.groups.tolist(), plan_rules(trainer.config))
    names = list(configs)
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-1, args.repeats):
        for name in names if turn % 2 else reversed(names):
            # all that a method and its statistics change of a trainer; model and optimizer stay
            trainer.config, trainer.method = configs[name], methods[name]
            batch.advantages = trainer.method.response_advantages(batch)
            dist.barrier()
            started, worked = time.perf_counter(), time.process_time()
            trainer.score(batch, plan)
            trainer.measure(trainer.method.initial_state())
            trainer.update()
            dist.barrier()
            if turn >= 0:  # the first one warms up
                wall[name].append(time.perf_counter() - started)
                cpu[name].append(time.process_time() - worked)
    trainer.close()
    return int(batch.lengths.sum()), wall, cpu


def spread(one: list[float], other: list[float]) -> dict[str, Any]:
    """Ratios pair by pair: median, quartiles, extremes."""
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    rounded = {"median": middle, "quartiles": (low, high), "extremes": (min(ratios), max(ratios))}
    return {
        name: [round(x, 4) for x in value] if isinstance(value, tuple) else round(value, 4)
        for name, value in rounded.items()
    }


if __name__ == "__main__":
    main()
