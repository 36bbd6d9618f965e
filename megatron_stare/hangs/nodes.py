"""Connects the watcher with the nodes of a Ray cluster. On each node, an agent process connects to
the watcher.

The command of an agent is `python -m megatron_stare.hangs.nodes FOLDER NODE`. The run's first
worker on a node starts the agent as a detached process, so that the agent outlives the worker. When
the watcher requests facts, the agent examines the run's processes on its node. The agent ends when
the watcher ends.

The watcher and the agents send each other JSON objects, one per line. An agent first sends the
run's secret token, a random text that the driver chose. The watcher disconnects every client that
does not send the run's secret token. The watcher displays or stores the received data, and never
executes the data.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_stare.hangs import node_facts, proc_files
from megatron_stare.hangs.node_facts import LIMIT_S
from megatron_stare.process.network import free_port
from megatron_stare.run_dir.heartbeat import beats_of, newest_progress

LISTENING = "listening"  # file in the folder of beats: the port
LOCK = "agent.lock"  # file there, locked while a watcher or agent uses the folder
HELLO_S = 10.0
ANSWER_S = LIMIT_S + 15.0  # time for stacks, and NCCL's dumps beside them
LONGEST_LINE = 2**28
TELL_S = 2.0  # between an agent's checks for progress of its ranks
CALL_S = 20.0  # until the watcher must accept a connection
# environment variables of workers
TOKEN, WATCHER = "MEGATRON_STARE_WATCHER_TOKEN", "MEGATRON_STARE_WATCHER"


class Nodes:
    """The nodes whose agents have connected to the watcher.

    Args:
        ports: ports on which the watcher may listen; empty: any port. The watcher uses one port.
        folder: folder of the file that receives the port.
    """

    def __init__(self, token: str, ports: Sequence[int], folder: Path) -> None:
        self._token = token
        self._lines: dict[str, socket.socket] = {}
        self._answers: dict[str, Any] = {}
        # newest progress of a rank on any node, seconds of this node's CLOCK_MONOTONIC
        self.moved: float | None = None
        self._changed = threading.Condition()
        self._listener = socket.create_server(("", free_port("0.0.0.0", ports) if ports else 0))
        (folder / LISTENING).write_text(str(self._listener.getsockname()[1]))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                line, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        """Receives the messages of an agent until the agent disconnects."""
        node = ""
        with (
            contextlib.suppress(OSError, ValueError, LookupError, TypeError),
            line,
            line.makefile("rb") as said,
        ):
            line.settimeout(HELLO_S)
            hello = json.loads(said.readline(4096))
            if not hmac.compare_digest(str(hello["token"]), self._token):
                return
            line.settimeout(None)
            node = str(hello["node"])
            with self._changed:
                self._lines[node] = line
                self._changed.notify_all()
            while content := said.readline(LONGEST_LINE):
                answer = json.loads(content)
                if "moved_s" in answer:
                    self._take_progress(time.monotonic() - float(answer["moved_s"]))
                    continue
                with self._changed:
                    self._answers[node] = answer
                    self._changed.notify_all()
        with self._changed:
            if node and self._answers.get(node) is None:
                self._answers[node] = "its agent has ended"
            self._changed.notify_all()

    def _take_progress(self, moved: float) -> None:
        with self._changed:
            self.moved = moved if self.moved is None else max(self.moved, moved)
            self._changed.notify_all()

    def ask(self) -> Callable[[], tuple[list[dict[str, Any]], dict[str, str]]]:
        """Asks every node for its facts, and returns at once a function that collects the answers.
        The returned function waits for the answers, at most until `ANSWER_S` seconds after the call
        of `ask`. The returned function then returns two values: the answers of the nodes, and a
        dict that maps each node without an answer to the reason."""
        deadline = time.monotonic() + ANSWER_S
        with self._changed:
            nodes = dict(self._lines)
            self._answers = {
                node: old for node, old in self._answers.items() if isinstance(old, str)
            }
        for node, line in nodes.items():
            self._send(node, line, {"look": True})

        def answers() -> tuple[list[dict[str, Any]], dict[str, str]]:
            with self._changed:
                self._changed.wait_for(
                    lambda: nodes.keys() <= self._answers.keys(), deadline - time.monotonic()
                )
                told = {
                    node: self._answers.get(node, f"nothing in {ANSWER_S:.0f} s") for node in nodes
                }
            return (
                [answer for answer in told.values() if not isinstance(answer, str)],
                {node: why for node, why in told.items() if isinstance(why, str)},
            )

        return answers

    def kill(self, node: str, pid: int) -> None:
        """Asks the agent of a node to kill a process of the run."""
        with self._changed:
            line = self._lines.get(node)
        if line is not None:
            self._send(node, line, {"kill": pid})

    def _send(self, node: str, line: socket.socket, order: dict[str, Any]) -> None:
        try:
            line.sendall(json.dumps(order).encode() + b"\n")
        except OSError as error:
            with self._changed:
                self._answers.setdefault(node, f"its agent is not there: {error.strerror}")

    def close(self) -> None:
        """Disconnects the agents. A disconnected agent ends."""
        self._listener.close()
        with self._changed:
            for line in self._lines.values():
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)


def ensure(folder: Path, node: str) -> None:
    """Starts the run's agent on this node. Does nothing if the watcher or an agent of the run
    already uses `folder`. Raises OSError if the agent's folder or process cannot be created."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / LOCK).open("a") as lock:
        try:
            # the agent inherits the lock and holds it as long as it lives
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        # Start it through another process that ends at once: a worker's end kills its children.
        subprocess.run(
            [sys.executable, "-c", _APART, sys.executable, "-m", __name__, str(folder), node],
            pass_fds=(lock.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )


_APART = (
    "import os, sys; os.fork() and os._exit(0); os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"
)


def serve(folder: Path, node: str, address: str, token: str) -> None:
    """Answers the watcher's requests until the watcher disconnects. Also reports progress of this
    node's ranks. Raises OSError if the watcher cannot be reached."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), CALL_S) as line, line.makefile("rb") as said:
        line.settimeout(None)
        line.sendall(json.dumps({"token": token, "node": node}).encode() + b"\n")
        sending, gone = threading.Lock(), threading.Event()
        threading.Thread(
            target=_tell_progress, args=(folder, line, sending, gone), daemon=True
        ).start()
        while content := said.readline():
            order = json.loads(content)
            if "kill" in order:
                _kill(folder, int(order["kill"]))
                continue
            dumps, _ = node_facts.dump_flights(folder)
            processes = node_facts.look(folder, None, leave_out=[os.getpid()], node=node)
            answer = {
                "processes": processes,
                "dumps": {name: part.hex() for name, part in dumps.items()},
            }
            with sending:
                line.sendall(json.dumps(answer).encode() + b"\n")
        gone.set()


def _tell_progress(
    folder: Path, line: socket.socket, sending: threading.Lock, gone: threading.Event
) -> None:
    """Reports new progress of this node's ranks to the watcher. A report says how many seconds ago
    the progress was made, because the clocks of different nodes cannot be compared."""
    told: float | None = None
    with contextlib.suppress(OSError):  # the watcher is gone
        while not gone.wait(TELL_S):
            moved = newest_progress(folder)
            if moved is not None and moved != told:
                told = moved
                with sending:
                    line.sendall(json.dumps({"moved_s": time.monotonic() - moved}).encode() + b"\n")


def _kill(folder: Path, pid: int) -> None:
    """Kills a process of the run, and all descendants of this process. Does nothing if the process
    does not belong to the run."""
    every = proc_files.everything()
    if pid in proc_files.below([beat.pid for beat in beats_of(folder)], every):
        proc_files.kill(pid)


def main(folder: str, node: str) -> None:
    """Runs the agent of a node."""
    try:
        serve(Path(folder), node, os.environ[WATCHER], os.environ[TOKEN])
    except (OSError, ValueError):
        pass  # the watcher is gone, and the run with it
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
