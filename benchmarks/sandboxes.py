"""Measures how many programs a second run in the sandbox, each in a fresh process and namespaces.

python benchmarks/sandboxes.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import time
from pathlib import Path

from megatron_stare.environments.sandboxes import Sandbox, make_sandbox
from megatron_stare.process.vector_maths import settle

RESULT = Path(__file__).parent / "results/sandboxes.json"
PROGRAMS = {
    "prints": "print(6 * 7)",
    "uses numpy": "import numpy\nprint(numpy.arange(7).sum() * 2)",
    "uses sympy": "import sympy\nx = sympy.Symbol('x')\nprint(sympy.solve(x - 42, x))",
}


def main() -> None:
    settle()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    workers = os.cpu_count() or 1
    box = make_sandbox("bubblewrap", None, workers, 512, 2000)
    rates = {}
    for name, program in PROGRAMS.items():
        asyncio.run(all_of(box, program, 2 * workers))  # workers start when first needed
        begun = time.perf_counter()
        asyncio.run(all_of(box, program, arguments.programs))
        rates[name] = round(arguments.programs / (time.perf_counter() - begun), 1)
    box.close()
    version = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=True)
    found = {
        "machine": f"{os.cpu_count()} cores, Linux {platform.release()}, Python"
        f" {platform.python_version()}, {version.stdout.strip()}",
        "workers": workers,
        "programs": arguments.programs,
        "programs_a_second": rates,
    }
    arguments.out.write_text(f"{json.dumps(found, indent=1)}\n")
    print(json.dumps(found, indent=1))


async def all_of(box: Sandbox, program: str, count: int) -> None:
    """Runs a program so often. Raises AssertionError where one failed."""
    found = await asyncio.gather(*(box.run(program, 10.0) for _ in range(count)))
    assert all("42" in each.output and not each.failed for each in found), found[0]


if __name__ == "__main__":
    main()
