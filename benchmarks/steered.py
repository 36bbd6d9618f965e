"""Trains the quickstart with STARE's weights behind the gate and with predictive control, towards a
constant target entropy and towards one that moves, and measures how far the entropy is from it. In
the condition `negated`, the controller gets its forecasts with the wrong sign.

Both arms are the method `stare_predictive`; the gate's arm never measures, so it stays behind the
gate. Asked, before the runs: an upper 95 % end of the ratio of errors of at most 1.10, and of at
most 0.70 for the target that moves. The error is the root mean square of the entropy minus the
target, of means over ten steps, because a batch's own entropy scatters by about 0.005 nats.

Resumable: finished runs are kept, and a run that was cut short continues from its last checkpoint.

    python benchmarks/steered.py --seeds 201 202 203 204 205 206 207 208 --jobs 2
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from machine import machine

from megatron_stare.algorithms.stare_predictive import StarePredictive
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Request, Statistics, Sum
from megatron_stare.run_dir.run_files import read_run

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/steered.json"
NEVER = 10**6
SHARED = [
    *("parallel.tensor=1", "rollout.threads=1", "eval.prompts=0", "run.steps=300"),
    *("algorithm.variant=C2", "algorithm.share=0.3"),
    *("algorithm.amplify=2.0", "algorithm.attenuate=0.3", "algorithm.attenuate_min=0.1"),
]
# the gate's arm has no forecasts to negate, and is one run for both constant targets
ARMS = {"gate": [f"algorithm.measure_every={NEVER}"], "predictive": []}
SAME = {("negated", "gate"): ("constant", "gate")}
PLAIN = "algorithm.name=stare_predictive"
TARGETS = {
    "constant": [PLAIN, "algorithm.entropy_target=0.12"],
    "negated": ["algorithm.name=steered.Negated", "algorithm.entropy_target=0.12"],
    "ramp": [
        PLAIN,
        *("algorithm.entropy_target=0.14", "algorithm.target_end=0.08"),
        *("algorithm.ramp_start=100", "algorithm.ramp_steps=150"),
    ],
}
JUDGED = 100  # steps before the entropy has come down to the target
BLOCK = 10  # steps of a mean
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}  # Student's


@dataclass(frozen=True, kw_only=True)
class Negated(StarePredictive):
    """Predictive control with every forecast negated."""

    def asks(self, batch: TokenBatch, kept: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        return {
            name: replace(request, x=-request.x)
            if name.startswith("predictive/") and isinstance(request, Sum)
            else request
            for name, request in super().asks(batch, kept, known).items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/steered")
    args = parser.parse_args()
    wanted = list(itertools.product(args.seeds, TARGETS, ARMS))
    with ThreadPoolExecutor(args.jobs) as jobs:
        own = [each for each in wanted if each[1:] not in SAME]
        found = dict(zip(own, jobs.map(lambda each: run(args.runs, *each), own), strict=True))
    found |= {each: found[each[0], *SAME[each[1:]]] for each in wanted if each[1:] in SAME}
    told: dict[str, Any] = {"machine": machine(), "seeds": args.seeds, "settings": SHARED}
    for target in TARGETS:
        of = {arm: [found[seed, target, arm] for seed in args.seeds] for arm in ARMS}
        logs = [math.log(p["error"] / g["error"]) for g, p in zip(*of.values(), strict=True)]
        half = T_975[len(logs)] * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
        told[target] = {
            "ratio": math.exp(fmean(logs)),
            "ratio_interval": [math.exp(fmean(logs) - half), math.exp(fmean(logs) + half)],
            **of,
        }
    RESULT.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=1))


def run(folder: Path, seed: int, target: str, arm: str) -> dict[str, float]:
    """Trains, unless that is done, and returns the figures of the steps from JUDGED on."""
    place = folder / f"{target}-{arm}-{seed}"
    command = [sys.executable, "-m", "megatron_stare.cli", "train", "configs/quickstart.yaml"]
    command += [*SHARED, *TARGETS[target], *ARMS[arm], f"run.seed={seed}", f"run.dir={place}"]
    if (place / "config.yaml").exists():
        command.append("--resume")
    if not (place / "finished").exists():
        here = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
        subprocess.run(command, cwd=ROOT, env=here, check=True, stdout=subprocess.DEVNULL)
        (place / "finished").touch()
    rows = read_run(place).metrics[JUDGED:]
    off = np.array([row["entropy/mean"] - row["entropy/target"] for row in rows])
    blocks = off[: len(off) // BLOCK * BLOCK].reshape(-1, BLOCK).mean(1)
    return {
        "error": round(float(np.sqrt((blocks**2).mean())), 6),
        "offset": round(float(off.mean()), 6),
        "scatter": round(float(off.std()), 6),
        "active": round(fmean(row["predictive/active"] for row in rows), 4),
        "kappa": round(rows[-1]["predictive/kappa"], 4),
        "reward": round(fmean(row["reward/mean"] for row in rows[-50:]), 4),
    }


if __name__ == "__main__":
    main()
