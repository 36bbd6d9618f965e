"""Starts SGLang servers on this machine, waits until the servers answer, and ends the servers.
Removes everything that a server leaves behind.

Each server runs in its own process group. A server runs serve.py in the Python environment of
SGLang. Each server has its own random API key, and requires this key even on loopback. The standard
output and the standard error of a server go to the server's own log file. If a server dies, the
error message quotes the end of the server's log file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil

from megatron_stare.process.interruption import pause
from megatron_stare.process.network import (
    EVERYWHERE,
    LOOPBACK,
    free_port,
    require_own_address,
)
from megatron_stare.process.output import leave_tail
from megatron_stare.rollout.engines.sglang.client import ServerLostError, SGLangClient
from megatron_stare.rollout.engines.sglang.protocol import SGLangError
from megatron_stare.rollout.engines.sglang.serve import (
    API_KEY_VARIABLE,
    SCRATCH_VARIABLE,
    remove_shared_memory,
)
from megatron_stare.rollout.engines.sglang.server_options import ServerOptions

PROBE_EVERY_S = 0.5
PROBE_S = 10.0  # time limit of one probe, after which the process is checked
LEAVE_S = 5.0  # time from the request to exit until the process group is killed
# For killed ranks to disappear. Only then is their GPU memory free; tens of GB take seconds.
KILLED_S = 15.0
LOG_TAIL_BYTES = 3000
LOG_BYTES = 1 << 20
TAKEN = "address already in use"
RANKS = "sglang"  # prefix of the names of the ranks' processes


def meeting_at(address: str, options: ServerOptions) -> str:
    """Returns a host:port of this machine for the rendezvous of a server's ranks. The port, and the
    ports that SGLang derives from it, are free at all addresses, as SGLang requires."""
    return f"{address}:{free_port(EVERYWHERE, options.meeting_ports, options.following)}"


class ServerProcess:
    """Process group of an SGLang server. The current Python process started the server. A
    multi-node server has one process group on each node. `close` ends the process group. The
    process group also ends when the current Python process ends for any reason.

    Args:
        meeting: rendezvous host:port of a multi-node server's ranks. None: a free port here.
    """

    def __init__(self, options: ServerOptions, meeting: str | None = None) -> None:
        self._options = options
        self.api_key = secrets.token_hex(16)
        require_own_address(options.host, "sglang.host")
        port = free_port(options.host, options.http_ports)
        if meeting is None and options.data > 1:
            meeting = meeting_at(LOOPBACK, options)
        # SGLang's ranks use the server's listening address for their rendezvous
        ranks_port = None if meeting else free_port(options.host, options.meeting_ports)
        self.url = f"http://{options.address}:{port}"
        self._scratch = Path(tempfile.mkdtemp(prefix="megatron-stare-sglang-"))
        self._log = self._scratch / "server.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(options.python, "-m", "megatron_stare.rollout.engines.sglang.serve"),
                    *options.arguments(port, ranks_port, meeting),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._scratch,
                env=self._environment(),
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        return self._options.process_environment() | {
            SCRATCH_VARIABLE: str(self._scratch),
            API_KEY_VARIABLE: self.api_key,
        }

    @property
    def process_group(self) -> int:
        return self._process.pid

    def wait_ready(
        self, client: SGLangClient, run: Callable[[Callable[[], Coroutine[Any, Any, Any]]], object]
    ) -> None:
        """Polls /model_info until the server answers.

        Args:
            run: function that runs a coroutine in the engine's event loop. `run` takes a function
                that makes the coroutine.

        Raises:
            SGLangError: the server ended, or did not answer within the time limit.
        """
        deadline = time.monotonic() + self._options.start_timeout_s
        while True:
            self.require_alive()
            with contextlib.suppress(ServerLostError, TimeoutError):
                # a short limit, because another program on this port may never answer
                run(lambda: asyncio.wait_for(client.model_info(), PROBE_S))
                return
            if time.monotonic() > deadline:
                raise SGLangError(
                    f"the server did not answer within {self._options.start_timeout_s:.0f}"
                    f" s\n{self.last_words()}",
                    where="sglang.start_timeout_s",
                )
            pause(PROBE_EVERY_S)

    def memory_mb(self) -> float:
        """Returns the total proportional set size (Pss) of the server's processes, in units of 10^6
        bytes. A process that ends during the call counts as 0 bytes."""
        total = 0
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._process.pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss
        return total / 1e6

    def require_alive(self) -> None:
        """Raises SGLangError if the server has ended. The error quotes the end of the server's
        log."""
        if (ended := self.ended()) is not None:
            raise SGLangError(f"the server {ended}", where=self.url)

    def ended(self) -> str | None:
        """Describes how the server ended, and quotes the end of the server's log. Returns None if
        the server has not ended."""
        code = self._process.poll()
        if code is None:
            return None
        # SGLang runs for a while without its port, so the message may be far from the log's end
        why = f" ({TAKEN}: another process took its port)" if TAKEN in self._said().lower() else ""
        return f"ended with {code}{why}; its last words:\n{self.last_words()}"

    def lost_rank(self) -> str | None:
        """Looks for a killed rank process that SGLang's launcher did not notice. Returns a report
        that quotes the end of the log, or None if no killed rank is found."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children():
                if child.status() == psutil.STATUS_ZOMBIE and child.name().startswith(RANKS):
                    return (
                        f"lost the process of a rank, {child.pid}; the last words"
                        f" there:\n{self.last_words()}"
                    )
        return None

    def last_words(self) -> str:
        """Returns the end of the server's log, with the server's API key masked."""
        return self._said().replace(self.api_key, "<key>")[-LOG_TAIL_BYTES:]

    def _said(self) -> str:
        """Returns the last lines of the server's log, at most LOG_BYTES bytes in total. SGLang logs
        continuously, so the log of a long run is large."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            before = max(log.seek(0, os.SEEK_END) - LOG_BYTES, 0)
            log.seek(before)
            said = log.read()
            return said[said.find(b"\n") + 1 if before else 0 :].decode(errors="replace")
        return ""

    def kill(self) -> None:
        """Kills the server's process group at once, and keeps the server's log."""
        remove_shared_memory(self.process_group)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process_group, signal.SIGKILL)

    def close(self) -> None:
        """Ends the server's process group and removes the server's files. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()  # the request to exit, see serve.py
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_S)
            self.kill()  # kills ranks that outlived their launcher
            self._process.wait()
            _until_gone(self.process_group)
            leave_tail(f"server {self.url}", self._said().replace(self.api_key, "<key>"))
        shutil.rmtree(self._scratch, ignore_errors=True)


def _until_gone(group: int) -> None:
    """Waits until all processes of a killed process group have closed their files and freed their
    GPU memory. Waits at most KILLED_S seconds."""
    until = time.monotonic() + KILLED_S
    while time.monotonic() < until and any(
        _has_files(process, group) for process in psutil.process_iter()
    ):
        time.sleep(0.05)


def _has_files(process: psutil.Process, group: int) -> bool:
    """Returns True if the process belongs to the process group and at least one thread of the
    process is alive. A process is a zombie as soon as its main thread has ended, even if other
    threads of the process have not ended yet."""
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        return os.getpgid(process.pid) == group and (
            process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
        )
    return False
