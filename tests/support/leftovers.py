"""Finds what a run leaves: processes, with them ports, files in shared memory, and its servers'
temporary folders.

A run is marked through its environment, which everything it starts inherits, so that other programs
on the machine do not matter.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator

import psutil

MARK = "MEGATRON_STARE_TEST_RUN"
WAIT_S = 60.0


class Traces:
    """Everything seen of one marked run. `look` while it lives, `left` after its end."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._processes: set[psutil.Process] = set()
        self._files: set[str] = set()

    def environment(self, inherited: dict[str, str]) -> dict[str, str]:
        """For the run."""
        return {**inherited, MARK: self._mark}

    def look(self) -> int:
        """Notes what the run's processes hold now; the number of processes that listen for SGLang's
        requests."""
        servers = 0
        for process in self._marked():
            with contextlib.suppress(psutil.Error, OSError):
                self._processes.add(process)
                listening = {
                    c.laddr.port
                    for c in process.net_connections("tcp")
                    if c.status == psutil.CONN_LISTEN
                }
                if "megatron_stare.rollout.engines.sglang.serve" in process.cmdline():
                    servers += bool(listening)
                    self._files.add(process.environ()["TMPDIR"])
                self._files |= {
                    m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/")
                }
        return servers

    def left(self) -> list[str]:
        """Lists what is still there of the run, a line each. A port is held by a process: whatever
        listens at one of the run's ports once none of its processes is left is another program's,
        which the kernel gave the number to."""
        psutil.wait_procs([*self._processes, *self._marked()], timeout=WAIT_S)
        lines = [f"process {p.pid}: {' '.join(p.cmdline())[:200]}" for p in self._marked()]
        return lines + [path for path in sorted(self._files) if os.path.exists(path)]

    def _marked(self) -> Iterator[psutil.Process]:
        """The run's processes that are alive now, zombies left out."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if (
                    process.environ().get(MARK) == self._mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    yield process
