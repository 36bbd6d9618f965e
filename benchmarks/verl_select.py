"""Measures in verl's own clock what STARE's selection adds to verl's advantages.

    .venv-verl/bin/python benchmarks/verl_select.py --out benchmarks/results/verl_select.json

One batch goes through a real TransferQueue, by turns with plain verl and with STARE. Needs the
environment of `scripts/setup_other_trainer.sh verl`.
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
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.utils.debug import marked_timer

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/select")]

from verl_program import stare, trainer  # noqa: E402

from megatron_stare.select.verl import StarePPOTrainerSync  # noqa: E402


def put(rows: int, length: int, group: int) -> Any:
    """Puts a batch into the queue that has everything but advantages."""
    source = torch.Generator().manual_seed(0)
    columns = {
        name: torch.rand(rows, length, generator=source)
        for name in ("old_log_probs", "entropy", "rollout_log_probs")
    }
    columns["old_log_probs"] = -3 * columns["old_log_probs"]
    columns["response_mask"] = torch.ones(rows, length, dtype=torch.int64)
    columns["rm_scores"] = torch.zeros(rows, length)
    columns["rm_scores"][:, -1] = (torch.rand(rows, generator=source) < 0.5).float()
    nested = {
        name: torch.nested.as_nested_tensor(list(value), layout=torch.jagged)
        for name, value in columns.items()
    }
    fields = TensorDict(nested, batch_size=rows)
    fields["uid"] = [f"prompt{row // group}" for row in range(rows)]
    keys = [f"prompt{row // group}_{row % group}_0" for row in range(rows)]
    return tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=[{}] * rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    storage = {"num_data_storage_units": 2, "total_storage_size": 4 * given.rows}
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": storage}}))
    seconds: dict[str, list[float]] = {"plain": [], "stare": []}
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = {"plain": trainer(Path(folder)), "stare": trainer(Path(folder), *stare())}
        assert isinstance(made["stare"], StarePPOTrainerSync)
        batch = put(given.rows, given.length, group=8)
        for round_ in range(1 + given.rounds):
            for name, each in made.items():
                timing: dict[str, float] = {}
                with marked_timer("adv", timing):
                    each._compute_advantage(batch, metrics={})
                if round_:  # the first one warms up
                    seconds[name].append(timing["adv"])
    finally:
        tq.close()
        ray.shutdown()
    median = {name: statistics.median(each) for name, each in seconds.items()}
    found = {
        "machine": f"{os.cpu_count()} x {platform.processor() or platform.machine()}, CPU",
        "versions": {name: version(name) for name in ("verl", "TransferQueue", "torch")},
        "tokens": given.rows * given.length,
        "timing_s/adv": seconds,
        "added_s": median["stare"] - median["plain"],
        "ratio": median["stare"] / median["plain"],
    }
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: found[name] for name in ("tokens", "added_s", "ratio")}))


if __name__ == "__main__":
    main()
