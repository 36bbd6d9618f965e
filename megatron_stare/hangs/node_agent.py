"""The black box's hand on another node of a Ray cluster: `python -m megatron_stare.hangs.node_agent FOLDER`.

The first worker of the run on a node starts it, apart from itself, so that it outlives whatever becomes of that one. It
calls the watcher, looks at the run's processes here when it is asked to, and ends with the watcher.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from megatron_stare.hangs import flight, node_facts, proc_files
from megatron_stare.hangs.watcher import LOCK
from megatron_stare.run_dir.heartbeat import beats_of

CALL_S = 20.0  # until the watcher must have answered a call
TOKEN, WATCHER = "MEGATRON_STARE_WATCHER_TOKEN", "MEGATRON_STARE_WATCHER"  # environment variables of workers


def ensure(folder: Path, node: str) -> None:
    """Starts this node's agent where there is none. Raises OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the agent inherits it, and holds it as long as it lives
        except OSError:
            return
        # through another process, which ends at once: a worker takes its children with it when it ends
        subprocess.run(
            [sys.executable, "-c", _APART, sys.executable, "-m", __name__, str(folder), node],
            pass_fds=(lock.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )


_APART = "import os, sys; os.fork() and os._exit(0); os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"


def serve(folder: Path, node: str, address: str, token: str) -> None:
    """Answers the watcher until it is gone. Raises OSError where it cannot be reached."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), CALL_S) as line, line.makefile("rb") as said:
        line.settimeout(None)
        line.sendall(json.dumps({"token": token, "node": node}).encode() + b"\n")
        while content := said.readline():
            order = json.loads(content)
            if "kill" in order:
                _kill(folder, int(order["kill"]))
                continue
            dumps, _ = flight.dump(folder)
            processes = node_facts.look(folder, None, leave_out=[os.getpid()], node=node)
            answer = {"processes": processes, "dumps": {name: part.hex() for name, part in dumps.items()}}
            line.sendall(json.dumps(answer).encode() + b"\n")


def _kill(folder: Path, pid: int) -> None:
    """Of the run's own processes alone, and of what they have started."""
    every = proc_files.everything()
    if pid in proc_files.below([beat.pid for beat in beats_of(folder)], every):
        proc_files.kill(pid)


def main(folder: str, node: str) -> None:
    """The agent of a node."""
    try:
        serve(Path(folder), node, os.environ[WATCHER], os.environ[TOKEN])
    except (OSError, ValueError):
        pass  # the watcher is gone, and the run with it
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
