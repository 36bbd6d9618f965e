"""A 100-step TP2 x PP2 run of the quickstart's task against one-rank runs of three seeds.

The layout run has the seed of the first one-rank run. It follows it if its distance from that run
is within the distance of the seeds from each other, for the smoothed reward and entropy.

    python benchmarks/layouts.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from machine import machine

from megatron_stare.run_dir.run_files import read_metrics

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/layouts.json"
LAYOUT = ["parallel.tensor=2", "parallel.pipeline=2", "parallel.first_stage_layers=2"]
WINDOW = 10  # steps averaged over


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs/layouts", help="where the run directories go"
    )
    args = parser.parse_args()
    for seed in (1, 2, 3):
        run(args, f"tp1-{seed}", seed, ["parallel.tensor=1"])
    run(args, "tp2pp2-1", 1, LAYOUT)
    curves = {name: smoothed(args.runs / name) for name in ("tp1-1", "tp1-2", "tp1-3", "tp2pp2-1")}
    result = {"machine": machine(), "steps": args.steps, "window": WINDOW, "distance": {}}
    for key in ("reward/mean", "entropy/mean"):
        seeds = [
            distance(curves[f"tp1-{a}"][key], curves[f"tp1-{b}"][key])
            for a, b in ((1, 2), (1, 3), (2, 3))
        ]
        layout = distance(curves["tp2pp2-1"][key], curves["tp1-1"][key])
        result["distance"][key] = {
            "between_seeds": seeds,
            "layout": layout,
            "within": layout <= max(seeds),
        }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def run(args: argparse.Namespace, name: str, seed: int, layout: list[str]) -> None:
    """One run, unless it is there already."""
    run_dir = args.runs / name
    if (run_dir / "report.html").exists():
        return
    command = [
        sys.executable,
        "-m",
        "megatron_stare.cli",
        "train",
        str(ROOT / "configs/quickstart.yaml"),
        *layout,
    ]
    settings = [
        f"run.seed={seed}",
        f"run.steps={args.steps}",
        f"run.dir={run_dir}",
        "eval.prompts=0",
    ]
    subprocess.run([*command, *settings, "rollout.threads=1"], cwd=ROOT, check=True)


def smoothed(run_dir: Path) -> dict[str, list[float]]:
    """Means over successive windows, by metric."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    windows = [rows[i : i + WINDOW] for i in range(0, len(rows), WINDOW)]
    return {
        key: [sum(r[key] for r in w) / len(w) for w in windows]
        for key in ("reward/mean", "entropy/mean")
    }


def distance(a: list[float], b: list[float]) -> float:
    """Mean absolute difference of two curves."""
    return round(sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a), 5)


if __name__ == "__main__":
    main()
