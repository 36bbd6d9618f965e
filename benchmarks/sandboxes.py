"""Measures how many programs a second run in a sandbox: with bubblewrap each in a fresh process and
namespaces, with monty each in a fresh session of an interpreter. With monty, two further rates are
those of programs whose session is dumped half-way and restored in a fresh session, by the package
itself: the environment `tools` keeps no state of monty between programs, and never dumps any.

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
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

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
        rates |= restored_sessions(workers, arguments.programs)
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


def restored_sessions(workers: int, count: int) -> dict[str, float]:
    """Returns sessions a second, of which each runs half a program, is dumped to bytes, and is
    restored in a fresh session that runs the other half. `finished` is dumped between two pieces of
    code, `paused` in the middle of one, where it awaits the answer of a function of ours. Raises
    AssertionError where a half is lost."""
    import pydantic_monty

    limits: Any = {"max_feed_duration_secs": 10.0, "max_memory": 512 << 20}

    def finished(pool: Any) -> None:
        with pool.checkout(limits=limits) as session:
            session.feed_run("left = 6 * 7")
            state = session.dump()
        with pool.checkout(limits=limits) as session:
            session.load_session(state)
            assert session.feed_run("left") == 42

    def paused(pool: Any) -> None:
        with pool.checkout(limits=limits) as session:
            state = session.feed_start("left = 6\nleft * asks(left)").dump()
        with pool.checkout(limits=limits) as session:
            snapshot = session.load_snapshot(state)
            assert (snapshot.function_name, snapshot.args) == ("asks", (6,))
            assert snapshot.resume({"return_value": 7}).output == 42

    rates = {}
    with (
        pydantic_monty.Monty(max_processes=workers) as pool,
        ThreadPoolExecutor(workers) as threads,
    ):
        for title, session in (("finished", finished), ("paused", paused)):
            list(threads.map(session, [pool] * 2 * workers))
            begun = time.perf_counter()
            list(threads.map(session, [pool] * count))
            rate = count / (time.perf_counter() - begun)
            rates[f"{title}, dumped and restored"] = round(rate, 1)
    return rates


if __name__ == "__main__":
    main()
