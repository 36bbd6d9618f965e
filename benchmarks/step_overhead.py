"""Measures what STARE costs a training step, against GRPO with the same log-prob pass and against
GRPO without one.

One trainer takes the same step (log-prob pass, measure, update, on a fixed batch) as STARE and as
GRPO by turns, in the order A B B A, so that a change of the machine's speed meets both and each
follows either as often. A ratio is that of two steps of the same turn; its median comes with the
range that holds the true one in 95 of 100 runs. Beside it stands what needs no difference of two
long times: the seconds that STARE takes more than GRPO for selecting and in the loss.

    python benchmarks/step_overhead.py
"""

from __future__ import annotations

import argparse
import itertools
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
from pairs import spread
from tiny import GROUP, ragged_batch, save_tiny

from megatron_stare.algorithms.method import Method, TokenTerms
from megatron_stare.cluster.trainer_group import plan_rules
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.ops.plan import MicroBatchPlan, plan_mini_batches
from megatron_stare.planning.preflight import check
from megatron_stare.records.rollout_batch import RolloutBatch

RESULT = Path(__file__).parent / "results/step_overhead.json"
TARGET = 1.01
VOCAB, PROMPT, LONGEST = 4096, 16, 400
# the same surrogate, so that the weights are all that differs
GRPO = {"name": "grpo", "aggregation": "token_mean", "clip_high": 0.28, "dual_clip": 10.0}
# nats: the gate is open, both sides are selected
STARE = {"name": "stare", "variant": "C2", "entropy_target": 100.0}
NO_PASS = {"surprisal": "rollout", "gate": "lagged"}
PASSES: dict[str, dict[str, Any]] = {
    "with log-prob pass": {},
    "without log-prob pass": {"statistics": NO_PASS},
}
METHODS = {"grpo": GRPO, "stare": STARE}
# loss: the method's own part of update, forward
PHASES = ("log_probs", "measure", "update", "loss")

Times = dict[str, dict[str, list[float]]]  # method -> phase -> seconds, in order of the turns
LAYOUTS = {"tp1": {"tensor": 1}, "tp2": {"tensor": 2}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=4, help="of 8 responses each")
    parser.add_argument("--median", type=float, default=60, help="median response length, tokens")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1, help="a rank")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    result: dict[str, Any] = {
        "machine": machine(),
        "settings": settings,
        "target": {"stare / grpo": TARGET},
    }
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(folder, VOCAB, args.hidden, args.layers)
        for name, parallel in LAYOUTS.items():
            result[name] = measure(args, folder, parallel)
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def measure(args: argparse.Namespace, folder: str, parallel: dict[str, int]) -> dict[str, Any]:
    """One layout: medians, paired ratios with their spread, and the share of a step that STARE
    itself takes."""
    configs = {
        name: {
            method: config_of(args, folder, parallel, {"algorithm": METHODS[method], **case})
            for method in METHODS
        }
        for name, case in PASSES.items()
    }
    world = configs["with log-prob pass"]["grpo"].parallel.world_size
    with (
        tempfile.TemporaryDirectory() as meeting,
        multiprocessing.get_context("spawn").Pool(world) as pool,
    ):
        jobs = [(rank, f"file://{meeting}/ranks", args, configs) for rank in range(world)]
        (tokens, times), *_ = pool.starmap(rank_times, jobs, chunksize=1)
    found = {name: summary(each) for name, each in times.items()}
    step = {name: statistics.median(steps(each["stare"])) for name, each in times.items()}
    on_policy = statistics.median(steps(times["without log-prob pass"]["grpo"]))
    across = {
        f"stare {name} / grpo without log-prob pass": round(step[name] / on_policy, 4)
        for name in step
    }
    return {"tokens": tokens, **found, "ratios of medians": across}


def steps(phases: dict[str, list[float]]) -> list[float]:
    """Seconds of whole steps."""
    return [
        sum(step)
        for step in zip(phases["log_probs"], phases["measure"], phases["update"], strict=True)
    ]


