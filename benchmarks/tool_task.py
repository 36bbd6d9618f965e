"""Does training teach when to call a tool? A small task in three arms, over seeds, paired.

The policy is assets/tiny-chat, the questions are sums, drawn by the seed; a sum is seldom right by
hand. In the arm `tool` the policy may call a Python interpreter, in `none` it has no tool, and in
`noise` the same tool answers with an unrelated number.

    python benchmarks/tool_task.py                    # goes on where it stopped
    python benchmarks/tool_task.py --budget second

Asked: the reward in `tool` at the end above its start, and above the end of `none`; the share of
responses with a call at the end above its start in `tool`, and below it in `noise`; each with a
95 % interval of Student's t over the seeds' differences that excludes 0.

Each budget was set before its runs. In the first, the reward in `tool` did not rise. The second
has other seeds, a lower learning rate and more steps, chosen by one run with seed 21.

Runs are inline since seed 13; the run `tool 11`, made on Ray, was repeated inline and is equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_stare.environments import tools
from megatron_stare.evaluation.estimates import student_quantile
from megatron_stare.process.vector_maths import settle

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Budget:
    """Settings of the runs. A figure is the mean over the first `start` or the last `end` steps."""

    steps: int
    lr: float
    start: int
    end: int
    seeds: range
    result: str


BUDGETS = {
    "first": Budget(20, 5e-4, 2, 5, range(1, 9), "tool_task.json"),
    "second": Budget(60, 1e-4, 5, 10, range(11, 19), "tool_task_second.json"),
}
TOOLS = {"name": "tools", "max_turns": 3, "call_seconds": 5, "sandbox_workers": 2}
ARMS = {
    "tool": {**TOOLS, "tools": ["code_interpreter"]},
    "none": "single_turn",
    "noise": {**TOOLS, "tools": [f"{Path(__file__).resolve()}:code_interpreter"]},
}


def code_interpreter(code: str) -> str:
    """Answers with a number that has nothing to do with the code, always the same for it."""
    return str(int(hashlib.sha256(code.encode()).hexdigest(), 16) % 200)


code_interpreter.schema = tools.code_interpreter.schema  # type: ignore[attr-defined]


def main() -> None:
    settle()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--budget", choices=BUDGETS, default="first")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    args = parser.parse_args()
    budget = BUDGETS[args.budget]
    out = ROOT / "benchmarks/results" / budget.result
    found: dict[str, Any] = {"steps": budget.steps, "runs": {}}
    if out.exists():
        found = json.loads(out.read_text())
    wanted = [(arm, seed) for arm in ARMS for seed in budget.seeds]
    missing = [(arm, seed) for arm, seed in wanted if f"{arm} {seed}" not in found["runs"]]
    with ThreadPoolExecutor(args.jobs) as jobs:
        runs = {jobs.submit(run, arm, seed, budget): f"{arm} {seed}" for arm, seed in missing}
        for done in as_completed(runs):
            found["runs"][runs[done]] = done.result()
            out.write_text(f"{json.dumps(found, indent=1)}\n")
            print(runs[done], time.strftime("%H:%M:%S"), flush=True)
    found["asked"] = judge(found["runs"], budget)
    out.write_text(f"{json.dumps(found, indent=1)}\n")
    print(json.dumps(found["asked"], indent=1))


def run(arm: str, seed: int, budget: Budget) -> dict[str, list[float]]:
    """Trains once. Returns reward and share of responses with a call, step by step."""
    with tempfile.TemporaryDirectory() as folder:
        rows, directory = Path(folder) / "sums.jsonl", Path(folder) / "run"
        write_sums(rows, seed)
        config = Path(folder) / "tools.yaml"
        config.write_text(yaml.safe_dump(settings(arm, seed, budget, rows, directory)))
        command = [sys.executable, "-m", "megatron_stare.cli", "train", str(config)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        metrics = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    return {
        "reward": [round(row["reward/mean"], 4) for row in metrics],
        "used": [round(row.get("tools/used", 0.0), 4) for row in metrics],
    }


def settings(arm: str, seed: int, budget: Budget, rows: Path, directory: Path) -> dict[str, Any]:
    """Returns the configuration of a run."""
    return {
        "run": {"name": arm, "seed": seed, "steps": budget.steps, "dir": str(directory)},
        "model": {"path": str(ROOT / "assets/tiny-chat")},
        "runtime": {"runner": "inline"},
        "data": {"path": str(rows), "chat_template": True},
        "batch": {"prompts": 12, "samples_per_prompt": 8},
        "rollout": {
            "max_prompt_tokens": 320,
            "max_new_tokens": 160,
            "environment": ARMS[arm],
        },
        "reward": {"verifier": "math_verify"},
        "eval": {"prompts": 0},
        "optimizer": {"lr": budget.lr},
    }


def write_sums(path: Path, seed: int, number: int = 2000) -> None:
    """Writes questions: alternately of two digits and of one."""
    draw = random.Random(seed)
    with path.open("w") as out:
        for each in range(number):
            low, high, signs = (0, 9, "+-") if each % 2 else (10, 99, "+-*")
            first, second, sign = (
                draw.randint(low, high),
                draw.randint(low, high),
                draw.choice(signs),
            )
            value = {"+": first + second, "-": first - second, "*": first * second}[sign]
            row = {"prompt": f"What is {first}{sign}{second}?", "answer": str(value)}
            out.write(f"{json.dumps(row)}\n")


def judge(runs: dict[str, dict[str, list[float]]], budget: Budget) -> dict[str, Any]:
    """Returns the mean of each difference over the seeds, and its 95 % interval."""

    def start(arm: str, what: str, seed: int) -> float:
        return statistics.mean(runs[f"{arm} {seed}"][what][: budget.start])

    def end(arm: str, what: str, seed: int) -> float:
        return statistics.mean(runs[f"{arm} {seed}"][what][-budget.end :])

    asked: dict[str, Callable[[int], float]] = {
        "reward, tool, end - start": lambda s: (
            end("tool", "reward", s) - start("tool", "reward", s)
        ),
        "reward at the end, tool - none": lambda s: (
            end("tool", "reward", s) - end("none", "reward", s)
        ),
        "responses with a call, tool, end - start": lambda s: (
            end("tool", "used", s) - start("tool", "used", s)
        ),
        "responses with a call, noise, end - start": lambda s: (
            end("noise", "used", s) - start("noise", "used", s)
        ),
    }
    return {name: interval([of(seed) for seed in budget.seeds]) for name, of in asked.items()}


def interval(differences: Sequence[float]) -> dict[str, Any]:
    mean, n = statistics.mean(differences), len(differences)
    half = student_quantile(0.95, n - 1) * statistics.stdev(differences) / n**0.5
    return {
        "mean": round(mean, 4),
        "interval": [round(mean - half, 4), round(mean + half, 4)],
        "differences": [round(each, 4) for each in differences],
    }


if __name__ == "__main__":
    main()
