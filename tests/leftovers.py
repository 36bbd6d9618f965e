"""What a run leaves behind: processes, listening ports, files in shared memory, and its servers' temporary folders.

A run is marked through its environment, which everything it starts inherits, so that other programs on the machine do
not matter.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid

import psutil

MARK = "MEGATRON_STARE_TEST_RUN"
WAIT_S = 60.0


class Traces:
    """Everything seen of one marked run. `look` while it lives, `left` after its end."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._processes: set[psutil.Process] = set()
        self._ports: set[int] = set()
        self._files: set[str] = set()

    def environment(self, inherited: dict[str, str]) -> dict[str, str]:
        """For the run."""
        return {**inherited, MARK: self._mark}

    def look(self) -> int:
        """Notes what the run's processes hold now; the number of processes that listen for SGLang's requests."""
        servers = 0
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                variables = process.environ()
                if variables.get(MARK) != self._mark:
                    continue
                self._processes.add(process)
                listening = {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
                self._ports |= listening
                if "megatron_stare.rollout.sglang.serve" in process.cmdline():
                    servers += bool(listening)
                    self._files.add(variables["TMPDIR"])
                self._files |= {m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/")}
        return servers

    def left(self) -> list[str]:
        """What of it is still there, a line each."""
        _, alive = psutil.wait_procs(list(self._processes), timeout=WAIT_S)
        lines = [f"process {p.pid}: {' '.join(p.cmdline())[:200]}" for p in alive]
        for port in sorted(self._ports):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    lines.append(f"port {port}")
        return lines + [path for path in sorted(self._files) if os.path.exists(path)]
