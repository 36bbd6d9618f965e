"""Measures what older tokens do to the reward of the quickstart's task, over several seeds.

Rollouts are sampled ahead of training, or responses are cut and continued; both are compared with
the synchronous run.

Runs are a third of the quickstart's steps, half its batch, on one rank in one process. Compared is
the share of held-out problems that are solved at the end, sampled, on the same problems: over all
seeds together, where a problem's answers are one cluster, and by seed, where every seed is one
difference (Student's t, which knows of the spread between runs and is wide with three of them).

Resumable: finished runs are kept, others are continued.

    nice -n 10 python benchmarks/staleness_reward.py
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from machine import machine

from megatron_stare.observability.metrics.paired import paired_interval
from megatron_stare.run_dir.run_files import read_run

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/staleness_reward.json"
MEASURED = "measured.json"  # beside a finished run
CORRECTED = "algorithm.correction={mode: truncate}"
SYNCHRONOUS = "synchronous"
ARMS: dict[str, list[str]] = {
    SYNCHRONOUS: [],
    "staleness 0": ["rollout.staleness=0"],
    "staleness 1": ["rollout.staleness=1", CORRECTED],
    "partial": ["partial.tokens=2", "partial.prompts=32", CORRECTED],
    "partial, masked": ["partial.tokens=2", "partial.prompts=32", "rollout.stale_tokens=mask"],
}
# by number of seeds
STUDENT_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
TARGET = 0.03  # the interval of `staleness 1` is to lie within this of 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--arms", nargs="+", default=[SYNCHRONOUS, "staleness 1", "partial"], choices=list(ARMS)
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--problems", type=int, default=1000, help="held-out, of each evaluation")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs/staleness_reward", help="where run directories go"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    for seed in args.seeds:
        for arm in args.arms:
            train(args, arm, seed)
    result = {
        "machine": machine(),
        "settings": {"steps": args.steps, "problems": args.problems},
        **compared(args),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def folder(args: argparse.Namespace, arm: str, seed: int) -> Path:
    return args.runs.resolve() / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}"


def train(args: argparse.Namespace, arm: str, seed: int) -> None:
    """Makes a run, or what is left of it, unless it is finished."""
    run_dir = folder(args, arm, seed)
    if (run_dir / MEASURED).exists():
        return
    settings = {
        "run.dir": run_dir,
        "run.seed": seed,
        "run.steps": args.steps,
        "run.checkpoint_every": 25,
        "runtime.runner": "inline",
        "parallel.tensor": 1,
        "batch.prompts": 16,
        "rollout.threads": 1,
        "eval.prompts": args.problems,
        "eval.greedy": "false",
        "observability.sinks": "[jsonl]",
    }
    start = time.monotonic()
    subprocess.run(
        [
            *(sys.executable, "-m", "megatron_stare.cli", "train", "configs/quickstart.yaml"),
            *(f"{name}={value}" for name, value in settings.items()),
            *ARMS[arm],
            *(["--resume"] if (run_dir / "config.yaml").exists() else []),
        ],
        cwd=ROOT,
        check=True,
    )
    (run_dir / MEASURED).write_text(json.dumps({"wall_s": round(time.monotonic() - start)}))


def compared(args: argparse.Namespace) -> dict[str, Any]:
    """Every arm that is finished for all of the seeds, and how it differs from the synchronous
    one."""
    arms = {
        arm: [read_run(folder(args, arm, seed)) for seed in args.seeds]
        for arm in ARMS
        if all((folder(args, arm, seed) / MEASURED).exists() for seed in args.seeds)
    }
    found: dict[str, Any] = {"seeds": args.seeds, "target": {"staleness 1": TARGET}, "arms": {}}
    for arm, runs in arms.items():
        each: dict[str, Any] = {"pass1": [run.after["pass1"] for run in runs if run.after]}
        for name in (
            "staleness/mean_age",
            "staleness/max_age",
            "partial/continued",
            "staleness/masked",
        ):
            values = [row[name] for run in runs for row in run.metrics if name in row]
            if values:
                each[name] = round((max if name.endswith("max_age") else fmean)(values), 4)
        if arm != SYNCHRONOUS and SYNCHRONOUS in arms:
            each["against_synchronous"] = difference(arms[SYNCHRONOUS], runs)
        found["arms"][arm] = each
    return found


def difference(synchronous: list[Any], runs: list[Any]) -> dict[str, Any]:
    """Difference in the share of problems solved, arm less synchronous: mean and 95 % interval,
    pooled and by seed."""
    before = [x for run in synchronous for x in run.after["correct"]]
    after = [x for run in runs for x in run.after["correct"]]
    problems = [problem for run in runs for problem in run.after["problem"]]
    assert problems == [problem for run in synchronous for problem in run.after["problem"]]
    pooled = paired_interval(before, after, problems=problems)
    by_seed = [b.after["pass1"] - a.after["pass1"] for a, b in zip(synchronous, runs, strict=True)]
    found: dict[str, Any] = {"pooled_95": [round(x, 4) for x in pooled]}
    if len(by_seed) in STUDENT_95:
        mean, half = (
            fmean(by_seed),
            STUDENT_95[len(by_seed)] * stdev(by_seed) / math.sqrt(len(by_seed)),
        )
        found["by_seed_95"] = [round(x, 4) for x in (mean, mean - half, mean + half)]
    return found


if __name__ == "__main__":
    main()