def summary(times: Times) -> dict[str, Any]:
    """Summary of the two methods' turns: seconds of steps and phases, and STARE's seconds as a
    share of GRPO's."""
    medians = {
        name: {phase: statistics.median(each[phase]) for phase in PHASES}
        for name, each in times.items()
    }
    more = {
        phase: medians["stare"][phase] - medians["grpo"][phase] for phase in ("measure", "loss")
    }
    whole = statistics.median(steps(times["grpo"]))
    return {
        "step_s": {name: round(statistics.median(steps(each)), 4) for name, each in times.items()},
        "phase_s": {
            name: {phase: round(s, 5) for phase, s in each.items()}
            for name, each in medians.items()
        },
        "stare's own seconds / step of grpo": round(sum(more.values()) / whole, 5),
        "stare / grpo": spread(steps(times["stare"]), steps(times["grpo"])),
    }


def config_of(
    args: argparse.Namespace, folder: str, parallel: dict[str, int], case: dict[str, Any]
) -> Config:
    tree = {
        "model": {"path": folder},
        "parallel": parallel,
        "batch": {"micro_batch_tokens": 1024},
        "rollout": {"max_prompt_tokens": PROMPT, "max_new_tokens": LONGEST},
        "optimizer": {"lr": 1e-9},  # every step is the same step
        # it would be made in the log-prob pass, where there is one
        "observability": {"entropy_forecast": False},
        "runtime": {"trainer_threads": args.threads},
        **case,
    }
    return check(Config.model_validate(tree)).config


def rank_times(
    rank: int, init: str, args: argparse.Namespace, configs: dict[str, dict[str, Config]]
) -> tuple[int, dict[str, Times]]:
    """Tokens of the batch, and this rank's seconds by kind of step, method and phase."""
    run = resolve_run(configs["with log-prob pass"]["grpo"])
    trainer = Trainer(run, rank, init)
    batch = ragged_batch(
        args.prompts * GROUP, VOCAB, median=args.median, sigma=0.7, longest=LONGEST, prompt=PROMPT
    )
    plan = plan_mini_batches(batch.lengths.tolist(), batch.groups.tolist(), plan_rules(run))
    times = {
        name: turns(trainer, batch, plan, args.repeats, methods)
        for name, methods in configs.items()
    }
    trainer.close()
    return int(batch.lengths.sum()), times


def turns(
    trainer: Trainer,
    batch: RolloutBatch,
    plan: MicroBatchPlan,
    repeats: int,
    configs: dict[str, Config],
) -> Times:
    """Seconds of the methods' steps."""
    methods = {name: config.algorithm.method for name, config in configs.items()}
    clocks = {name: Clock(method) for name, method in methods.items()}
    names = list(configs)
    times: Times = {name: {phase: [] for phase in PHASES} for name in names}
    for turn in range(-1, repeats):
        for name in names if turn % 2 else reversed(names):
            # all that a method and its statistics change of a trainer; model and optimizer stay
            trainer.config, trainer.method = configs[name], methods[name]
            share = trainer.method.judge(batch).share(plan.branches_of(trainer.data_rank()))
            clocks[name].seconds = 0.0
            marks = [now()]
            trainer.compute_log_probs(share, plan)
            marks.append(now())
            trainer.measure(trainer.method.initial_state())
            marks.append(now())
            trainer.update()
            marks.append(now())
            if turn >= 0:  # the first one warms up
                taken = [after - before for before, after in itertools.pairwise(marks)]
                for phase, seconds in zip(PHASES, [*taken, clocks[name].seconds], strict=True):
                    times[name][phase].append(seconds)
    return times


class Clock:
    """Counts the seconds that a method's loss takes."""

    def __init__(self, method: Method) -> None:
        self.seconds = 0.0
        self._loss = method.token_loss
        object.__setattr__(method, "token_loss", self._timed)  # methods are frozen

    def _timed(self, *arguments: Any) -> TokenTerms:
        started = time.perf_counter()
        terms = self._loss(*arguments)
        self.seconds += time.perf_counter() - started
        return terms


def now() -> float:
    """When all ranks are here."""
    dist.barrier()
    return time.perf_counter()


if __name__ == "__main__":
    main()
