"""Runs the quickstart for several seeds with STARE and with GRPO, and writes what the runs show.

Resumable: finished runs are kept and not run again. Each run is the user's own command,
scripts/quickstart.sh.

    python benchmarks/quickstart.py --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

from machine import machine

from megatron_stare.observability.metrics.paired import paired_interval, summary
from megatron_stare.run_dir.run_files import read_run

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/quickstart.json"
MEASURED = "measured.json"  # beside a finished run: what it was run from, and how long it took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--algorithms", nargs="+", default=["stare", "grpo"])
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs/benchmark", help="where the run directories go"
    )
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    for algorithm in args.algorithms:
        for seed in args.seeds:
            run_dir = args.runs / f"{algorithm}-{seed}"
            if not (run_dir / MEASURED).exists():
                start = time.monotonic()
                subprocess.run(
                    [
                        "bash",
                        "scripts/quickstart.sh",
                        "--seed",
                        str(seed),
                        "--algorithm",
                        algorithm,
                        f"run.dir={run_dir}",
                    ],
                    cwd=ROOT,
                    check=True,
                )
                measured = {"commit": commit, "wall_s": round(time.monotonic() - start)}
                (run_dir / MEASURED).write_text(json.dumps(measured))
            record(f"{algorithm}-{seed}", figures(run_dir))


def figures(run_dir: Path) -> dict[str, Any]:
    """Results of a finished run: accuracies, the gain's paired 95 % interval, metrics, the whole
    command's figures."""
    run = read_run(run_dir)
    before, after = run.before, run.after
    assert before is not None and after is not None
    s = summary(run.metrics)
    difference, low, high = paired_interval(
        before["correct"], after["correct"], problems=after["problem"]
    )
    rounded = {name: round(value, 4) for name, value in s.items() if value is not None}
    return {
        "pass1": [before["pass1"], after["pass1"]],
        "pass1_gain_95": [round(x, 4) for x in (difference, low, high)],
        "greedy": [before["greedy"], after["greedy"]],
        **rounded,
        # of the whole command, start and evaluation included
        **json.loads((run_dir / MEASURED).read_text()),
    }


def record(name: str, result: dict[str, Any]) -> None:
    """Adds one run to the result file."""
    results = (
        json.loads(RESULT.read_text()) if RESULT.exists() else {"machine": machine(), "runs": {}}
    )
    results["runs"][name] = result
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    print(name, json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
