"""What STARE costs a training step: against GRPO with the same log-prob pass, and against GRPO without one.

One trainer takes the same step - score, measure, update, on a fixed batch - turn by turn as each case, in another order
every time, so that a change of the machine's speed meets all of them. A ratio is that of two steps of the same turn;
its median comes with the range that holds the true one in 95 of 100 runs. Beside it stands what needs no difference of
two long times: the seconds of the phase in which STARE selects, against the step of GRPO.

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
    parser.add_argument("--repeats", type=int, default=40)
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
        (tokens, phases), *_ = pool.starmap(rank_times, jobs, chunksize=1)
    wall = {name: [sum(step) for step in zip(*each.values(), strict=True)] for name, each in phases.items()}
    selecting = {name: statistics.median(each["measure"]) for name, each in phases.items()}
    return {
        "tokens": tokens,
        "step_s": {name: round(statistics.median(each), 4) for name, each in wall.items()},
        "phase_s": {
            name: {phase: round(statistics.median(times), 5) for phase, times in each.items()}
            for name, each in phases.items()
        },
        "selecting / step of grpo": round(
            (selecting["stare"] - selecting["grpo"]) / statistics.median(wall["grpo"]), 5
        ),
        "step": {f"{a} / {b}": spread(wall[a], wall[b]) for a, b in RATIOS},
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
) -> tuple[int, dict[str, dict[str, list[float]]]]:
    """Tokens of the batch, and the seconds of every step's phases, by case and phase, in order of the turns."""
    trainer = Trainer(next(iter(configs.values())), rank, init)
    batch = ragged_batch(args.prompts * GROUP, VOCAB, median=args.median, sigma=0.7, longest=LONGEST, prompt=PROMPT)
    methods = {name: build_method(config.algorithm) for name, config in configs.items()}
    plan = plan_mini_batches(batch.lengths.tolist(), batch.groups.tolist(), plan_rules(trainer.config))
    names = list(configs)
    phases: dict[str, dict[str, list[float]]] = {name: {"score": [], "measure": [], "update": []} for name in names}
    for turn in range(-1, args.repeats):
        for name in names if turn % 2 else reversed(names):
            # all that a method and its statistics change of a trainer; model and optimizer stay
            trainer.config, trainer.method = configs[name], methods[name]
            batch.advantages = trainer.method.response_advantages(batch)
            for phase, take in (
                ("score", lambda: trainer.score(batch, plan)),
                ("measure", lambda: trainer.measure(trainer.method.initial_state())),
                ("update", trainer.update),
            ):
                dist.barrier()
                started = time.perf_counter()
                take()
                dist.barrier()
                if turn >= 0:  # the first one warms up
                    phases[name][phase].append(time.perf_counter() - started)
    trainer.close()
    return int(batch.lengths.sum()), phases


def spread(one: list[float], other: list[float]) -> dict[str, Any]:
    """Ratios pair by pair: their median, the order statistics that enclose the true median with 95 %, their quartiles;
    and the ratio of the two quickest steps."""
    ratios = sorted(a / b for a, b in zip(one, other, strict=True))
    count = len(ratios)
    outer = max(int(count / 2 - 0.98 * count**0.5), 0)
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "median": round(middle, 4),
        "median_95": [round(ratios[outer], 4), round(ratios[count - 1 - outer], 4)],
        "quartiles": [round(low, 4), round(high, 4)],
        "quickest": round(min(one) / min(other), 4),
    }


if __name__ == "__main__":
    main()
