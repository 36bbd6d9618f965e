"""Measures how many programs a second run in a sandbox: with bubblewrap each in a fresh process and
namespaces, with monty each in a fresh session of an interpreter.

python benchmarks/sandboxes.py
python benchmarks/sandboxes.py --sandbox monty      # with pydantic-monty installed
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

# the package that is measured; the environment may have another's
sys.path.insert(0, str(Path(__file__).parents[1]))

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
    parser.add_argument("--sandbox", choices=("bubblewrap", "monty"), default="bubblewrap")
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    workers = os.cpu_count() or 1
    name = arguments.sandbox
    box = make_sandbox(name, None, workers, 512, 2000)
    rates = {}
    for title, program in list(PROGRAMS.items())[: 1 if name == "monty" else None]:
        asyncio.run(all_of(box, program, 2 * workers))  # workers start when first needed
        begun = time.perf_counter()
        asyncio.run(all_of(box, program, arguments.programs))
        rates[title] = round(arguments.programs / (time.perf_counter() - begun), 1)
    box.close()
    if name == "monty":
        release = f"pydantic-monty {version('pydantic-monty')}"
    else:
        told = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=True)
        release = told.stdout.strip()
    found = {
        "machine": f"{os.cpu_count()} cores, Linux {platform.release()}, Python"
        f" {platform.python_version()}, {release}",
        "workers": workers,
        "programs": arguments.programs,
        "programs_a_second": rates,
    }
    every = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    arguments.out.write_text(f"{json.dumps({**every, name: found}, indent=1)}\n")
    print(json.dumps(found, indent=1))


async def all_of(box: Sandbox, program: str, count: int) -> None:
    """Runs a program so often. Raises AssertionError where one failed."""
    found = await asyncio.gather(*(box.run(program, 10.0) for _ in range(count)))
    assert all("42" in each.output and not each.failed for each in found), found[0]


if __name__ == "__main__":
    main()
