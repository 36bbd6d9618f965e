"""Small whole runs, as a user starts them: the command line in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import yaml
from support.glossary import explained

from megatron_stare.hangs.watcher import SETTINGS

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240
WATCHER = "megatron_stare.hangs.watcher"  # the module that its process runs

# configs/quickstart.yaml, cut down; metrics that depend on the clock or the machine
SMALL = {
    "run.steps": 2,
    "batch.prompts": 4,
    "batch.samples_per_prompt": 4,
    "eval.prompts": 16,
    "rollout.threads": 1,
}
INLINE = {"runtime.runner": "inline", "parallel.tensor": 1}
TIMED = ("time/", "perf/", "memory/", "plan/")

LOADING = "loading PyTorch and Megatron ...\n"  # said by every run before anything else


def command(
    *overrides: str, config: str | Path = ROOT / "configs/quickstart.yaml", **settings: Any
) -> list[str]:
    """The arguments of a small run."""
    small = [f"{key}={value}" for key, value in {**SMALL, **settings}.items()]
    return [sys.executable, "-m", "megatron_stare.cli", "train", str(config), *small, *overrides]


def train(*overrides: str, cwd: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Runs it to its end."""
    return subprocess.run(
        command(*overrides, **settings),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def environment() -> dict[str, str]:
    """Ours, with this folder importable, so that runs can name classes of the tests."""
    path = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def model() -> str:
    """model.path=... of the shipped model, wherever the run's working directory is."""
    config = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    return f"model.path={ROOT / config['model']['path']}"


def metrics(run_dir: Path, *, former: bool = False) -> list[dict[str, Any]]:
    """A run's metrics without those that depend on the clock; docs/metrics.md has to name all.

    Args:
        former: an earlier release made some of the steps, and docs/metrics.md has not all of its
            names.
    """
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if not former:
            explained(row)
    return [{key: value for key, value in row.items() if not key.startswith(TIMED)} for row in rows]


def watched_as(driver: psutil.Process) -> dict[str, Any]:
    """Settings that a run which is going on has told its watcher."""
    (watcher,) = (each for each in driver.children() if WATCHER in each.cmdline())
    return json.loads((Path(watcher.cmdline()[-1]) / SETTINGS).read_text())
