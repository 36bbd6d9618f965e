"""Asks whether the entropy forecast of a step predicts the change of entropy that the step causes.

A controller that looks ahead needs such a forecast. Trains the quickstart with several seeds and
measures the change at every step. Before each step, a line y = kappa u + d, fitted to the earlier
steps, predicts the measured change y from the forecast u. Its squared errors are compared with
those of predictions that do not look ahead. The question passes if the line's mean squared error
is below that of every other prediction, with a 95 % interval over the seeds that excludes 0.

Resumable: finished runs are kept, and a run that was cut short continues from its last checkpoint.

    python benchmarks/forecast_value.py --jobs 2
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from machine import machine

from megatron_stare.run_dir.run_files import read_run

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/forecast_value.json"
SEEDS = range(101, 109)
FORGET = 0.99  # weight of a step's measurement in the fit of the next step
BEGINNING = 5  # measurements before the first prediction
CLIP = 3.0  # standard deviations by which a measurement may miss its prediction in the fit
T_975 = {8: 2.365}  # Student's quantile by number of seeds
SETTINGS = [
    "parallel.tensor=1",
    "rollout.threads=1",
    "observability.measured_every=1",
    "eval.prompts=0",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/forecast_value")
    args = parser.parse_args()
    with ThreadPoolExecutor(args.jobs) as jobs:
        series = dict(
            zip(SEEDS, jobs.map(lambda seed: run(args.runs / str(seed), seed), SEEDS), strict=True)
        )
    told = {
        "machine": machine(),
        "settings": ["configs/quickstart.yaml", *SETTINGS],
        "forgetting": FORGET,
        **judge({seed: each[:3] for seed, each in series.items()}),
        "series": {
            seed: {
                name: " ".join(f"{value:.6g}" for value in row)
                for name, row in zip(("forecast", "measured", "lr", "entropy"), each, strict=True)
            }
            for seed, each in series.items()
        },
    }
    RESULT.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps({name: told[name] for name in told if name != "series"}, indent=1))


def run(folder: Path, seed: int) -> np.ndarray:
    """Trains with a seed, unless that is done, and returns [4, steps]: forecast, measured change,
    learning rate and entropy of every step."""
    command = [sys.executable, "-m", "megatron_stare.cli", "train", "configs/quickstart.yaml"]
    command += [*SETTINGS, f"run.seed={seed}", f"run.dir={folder}"]
    if (folder / "config.yaml").exists():
        command.append("--resume")
    if not (folder / "finished").exists():
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (folder / "finished").touch()
    names = "forecast/entropy_change", "forecast/measured_change", "optimizer/lr", "entropy/mean"
    rows = [[row[name] for name in names] for row in read_run(folder).metrics]
    return np.array(rows).T.round(9)


class Line:
    """Predicts y from x by recursive least squares with forgetting (Ljung, System Identification,
    1999, section 11.2). Measurements far from their prediction are clipped."""

    def __init__(self, size: int) -> None:
        self.slope, self._spread = np.zeros(size), 1e6 * np.eye(size)
        self._square, self._count = 0.0, 0

    def predict(self, x: np.ndarray) -> float:
        return float(x @ self.slope)

    def learn(self, x: np.ndarray, y: float) -> None:
        missed = y - self.predict(x)
        if self._count >= BEGINNING:
            most = CLIP * math.sqrt(self._square)
            missed = min(max(missed, -most), most)
        gain = self._spread @ x / (FORGET + x @ self._spread @ x)
        self.slope = self.slope + gain * missed
        self._spread = (self._spread - np.outer(gain, x @ self._spread)) / FORGET
        self._count += 1
        self._square += (missed**2 - self._square) / min(self._count, 1 / (1 - FORGET))


def errors(forecast: np.ndarray, measured: np.ndarray, lr: np.ndarray) -> dict[str, float]:
    """Returns each prediction's mean squared error over the steps after the first BEGINNING, in
    nats^2. `line` is the forecast's; the others do not look ahead."""
    one = np.ones_like(measured)
    inputs = {
        "line": np.stack([forecast, one], 1),
        "line_times_lr": np.stack([lr * forecast / lr.max(), one], 1),
        "mean": one[:, None],
        "mean_times_lr": (lr / lr.max())[:, None],
    }
    found = {
        "no_change": fmean(measured[BEGINNING:] ** 2),
        "last_change": fmean(np.diff(measured)[BEGINNING - 1 :] ** 2),
    }
    for name, x in inputs.items():
        line, squares = Line(x.shape[1]), []
        for step, y in enumerate(measured):
            squares.append((y - line.predict(x[step])) ** 2)
            line.learn(x[step], y)
        found[name] = fmean(squares[BEGINNING:])
    return found


def judge(series: dict[int, Sequence[np.ndarray]]) -> dict[str, Any]:
    """Compares the line with the predictions that do not look ahead, paired by seed."""
    by_seed = {seed: errors(*each) for seed, each in series.items()}
    versus = {}
    for name in ("no_change", "last_change", "mean", "mean_times_lr"):
        saved = [each[name] - each["line"] for each in by_seed.values()]
        half = T_975[len(saved)] * stdev(saved) / math.sqrt(len(saved))
        versus[name] = {
            "error_saved": [fmean(saved) - half, fmean(saved) + half],
            "ratio": fmean(e["line"] for e in by_seed.values())
            / fmean(e[name] for e in by_seed.values()),
            "seeds_with_less": sum(each > 0 for each in saved),
        }
    fits = [np.polyfit(u, y, 1) for u, y, _ in series.values()]
    return {
        "passes": all(each["error_saved"][0] > 0 for each in versus.values()),
        "line_against": versus,
        "mean_squared_error": by_seed,
        "whole_run": {
            "kappa": [float(fit[0]) for fit in fits],
            "correlation": [float(np.corrcoef(u, y)[0, 1]) for u, y, _ in series.values()],
            "same_sign": [float(np.mean(u * y > 0)) for u, y, _ in series.values()],
        },
    }


if __name__ == "__main__":
    main()
