"""What the C library's heap of each worker is made of, as a run goes on: bytes in use, their most within a step, and
the heap's own size, which is more by its free pieces.

The quickstart on Ray at TP2, once for each size of its micro-batches: 16,384 tokens, which is one of the whole batch
a step, and 2,048. A thread of each worker asks mallinfo2(3) every four milliseconds; needs the GNU C library of 2.33.

    python benchmarks/heap.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine

from megatron_stare.run_dir.json_lines import read_jsonl

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results/heap.json"
TOKENS = (16384, 2048)  # of a micro-batch
WORKER = "default_worker.py"  # of Ray
SHOWN = (1, 10, 20, 50, 100, 150, 200, 250)
LOOKS = Path(__file__).with_name("heap_looks.py")
# runs whenever a Python of the run starts
STARTS_WITH = f"""
import runpy, sys, threading
if any(each.endswith("{WORKER}") for each in sys.orig_argv):
    watch = runpy.run_path({str(LOOKS)!r})["watch"]
    threading.Thread(target=watch, daemon=True).start()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "steps": args.steps, "micro_batch_tokens": {}}
    for tokens in TOKENS:
        found["micro_batch_tokens"][tokens] = of_a_run(args.steps, tokens)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found["micro_batch_tokens"][tokens]), flush=True)


def of_a_run(steps: int, tokens: int) -> list[dict[str, Any]]:
    """Of each worker the looks of some steps, in MB; those with the largest heaps, the ranks, first."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "site").mkdir()
        (here / "looks").mkdir()
        (here / "site/sitecustomize.py").write_text(STARTS_WITH)
        settings = {"run.dir": here / "run", "run.steps": steps, "run.checkpoint_every": 0, "eval.prompts": 0}
        settings |= {"batch.micro_batch_tokens": tokens, "rollout.threads": 1}
        subprocess.run(
            [sys.executable, "-m", "megatron_stare.cli", "train", "configs/quickstart.yaml"]
            + [f"{name}={value}" for name, value in settings.items()],
            cwd=ROOT,
            env=os.environ
            | {"PYTHONPATH": f"{here / 'site'}:{ROOT}", "RAY_worker_niceness": "0", "HEAP_FOLDER": folder},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        workers = [read_jsonl(file) for file in (here / "looks").iterdir()]
    workers = [looks for looks in workers if looks and looks[-1]["step"] > steps // 2]  # Ray has idle ones, too
    workers.sort(key=lambda looks: looks[-1]["heap"], reverse=True)
    return [
        {
            **{
                what: {look["step"]: look[what] for look in looks if look["step"] in SHOWN}
                for what in ("least", "most", "heap")
            },
            "most_in_use": max(look["most"] for look in looks if look["step"] >= SHOWN[1]),
        }
        for looks in workers
    ]


if __name__ == "__main__":
    main()
