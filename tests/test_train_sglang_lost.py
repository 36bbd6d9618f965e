"""Whole runs whose servers cannot start: what they say, and that they leave nothing."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest
from support import sglang_servers as servers
from support.runs import model, train
from test_train_sglang import SGLANG

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING)),
]
ALONE = {"runtime.runner": "inline", "parallel.tensor": 1, "run.steps": 1}


def stopped(folder: Path, *overrides: str) -> str:
    """What a run says that does not start, and that leaves nothing."""
    done = train(f"run.dir={folder / 'run'}", *SGLANG, *overrides, cwd=folder, **ALONE)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr.split("its last words")[0]
    assert not (folder / "run").exists()
    assert [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or ())] == []
    return done.stderr


def test_ports_that_are_all_taken_are_refused_before_anything_starts(tmp_path: Path) -> None:
    first, held = taken_in_a_row(4)
    try:
        said = stopped(tmp_path, model(), f"runtime.ports=[{first}, {first + 3}]")
    finally:
        for each in held:
            each.close()
    assert "runtime.ports" in said


def taken_in_a_row(count: int) -> tuple[int, list[socket.socket]]:
    """The first of some ports, and what listens on each of them."""
    for first in range(21_000, 29_000, count):
        held: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                held.append(socket.create_server(("127.0.0.1", port)))
            return first, held
        except OSError:
            for each in held:
                each.close()
    raise AssertionError("no ports are free here")
