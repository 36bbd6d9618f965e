"""A checkout of its own in which one file at a time is wrong, and the tests that are run there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutation.sites import Mutant

RUNNER = Path(__file__).parent / "runner.py"
SAID = 160  # characters of a test's message that are kept
_FOLDERS = re.compile(r"(?<![\w.:/-])/(?:[^\s/'\"]+/)+")  # of an absolute path


@dataclass(frozen=True)
class Verdict:
    """status: 'killed' by a test that failed, or that crashed its process twice; 'survived' all of them; 'timeout';
    'broken': the tests ended in another way, which says nothing.

    by: the test that failed or was under way, and how.
    """

    status: str
    by: str | None
    seconds: float


def brief(message: str) -> str:
    """The beginning of a message, in one line."""
    return without_folders(" ".join(message.split()))[:SAID]


def without_folders(text: str) -> str:
    """A text that names files without the folders which they lie in on this machine."""
    return _FOLDERS.sub("", text)


class Checkout:
    """A work tree of its own at one commit. Nobody else's checkout sees what is written here."""

    def __init__(self, repository: Path, folder: Path, commit: str) -> None:
        self._repository, self.folder = repository, folder / "checkout"
        self._scratch = folder
        subprocess.run(["git", "worktree", "add", "--detach", "-q", self.folder, commit], cwd=repository, check=True)
        self._runner: subprocess.Popen[str] | None = None

    def close(self) -> None:
        self._end()
        subprocess.run(["git", "worktree", "remove", "--force", self.folder], cwd=self._repository, check=True)

    def judge(self, mutant: Mutant, tests: list[str], timeout_s: float) -> Verdict:
        """What tests (files, or tests of them) say of a mutant; the first failure decides."""
        path = self.folder / mutant.file
        right, written = path.read_text(), path.stat()
        path.write_text(mutant.apply(right))
        try:
            found = self.run(tests, timeout_s)
            if (found["code"] or 0) < 0:  # what crashes the tests' process does so again
                found = self.run(found["begun"][-1:] or tests, timeout_s)
        finally:
            path.write_text(right)
            os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))  # what was compiled of it is right again
        if found["code"] is None:
            return Verdict("timeout", (found["begun"] or [None])[-1], found["seconds"])
        if found["failed"]:
            test, error, message = found["failed"][0]
            slow = error in {"TimeoutError", "TimeoutExpired"}
            said = f"{test} {error}: {brief(message)}"
            return Verdict("timeout" if slow else "killed", said, found["seconds"])
        if found["code"] == 0:
            return Verdict("survived", None, found["seconds"])
        if found["code"] < 0 and -found["code"] != signal.SIGKILL:
            said = f"{found['begun'][-1:]} {signal.Signals(-found['code']).name}, twice"
            return Verdict("killed", said, found["seconds"])
        return Verdict("broken", f"pytest ended with {found['code']}: {brief(found['said'][-300:])}", found["seconds"])

    def run(
        self, tests: list[str], timeout_s: float, *, lines: Path | None = None, first: bool = True
    ) -> dict[str, Any]:
        """Runs tests, up to the `first` failure or all; see runner.py.

        Args:
            lines: the folder in which what they reach is written down, or None.
        """
        log = self._scratch / "run.log"
        job = {"tests": tests, "timeout": timeout_s, "log": str(log), "first": first}
        runner = self._start()
        assert runner.stdin and runner.stdout
        runner.stdin.write(json.dumps({**job, "lines": lines and str(lines)}) + "\n")
        runner.stdin.flush()
        answer = runner.stdout.readline()
        if not answer:
            raise RuntimeError(f"the runner ended: {runner.wait()}")
        return {**json.loads(answer), "said": log.read_text(errors="replace") if log.exists() else ""}

    def _start(self) -> subprocess.Popen[str]:
        if self._runner is None:
            environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
            words = [sys.executable, "-m", "compileall", "-q", "megatron_stare"]  # once, for every process of every run
            subprocess.run(words, cwd=self.folder, env=environment, check=True)
            log = (self._scratch / "runner.log").open("w")
            command = [sys.executable, str(RUNNER)]
            self._runner = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
            assert self._runner.stdout
            if not self._runner.stdout.readline():
                raise RuntimeError(f"the runner did not start: {(self._scratch / 'runner.log').read_text()[-2000:]}")
        return self._runner

    def _end(self) -> None:
        if self._runner is not None:
            self._runner.terminate()  # with what it runs
            self._runner.wait()
            self._runner = None
        for left in self._scratch.glob("run.*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
