"""Measures in slime's own clock what STARE's weights take beside slime's advantages.

    PYTHONPATH=SLIME .venv-slime/bin/python benchmarks/slime_select.py \\
        --out benchmarks/results/slime_select.json

SLIME is a folder of its source. Needs the environment of `scripts/setup_other_trainer.sh slime`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/select")]

from megatron.core import mpu  # noqa: E402
from slime.backends.megatron_utils import loss  # noqa: E402
from slime.observability.timer import Timer, timer  # noqa: E402
from slime_program import arguments  # noqa: E402

from megatron_stare.select.slime import Weighing  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # groups meet in it until all are made
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        mpu.initialize_model_parallel()
    source = torch.Generator().manual_seed(0)
    rows, length = given.rows, given.length
    rollout = {
        "log_probs": list(-3 * torch.rand(rows, length, generator=source)),
        "entropy": list(torch.rand(rows, length, generator=source)),
        "loss_masks": list(torch.ones(rows, length, dtype=torch.int)),
        "rewards": torch.randn(rows, generator=source).tolist(),
        "partition": list(range(rows)),
        "rollout_ids": list(range(rows)),
        "total_lengths": [length + 100] * rows,
        "response_lengths": [length] * rows,
    }
    seconds: dict[str, list[float]] = {"advantages": [], "stare": []}
    weigh = Weighing()
    for round_ in range(1 + given.rounds):
        share, args = dict(rollout), arguments()
        with timer("advantages"):
            loss.compute_advantages_and_returns(args, share)
        with timer("stare"):
            weigh(args, round_, share)
        taken = Timer().log_dict()
        Timer().reset()
        for name, each in seconds.items():
            each += [taken[name]] if round_ else []  # the first round warms up
    found = {
        "machine": f"{os.cpu_count()} x {platform.processor() or platform.machine()}, CPU",
        "versions": {name: version(name) for name in ("megatron-core", "torch")}
        | {"slime": "0.3.1"},
        "tokens": rows * length,
        "seconds": seconds,
        "added_s": statistics.median(seconds["stare"]),
    }
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: found[name] for name in ("tokens", "added_s")}))


if __name__ == "__main__":
    main()
