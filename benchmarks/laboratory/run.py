"""Makes the laboratory's maps: one JSON file a map.

    python benchmarks/laboratory/run.py --out benchmarks/results/laboratory
    python benchmarks/laboratory/run.py --out benchmarks/results/laboratory --only bands weights

Run again, it makes only the cells that the files lack, and in the others only the methods that they
lack. Two processes take the cells in turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch
from maps import MAPS, run_cell

sys.path.append(str(Path(__file__).parents[1]))
from machine import machine


def key_of(cell: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in cell.items())


def written(name: str, seeds: int, file: Path) -> dict[str, Any]:
    """Returns the content of a map's file, without cells that belong to other seeds or axes."""
    axes = {axis: list(values) for axis, values in MAPS[name].axes.items()}
    head = {"question": MAPS[name].question, "axes": axes, "seeds": seeds}
    told = json.loads(file.read_text()) if file.exists() else {}
    if {key: told.get(key) for key in head} != head:
        told = {}
    return {**head, "machine": machine(), "seconds": 0.0, "cells": {}, **told}


def make(name: str, seeds: int, folder: Path, pool: Any) -> None:
    """Makes the missing cells of a map; writes the file after each."""
    file = folder / f"{name}.json"
    told = written(name, seeds, file)
    left = [
        cell
        for cell in MAPS[name].cells()
        if told["cells"].get(key_of(cell), {}).keys() != MAPS[name].methods(cell).keys()
    ]
    jobs = [(name, cell, seeds, told["cells"].get(key_of(cell))) for cell in left]
    begun = time.monotonic()
    before = told["seconds"]
    for number, (cell, result) in enumerate(zip(left, pool.imap(of_job, jobs), strict=True), 1):
        told["cells"][key_of(cell)] = result
        told["seconds"] = round(before + time.monotonic() - begun, 1)
        file.write_text(json.dumps(told, indent=1) + "\n")
        print(f"{name} {number}/{len(left)} {key_of(cell)}", flush=True)


def of_job(job: tuple[str, dict[str, Any], int, dict[str, Any] | None]) -> dict[str, Any]:
    """Returns `run_cell` of a job, in a process of the pool."""
    return run_cell(*job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the maps' files")
    parser.add_argument("--only", nargs="+", choices=MAPS, default=list(MAPS), metavar="MAP")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.processes, torch.set_num_threads, (1,)) as pool:
        for name in args.only:
            make(name, args.seeds, args.out, pool)


if __name__ == "__main__":
    main()
