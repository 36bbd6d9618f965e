"""Runs 100 programs, written as a policy writes them for `code_interpreter`, in both sandboxes.

    pip install "megatron-stare[tools]"
    python benchmarks/snippets.py

A program runs in a sandbox if it ends without an error and prints what CPython prints. The programs
are in benchmarks/snippets.txt; the result, with the first line of each error, is in
benchmarks/results/snippets.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

# the package that is measured; the environment may have another's
sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_stare.environments.sandboxes import Ran, make_sandbox
from megatron_stare.process.vector_maths import settle

HERE = Path(__file__).parent
SECONDS = 20.0


def programs() -> dict[str, str]:
    """Returns the programs by title."""
    found = {}
    for part in (HERE / "snippets.txt").read_text().split("### ")[1:]:
        title, _, code = part.partition("\n")
        found[title] = code
    return found


def printed(code: str) -> str:
    """Returns what CPython prints."""
    out = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
    ):
        exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})
    return out.getvalue()


async def all_of(name: str, codes: list[str]) -> list[Ran]:
    box = make_sandbox(name, None, 2, 512, 2000)
    try:
        return [await box.run(code, SECONDS) for code in codes]
    finally:
        box.close()


def main() -> None:
    settle()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "results/snippets.json")
    arguments = parser.parse_args()
    every = programs()
    expected = {title: printed(code) for title, code in every.items()}
    told: dict[str, object] = {"programs": len(every), "monty": version("pydantic-monty")}
    for name in ("bubblewrap", "monty"):
        ran = asyncio.run(all_of(name, list(every.values())))
        failed = {}
        for (title, right), each in zip(expected.items(), ran, strict=True):
            if each.failed or each.output.strip() != right.strip():
                lines = each.output.strip().splitlines() or ["no output"]
                failed[title] = lines[-1] if each.failed else f"printed {lines[0]}"
        told[name] = {"ran": len(every) - len(failed), "failed": failed}
        print(f"{name}: {len(every) - len(failed)} of {len(every)}")
    arguments.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
