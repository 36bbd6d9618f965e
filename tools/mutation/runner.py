"""Runs tests in a process forked for every run from one that has imported what is not ours: torch, Megatron, pytest.

    python runner.py        # in a checkout; reads jobs, a line of JSON each, and answers each with one

A job: {"tests": [...], "timeout": seconds, "log": file, "lines": folder or null, "first": whether the first failure
ends it}. Its answer: {"code": pytest's or null where it was ended, "seconds": ..., "tests": {test: seconds of those
that passed}, "failed": [[test, exception, message]], "begun": [test, ...]}.
Whatever a run leaves running is killed.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from multiprocessing import reduction, util
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
SAMPLE = ["tests/algorithms", "tests/ops", "tests/megatron"]  # whose imports are made once


class Recorder:
    """A plugin of pytest that writes down what became of each test as it ends."""

    def __init__(self, path: Path, number: Any) -> None:
        self._file, self._number, self._count = path.open("w", buffering=1), number, 0

    def _say(self, *words: Any) -> None:
        self._file.write(json.dumps(words) + "\n")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._say("failed", report.nodeid, "collection", str(report.longrepr)[-500:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._count += 1
        if self._number is not None:
            self._number[0] = self._count
        self._say("begins", nodeid)

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        if report.when != "collect":
            self._say("failed", node.nodeid, call.excinfo.typename, str(call.excinfo.value)[-500:])

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._say(report.outcome, report.nodeid, report.when, report.duration)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a test leaves behind becomes a child of this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path[:1] = [os.getcwd()]  # as `python -m pytest` has it
    sys.path.append(str(Path(__file__).parent.parent))
    _import_theirs()
    gc.freeze()
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    log = Path(job["log"])
    record = log.with_suffix(".record")
    record.write_text("")
    began = time.monotonic()
    child = os.fork()
    if not child:
        _run(job, log, record)
    try:
        ended = select.select([watched := os.pidfd_open(child)], [], [], job["timeout"])[0]
        os.close(watched)
        seconds = time.monotonic() - began
        if not ended:
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:  # of a run that is not waited for, too
        _kill_what_is_left()
    passed: dict[str, float] = {}
    failed, begun = [], []
    for what, test, *more in map(json.loads, record.read_text().splitlines()):
        if what == "begins":
            begun.append(test)
        elif what == "failed" and more[0] not in ("setup", "call", "teardown"):
            failed.append([test, *more])
        elif what == "passed":
            passed[test] = passed.get(test, 0.0) + more[1]
    for test, *_ in failed:
        passed.pop(test, None)
    return {"code": code if ended else None, "seconds": seconds, "tests": passed, "failed": failed, "begun": begun}


def _run(job: dict[str, Any], log: Path, record: Path) -> None:
    """The forked process's part; does not return."""
    code = 70
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        number = None
        if job["lines"]:
            from mutation import lines

            number = lines.begin(Path(job["lines"]))
            lines.follow()
        _fork_servers()
        import pytest

        folder = log.with_suffix(".tests")
        shutil.rmtree(folder, ignore_errors=True)
        words = ["-q", "-m", "not slow", "-p", "no:cacheprovider", f"--basetemp={folder}", *job["tests"]]
        code = int(pytest.main([*(["-x"] if job["first"] else []), *words], plugins=[Recorder(record, number)]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork_servers() -> None:
    """The server that forks ranks is itself forked, from here, before any test has run: it would need seconds to start,
    and what it imports of the package, the mutated file included, it imports anew."""
    here, there = socket.socketpair()
    server = os.fork()
    if not server:
        here.close()
        with suppress(EOFError):  # no test has ranks
            listener, alive = reduction.recvfds(there, 2)
            command = there.makefile().read()
            there.close()
            first, _, after = command.partition("main(")
            exec(f"{first}main({listener}, {alive},{after.split(',', 2)[2]}", {"__name__": "__main__"})
        os._exit(0)
    there.close()
    start = util.spawnv_passfds

    def fork(path: Any, words: list[str], passed: list[int]) -> int:
        nonlocal here
        if here is None or not words[-1].startswith("from multiprocessing.forkserver"):
            return start(path, words, passed)
        reduction.sendfds(here, passed)
        here.sendall(words[-1].encode())
        here.shutdown(socket.SHUT_WR)
        here.close()
        here = None
        return server

    util.spawnv_passfds = fork


def _import_theirs() -> None:
    """Imports what collecting tests imports that is not of the checkout; found out by a process that ends."""
    reads, writes = os.pipe()
    scout = os.fork()
    if not scout:
        os.close(reads)
        import pytest

        pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", *SAMPLE])
        names = [name for name, module in list(sys.modules.items()) if not _ours(module)]
        with os.fdopen(writes, "w") as file:
            file.write("\n".join(names))
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as file:
        names = file.read().split("\n")
    os.waitpid(scout, 0)
    sys.path.insert(0, "tests")
    importlib.import_module("conftest")  # sets what has to be set before torch and Triton are imported
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if _ours(module) and not name.startswith(("mutation", "__main__")):
            del sys.modules[name]
    sys.path.remove("tests")


def _ours(module: Any) -> bool:
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), "")
    return str(file).startswith(os.getcwd() + "/") or module.__name__.split(".")[0] == "megatron_stare"


def _kill_what_is_left() -> None:
    """Every process under this one, until there is none."""
    while True:
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        under = {pid for pid in parents if os.getpid() in _ancestors(pid, parents)}
        if not under:
            return
        for pid in under:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, 0)[0]:
                pass


def _ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    found: set[int] = set()
    while (pid := parents.get(pid, 0)) and pid not in found:
        found.add(pid)
    return found


if __name__ == "__main__":
    main()
