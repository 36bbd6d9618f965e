"""Runs the tests on one mutant after another, those nearest to its file first."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutation.sites import Mutant

NEAR = ("algorithms", "ops", "megatron", "records", "environments")  # folders of tests that hold the mutated areas
FIRST_S = 60.0  # of the files that name the module, how long the first round may take by what files took unmutated


@dataclass(frozen=True)
class Judgement:
    """killed_by: the first test that failed, or 'timeout'; None: every test passed. seconds: that it took."""

    killed_by: str | None
    seconds: float


class Checkout:
    """A work tree of its own at one commit, in which one file at a time is wrong."""

    def __init__(self, repository: Path, folder: Path, commit: str) -> None:
        self._repository, self.folder = repository, folder
        subprocess.run(["git", "worktree", "add", "--detach", "-q", folder, commit], cwd=repository, check=True)

    def close(self) -> None:
        subprocess.run(["git", "worktree", "remove", "--force", self.folder], cwd=self._repository, check=True)

    def judge(self, mutant: Mutant, rounds: Iterable[Sequence[str]], timeout_s: float) -> Judgement:
        """The first failure in rounds of test files, each with those before it left out."""
        path, began = self.folder / mutant.file, time.monotonic()
        right = path.read_text()
        path.write_text(mutant.apply(right))
        try:
            for files in rounds:
                if files and (failed := run_tests(self.folder, files, timeout_s)):
                    return Judgement(failed, time.monotonic() - began)
            return Judgement(None, time.monotonic() - began)
        finally:
            path.write_text(right)


def run_tests(folder: Path, files: Sequence[str], timeout_s: float) -> str | None:
    """The first test that fails, 'timeout', or None. Every process the tests leave is killed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        "0",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode == 0:
        return None
    named = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return named[0].split(" - ")[0].removeprefix("FAILED ").removeprefix("ERROR ") if named else said[-200:]


def rounds_for(folder: Path, mutant: Mutant, seconds: dict[str, float], whole: bool) -> list[list[str]]:
    """Test files in the order in which they are tried: the quick ones that name the module, all near ones, and of the
    `whole` suite the others."""
    module = mutant.file.removesuffix(".py").replace("/", ".")
    files = sorted(str(path.relative_to(folder)) for path in (folder / "tests").rglob("test_*.py"))
    naming = {file for file in files if module in _imports(folder / file)}
    naming |= {file for file in files if Path(file).stem == f"test_{Path(mutant.file).stem}"}
    first: list[str] = []
    for file in sorted(naming, key=lambda file: seconds.get(file, 30.0)):
        if sum(seconds.get(each, 30.0) for each in [*first, file]) <= FIRST_S or not first:
            first.append(file)
    near = [file for file in files if Path(file).parts[1] in NEAR or file in naming]
    near.sort(key=lambda file: (file not in naming, seconds.get(file, 30.0)))
    second = [file for file in near if file not in first]
    rest = [file for file in files if file not in near] if whole else []
    return [first, second, sorted(rest, key=lambda file: seconds.get(file, 30.0))]


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found
