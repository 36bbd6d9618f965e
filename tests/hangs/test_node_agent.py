"""The agent of another node and the watcher's line to it, as processes of this one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.runs import ROOT

from megatron_stare.hangs.nodes import LISTENING, TOKEN, WATCHER, Nodes, ensure
from megatron_stare.run_dir.heartbeat import IDLE, Beat, beat_file, write_beat

SECRET = "a-secret"


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    made = Nodes(SECRET, (), tmp_path)
    monkeypatch.setenv(WATCHER, f"127.0.0.1:{(tmp_path / LISTENING).read_text()}")
    monkeypatch.setenv(TOKEN, SECRET)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield made
    made.close()


def agents(folder: Path) -> list[psutil.Process]:
    named, found = ["megatron_stare.hangs.nodes", str(folder)], []
    for process in psutil.process_iter():
        # of the machine's other processes one may just have ended
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and process.cmdline()[2:4] == named:
                found.append(process)
    return found


def called(nodes: Nodes, number: int) -> None:
    """Waits until so many agents have called."""
    with nodes._changed:
        assert nodes._changed.wait_for(lambda: len(nodes._lines) == number, timeout=60)


def test_an_agent_looks_at_its_node_and_kills_what_is_the_run_s_alone(
    nodes: Nodes, tmp_path: Path
) -> None:
    folder = tmp_path / "beats-of-b"
    ensure(folder, "host/b")
    ensure(folder, "host/b")  # the second worker of the node finds it there
    called(nodes, 1)
    (agent,) = agents(folder)
    assert agent.ppid() != os.getpid()  # it outlives whoever started it
    worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    stranger = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        worker.send_signal(signal.SIGSTOP)
        write_beat(
            beat_file(folder, "trainer rank 3"),
            Beat("trainer rank 3", worker.pid, "update", 0.0, 0.0),
        )
        answers, missing = nodes.ask()()
        assert missing == {}
        ((found,),) = [each["processes"] for each in answers]
        assert (found["node"], found["role"], found["pid"]) == (
            "host/b",
            "trainer rank 3",
            worker.pid,
        )
        assert (found["state"], found["phase"]) == ("T", "update")
        assert found["threads"] or found["said"]
        nodes.kill("host/b", stranger.pid)
        nodes.kill("host/b", worker.pid)
        assert worker.wait(60) == -signal.SIGKILL
        assert stranger.poll() is None  # orders are taken in turn: it was asked for before
    finally:
        for each in (worker, stranger):
            each.kill()
            each.wait()
    agent.suspend()
    agent.kill()
    _, missing = nodes.ask()()
    assert list(missing) == ["host/b"]  # at once, and not when the limit has passed


def test_an_agent_tells_when_a_rank_of_its_node_got_on_and_answers_all_the_same(
    nodes: Nodes, tmp_path: Path
) -> None:
    """In seconds ago: the clocks of two nodes have no common zero."""
    folder = tmp_path / "beats-of-d"
    ensure(folder, "host/d")
    called(nodes, 1)
    assert nodes.moved is None
    idle, first, second = (time.monotonic() - ago for ago in (1.0, 500.0, 100.0))
    write_beat(
        beat_file(folder, "trainer rank 4"), Beat("trainer rank 4", os.getpid(), IDLE, 0.0, idle)
    )
    for moved in (first, second):
        write_beat(
            beat_file(folder, "trainer rank 3"),
            Beat("trainer rank 3", os.getpid(), "update", 0.0, moved),
        )
        with nodes._changed:
            assert nodes._changed.wait_for(
                lambda moved=moved: nodes.moved is not None and nodes.moved >= moved, 60
            )
        assert nodes.moved - moved < 50  # and not now
    answers, missing = nodes.ask()()
    assert len(answers) == 1 and missing == {}


def test_an_agent_ends_with_the_watcher_and_leaves_nothing(nodes: Nodes, tmp_path: Path) -> None:
    folder = tmp_path / "beats-of-c"
    ensure(folder, "host/c")
    called(nodes, 1)
    (agent,) = agents(folder)
    nodes.close()
    psutil.wait_procs([agent], timeout=60)
    assert not folder.exists()


def test_who_does_not_know_the_token_is_sent_away(nodes: Nodes, tmp_path: Path) -> None:
    port = int((tmp_path / LISTENING).read_text())
    for hello in ({"token": "guessed", "node": "x"}, {"node": "x"}, ["token"], None):
        with socket.create_connection(("127.0.0.1", port), 10) as line:
            line.sendall(json.dumps(hello).encode() + b"\n")
            assert line.recv(1) == b""
    assert nodes.ask()() == ([], {})
