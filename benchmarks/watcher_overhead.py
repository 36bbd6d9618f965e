"""Measures what the black box costs a run: the quickstart with a watcher beside it, and without, by
turns.

Whole runs of the command line, in the order A B B A, so that a change of the machine's speed meets
both. Both make the same steps, bit for bit, so a ratio is that of the same step in two runs of the
same turn; its median comes with the range that holds the true one in 95 of 100 runs. Beside it
stand the ratio of whole runs, from start to end, and what needs no difference of two long times:
the processor seconds of the watcher, and the seconds that the driver takes to write its beats, of a
second of the run.

    python benchmarks/watcher_overhead.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from machine import machine
from pairs import spread

from megatron_stare.config.fault_sections import HangsConfig
from megatron_stare.hangs.driver_side import DriverBeats
from megatron_stare.run_dir.json_lines import read_jsonl

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results/watcher_overhead.json"
WATCHER = "megatron_stare.hangs.watcher"
FIRST = 5  # steps of a run that are not compared: they warm up
LOOK_S = 0.5
PHASES = ("rollout", "log_probs", "update", "sync")  # of a step
PUTS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--turns", type=int, default=4, help="at least 2, of one run with a watcher and one without"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    runs: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for turn in range(args.turns):
        for watched in (True, False) if turn % 2 == 0 else (False, True):
            runs[watched].append(found := run(args.steps, watched))
            print(
                f"turn {turn}, {'with' if watched else 'without'}: {found['seconds']:.1f} s",
                flush=True,
            )
    steps = {
        watched: [s for each in found for s in each["steps"]] for watched, found in runs.items()
    }
    whole = {watched: [each["seconds"] for each in found] for watched, found in runs.items()}
    usual = statistics.median(steps[False])
    result = {
        "machine": machine(),
        "settings": {
            "config": "configs/quickstart.yaml",
            "steps": args.steps,
            "turns": args.turns,
            "skipped": FIRST,
        },
        "load_average": [round(each, 1) for each in os.getloadavg()],
        "step_s": {"with": round(statistics.median(steps[True]), 4), "without": round(usual, 4)},
        "a step, with / without": spread(steps[True], steps[False]),
        "a whole run, with / without": spread(whole[True], whole[False]),
        "watcher's processor seconds a second of its run": round(
            sum(each["watcher_s"] for each in runs[True]) / sum(whole[True]), 5
        ),
        "beats of a step / a step": round(beats_s() / usual, 6),
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def run(steps: int, watched: bool) -> dict[str, Any]:
    """Seconds of a run, of its steps, and of its watcher's processor."""
    settings = {
        "run.steps": steps,
        "run.dir": "run",
        "run.checkpoint_every": 0,
        "model.path": ROOT / "assets/tiny-adder",
        "eval.prompts": 0,
        "observability.sinks": "[jsonl]",
        "faults.hangs.enabled": str(watched).lower(),
    }
    words = [
        str(ROOT / "configs/quickstart.yaml"),
        *(f"{key}={value}" for key, value in settings.items()),
    ]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "said").open("w+") as said:
        begun = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_stare.cli", "train", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=said,
            stderr=said,
        )
        watcher_s = 0.0
        while process.poll() is None:
            watcher_s = max(watcher_s, processor_s(process.pid))
            try:
                process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                continue
        seconds = time.monotonic() - begun
        if process.returncode:
            said.seek(0)
            sys.exit(said.read())
        rows = read_jsonl(Path(folder) / "run/metrics.jsonl")
        return {
            "seconds": seconds,
            "steps": [row["time/step_s"] for row in rows if row["step"] > FIRST],
            "watcher_s": watcher_s,
        }


def processor_s(driver: int) -> float:
    """Processor seconds of the driver's watcher so far, in user and kernel; 0 without a watcher."""
    for process in children(driver):
        try:
            if WATCHER in process.cmdline():
                times = process.cpu_times()
                return float(times.user + times.system)
        except psutil.Error:
            continue
    return 0.0


def children(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children())
    except psutil.Error:
        return []


def beats_s() -> float:
    """Seconds that a driver takes for the beats of a step, into a folder in memory: mean of
    many."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        beats = DriverBeats(Path(folder), HangsConfig())
        begun = time.perf_counter()
        for step in range(PUTS):
            beats.begin_step(step)
            for name in PHASES:
                beats.begin_phase(name)
                beats.end_phase(name)
            beats.step(step, {"time/step_s": 1.0}, None)  # type: ignore[arg-type]
        return (time.perf_counter() - begun) / PUTS


if __name__ == "__main__":
    main()
