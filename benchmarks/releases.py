"""The quickstart with both releases of megatron-core, by turns in one run: seconds of a step and of
its phases, memory, and whether every metric that is no clock is the same number.

    PYTHON=python3.11 bash scripts/setup_env.sh  # the older release, in .venv-3.11
    .venv/bin/python benchmarks/releases.py      # 3 turns of 30 steps, inline and on Ray with TP2

A turn is a run of each release; the first of them changes from turn to turn. Seconds are medians of
a run's steps after the first five; ratios are newer to older. PyTorch is another build in each
(docs/upstreams.md), so what differs is not megatron-core's alone. Results are
benchmarks/results/releases.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from machine import machine
from pairs import spread

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results/releases.json"
LAYOUTS = {"inline": ["runtime.runner=inline", "parallel.tensor=1"], "tp2": []}
PHASES = ("step", "rollout", "log_probs", "update", "sync")
TIMED = ("time/", "perf/", "memory/", "plan/")
WARM = 5
ASK = (
    "import importlib.metadata as m, json, torch; print(json.dumps([m.version('megatron-core'),"
    " torch.__version__]))"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--older",
        default=str(ROOT / ".venv-3.11/bin/python"),
        help="Python of 0.16.1's environment",
    )
    parser.add_argument("--newer", default=sys.executable, help="Python of 0.19.2's environment")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    pythons = {"older": args.older, "newer": args.newer}
    for python in pythons.values():
        if not Path(python).exists():
            parser.error(
                f"{python} is not there: PYTHON=python3.11 bash scripts/setup_env.sh makes"
                " .venv-3.11"
            )
    result: dict[str, Any] = {"machine": machine(), "steps": args.steps, "turns": args.turns}
    result["releases"] = {name: releases_of(python) for name, python in pythons.items()}
    for layout, overrides in LAYOUTS.items():
        made: dict[str, list[list[dict[str, Any]]]] = {"older": [], "newer": []}
        for turn in range(args.turns):
            for name in ("older", "newer") if turn % 2 == 0 else ("newer", "older"):
                made[name].append(rows_of(pythons[name], [*overrides, f"run.steps={args.steps}"]))
                print(f"{layout}, turn {turn + 1} of {args.turns}: {name} done", flush=True)
        result[layout] = compared(made)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


def releases_of(python: str) -> dict[str, str]:
    """Versions of megatron-core and torch."""
    said = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=True).stdout
    return dict(zip(("megatron-core", "torch"), json.loads(said), strict=True))


def rows_of(python: str, overrides: list[str]) -> list[dict[str, Any]]:
    """Metrics of a run, a row a step."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*overrides, f"run.dir={folder}/run", "eval.prompts=0", "run.checkpoint_every=0"]
        subprocess.run(
            [python, "-m", "megatron_stare.cli", "train", "configs/quickstart.yaml", *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return [
            json.loads(line)
            for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
        ]


def compared(made: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """Ratios of the newer release to the older one, and how their numbers differ."""
    told: dict[str, Any] = {"ratios": {}, "seconds": {}}
    for phase in PHASES:
        seconds = {
            name: [median(row[f"time/{phase}_s"] for row in rows[WARM:]) for rows in runs]
            for name, runs in made.items()
        }
        told["ratios"][phase] = spread(seconds["newer"], seconds["older"])
        told["seconds"][phase] = {name: round(median(each), 4) for name, each in seconds.items()}
    memory = {
        name: [rows[-1]["memory/tree_pss_gb"] for rows in runs] for name, runs in made.items()
    }
    told["tree_pss_gb"] = {name: round(median(each), 3) for name, each in memory.items()}
    one, other = (numbers(made[name][0]) for name in ("older", "newer"))
    told["same_numbers"] = one == other
    told["last_step"] = {
        name: {
            key: rows[0][-1].get(key)
            for key in ("reward/mean", "entropy/mean", "optimizer/grad_norm")
        }
        for name, rows in made.items()
    }
    return told


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics that are of no clock and no machine."""
    return [{key: value for key, value in row.items() if not key.startswith(TIMED)} for row in rows]


if __name__ == "__main__":
    sys.exit(main())
