"""How far engine and trainer differ in 16 bits: the figures of finished runs, from their metrics.

    python benchmarks/agreement.py NAME=RUN_DIR [NAME=RUN_DIR ...]

The runs are ordinary ones: the quickstart's first steps with `model.dtype=bfloat16
batch.prompts=16`, with the engine in process and with `rollout.engine=sglang`. Runs of servers with
an 8-bit cache are in results/agreement_kv_cache.json. The limits that docs/diagnostics.md argues
from these figures are in megatron_stare/rollout/agreement/limits.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from machine import machine

from megatron_stare.run_dir.run_files import read_run

RESULT = Path(__file__).parent / "results/agreement.json"
FIGURES = ("mean", "p50", "p90", "p99", "p999", "max", "likely_mean", "unlikely_mean")
CANARY = ("canary_max", "canary_likely_mean", "canary_unlikely_mean")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN_DIR")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    found: dict[str, Any] = {
        "machine": machine(),
        "unit": "nats, of the absolute differences of a step's tokens",
    }
    for name, _, directory in (run.partition("=") for run in args.runs):
        found[name] = figures(Path(directory))
        print(name, json.dumps(found[name]["over_steps"]))
    args.out.write_text(json.dumps(found, indent=1) + "\n")


def figures(directory: Path) -> dict[str, Any]:
    """Figures of one run: those of every step, and their median and largest."""
    run = read_run(directory)
    settings = (
        "rollout.engine",
        "model.dtype",
        "sglang.dtype",
        "sglang.kv_cache_dtype",
        "rollout.temperature",
        "run.steps",
    )
    by_step = {}
    for name in (*FIGURES, *CANARY):
        values = [row[key] for row in run.metrics if (key := f"agreement/{name}") in row]
        if values:
            by_step[name] = [float(f"{value:.3g}") for value in values]
    over = {
        name: {"median": statistics.median(values), "largest": max(values)}
        for name, values in by_step.items()
    }
    return {
        "settings": {name: run.setting(name) for name in settings},
        "entropy": [float(f"{row['entropy/mean']:.3g}") for row in run.metrics],
        "over_steps": over,
        "by_step": by_step,
    }


if __name__ == "__main__":
    main()
