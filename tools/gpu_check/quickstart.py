"""Twenty steps of scripts/quickstart.sh's configuration with a model of 0.5B parameters and random
weights: the trainer on the GPU in bfloat16, the rollout engine of this process on the CPU.

Passes where the command ends well, every step has a finite loss and a finite gradient that is not
zero, and the log-probs of engine and trainer differ by less than a run's own limits in bfloat16
(docs/diagnostics.md), which would have ended it. Random weights add no numbers, so a verifier that
tosses a coin by the response judges, and groups differ. On a CPU: three steps of tiny-adder.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from small_model import small_model
from verdict import Bound

from megatron_stare.errors import UserError
from megatron_stare.process.shipped import SHIPPED
from megatron_stare.rollout.agreement.limits import BOUNDS as LIMITS
from megatron_stare.run_dir.run_files import read_run

STEPS, SMALL = 20, 3
GPU_ONLY = ("steps",)
BOUNDS: dict[str, Bound] = {
    "steps": (">=", STEPS),
    "steps whose loss or gradient is not finite": ("<=", 0.0),
    "steps without a gradient": ("<=", 0.0),
    **{
        f"agreement, {name}, largest of the steps (nats)": ("<=", limit)
        for name, limit in LIMITS["bfloat16"].items()
    },
}
TAIL = 2_000  # characters of a failed run's output


def run(cpu: bool) -> dict[str, Any]:
    steps = SMALL if cpu else STEPS
    with small_model(cpu) as model, tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "run"
        settings = {
            "run.dir": directory,
            "run.steps": steps,
            "run.checkpoint_every": 0,
            "runtime.runner": "inline",
            "model.path": model,
            "model.dtype": "bfloat16",
            "parallel.tensor": 1,  # the configuration has two ranks
            "batch.prompts": 8,
            "rollout.threads": len(os.sched_getaffinity(0)),
            "reward.verifier": f"{Path(__file__).with_name('coin.py').resolve()}:verify",
            "optimizer.lr": 1e-5,
            "eval.prompts": 0,
            "observability.sinks": "[jsonl,console]",  # TensorBoard is one more thing to carry
        }
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "megatron_stare.cli", "train"),
                str(SHIPPED / "configs" / "quickstart.yaml"),
                *(f"{name}={value}" for name, value in settings.items()),
            ],
            cwd=SHIPPED,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(ended.stdout, flush=True)
        if ended.returncode:
            raise UserError(f"the run ended with {ended.returncode}: {ended.stdout[-TAIL:]}")
        rows = read_run(directory).metrics
    return {"figures": figures_of(rows), "newest step": dict(rows[-1])}


def figures_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Figures of a run's metrics; NaN for an agreement that was not measured in every step."""
    finite = [
        all(
            math.isfinite(row.get(name, math.nan))
            for name in ("loss/policy", "optimizer/grad_norm")
        )
        for row in rows
    ]
    found = {
        "steps": float(len(rows)),
        "steps whose loss or gradient is not finite": float(finite.count(False)),
        "steps without a gradient": float(sum(row.get("optimizer/grad_norm") == 0 for row in rows)),
    }
    for name in LIMITS["bfloat16"]:
        values = [row.get(f"agreement/{name}", math.nan) for row in rows]
        largest = math.nan if not values or any(map(math.isnan, values)) else max(values)
        found[f"agreement, {name}, largest of the steps (nats)"] = largest
    return found
