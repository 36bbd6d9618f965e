"""Trains the task of long chains for several seeds with STARE and with GRPO, and writes what the
runs show.

Resumable: finished runs are kept and not run again, and one that was cut short goes on from its
last checkpoint. Start and end of a run are compared problem by problem; over seeds the interval is
Student's.

    python benchmarks/longchain.py --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from machine import machine

from megatron_stare.observability.metrics.paired import RECENT, paired_interval, summary
from megatron_stare.run_dir.run_files import read_run

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs/longchain.yaml"
RESULT = ROOT / "benchmarks/results/longchain.json"
FINISHED = "commit.txt"  # beside a finished run: what it was run from
METHODS = {
    "stare": [],
    # what STARE is compared with differs from it in nothing but weights and gate
    "grpo": [
        "algorithm=grpo",
        "algorithm.aggregation=token_mean",
        "algorithm.clip_high=0.28",
        "algorithm.dual_clip=10",
    ],
}
# means over a step's responses
GROWS = {"length": "response/length_mean", "reflections": "response/reflections"}
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's quantile by number of seeds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--algorithms", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs/longchain", help="where the run directories go"
    )
    args = parser.parse_args()
    for seed in args.seeds:
        for algorithm in args.algorithms:
            run_dir = args.runs / f"{algorithm}-{seed}"
            train(run_dir, seed, METHODS[algorithm])
            record(f"{algorithm}-{seed}", figures(run_dir))


def train(run_dir: Path, seed: int, method: Sequence[str]) -> None:
    """Runs it to its end, unless that is done."""
    if (run_dir / FINISHED).exists():
        return
    describe = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    command = [sys.executable, "-m", "megatron_stare.cli", "train", str(CONFIG), *method]
    command += [f"run.seed={seed}", f"run.dir={run_dir}"]
    if (run_dir / "config.yaml").exists():
        command.append("--resume")
    subprocess.run(command, cwd=ROOT, check=True)
    (run_dir / FINISHED).write_text(commit)


def figures(run_dir: Path) -> dict[str, Any]:
    """Results of a finished run: accuracies at start and end, and the gain's paired 95 % interval.
    Of what grows there are the first step and the mean of the last RECENT."""
    run = read_run(run_dir)
    before, after = run.before, run.after
    assert before is not None and after is not None
    shown: dict[str, Any] = {"commit": (run_dir / FINISHED).read_text().strip()}
    for name, results, mean in (
        ("sampled", "correct", "pass1"),
        ("greedy", "greedy_correct", "greedy"),
    ):
        gain = paired_interval(before[results], after[results], problems=after["problem"])
        shown |= {name: [before[mean], after[mean]], f"{name}_gain_95": [round(x, 4) for x in gain]}
    for name, key in GROWS.items():
        values = run.series(key)[1]
        shown[name] = [round(values[0], 3), round(fmean(values[-RECENT:]), 3)]
    return shown | {
        name: round(value, 4) for name, value in summary(run.metrics).items() if value is not None
    }


def over_seeds(runs: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Mean gain of the seeds, and its 95 % interval by Student's t."""
    told = {}
    for name in ("sampled", "greedy"):
        gains = [run[f"{name}_gain_95"][0] for run in runs]
        half = T_975[len(gains)] * stdev(gains) / math.sqrt(len(gains))
        told[f"{name}_gain_95"] = [
            round(x, 4) for x in (fmean(gains), fmean(gains) - half, fmean(gains) + half)
        ]
    return told


def record(name: str, result: dict[str, Any]) -> None:
    """Adds one run to the result file, and what its method's seeds come to together."""
    results = (
        json.loads(RESULT.read_text()) if RESULT.exists() else {"machine": machine(), "runs": {}}
    )
    results["runs"][name] = result
    by_method = {
        m: [run for key, run in results["runs"].items() if key.startswith(f"{m}-")] for m in METHODS
    }
    results["over_seeds"] = {
        m: over_seeds(runs) for m, runs in by_method.items() if len(runs) in T_975
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    print(name, json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
