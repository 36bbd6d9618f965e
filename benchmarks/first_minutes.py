"""Times what README's first door leads to: a run on data and with a reward of one's own.

    python benchmarks/first_minutes.py --out benchmarks/results/first_minutes.json

The commands are those of README.md, in their order, in a shell of its own whose folder has the
environment of this checkout. The last one opens a browser: here the first figure of the report is
looked for in the file instead. tests/docs/test_first_minutes.py runs the same commands.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OPENED = "xdg-open "


def commands() -> list[str]:
    """Returns the commands of README's block, one a line."""
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"^  ```bash\n(.*?)^  ```", text, re.MULTILINE | re.DOTALL)
    return [line.strip().partition("    #")[0] for line in block.splitlines()]


def run(folder: Path) -> list[dict[str, Any]]:
    """Runs the commands in one shell and returns of each its seconds and the end of its output.

    Args:
        folder: an empty one.

    Raises:
        RuntimeError: a command failed, or the report has no figure.
    """
    (folder / ".venv").symlink_to(sys.prefix)
    shell = subprocess.Popen(
        ["bash", "--noprofile", "--norc"],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert shell.stdin is not None and shell.stdout is not None
    told = []
    with shell:
        for command in commands():
            if command.startswith(OPENED):
                command_run = f"grep -c '<svg' {command.removeprefix(OPENED)}"
            else:
                command_run = command
            begun = time.monotonic()
            shell.stdin.write(f'{command_run}\necho "status $?"\n')
            shell.stdin.flush()
            lines: list[str] = []
            while not (lines and lines[-1].startswith("status ")):
                if not (line := shell.stdout.readline()):
                    raise RuntimeError(f"{command}: the shell ended: {lines}")
                lines.append(line.rstrip("\n"))
            if lines.pop() != "status 0":
                raise RuntimeError(f"{command}: " + "\n".join(lines[-20:]))
            seconds = round(time.monotonic() - begun, 1)
            told.append({"command": command, "seconds": seconds, "ends": lines[-3:]})
        shell.stdin.close()
    return told


def main() -> None:
    from machine import machine

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        told = run(Path(folder))
        for each in told:
            each["ends"] = [line.replace(folder, ".") for line in each["ends"]]
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True)
    result = {
        "commit": commit.strip(),
        "machine": machine(),
        "seconds": round(sum(each["seconds"] for each in told), 1),
        "commands": told,
    }
    args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
