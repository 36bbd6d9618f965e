"""The driver's end of its watcher: starts it, tells workers where their beats go, and ends it with the run."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.hangs import flight
from megatron_stare.hangs.driver_beats import DriverBeats
from megatron_stare.hangs.node_agent import TOKEN, WATCHER, ensure
from megatron_stare.hangs.node_link import LISTENING
from megatron_stare.hangs.watcher import LOCK, SETTINGS, TICK_S, Settings
from megatron_stare.run_dir.heartbeat import FOLDER_VARIABLE, CallBeats

MEMORY = Path("/dev/shm")  # a folder there no disk can stall
PREFIX = "megatron-stare-beats-"
OLD_S = 60.0  # from which on a folder's watcher has begun, or never will
START_S = 20.0  # until the watcher of a run on several nodes must listen
LEAVE_S = 5.0
CARRIED = (FOLDER_VARIABLE, WATCHER, TOKEN)


class BlackBox:
    """A run's watcher, from before its first worker until after its last. Closing twice is allowed.

    Args:
        ports: that it may listen on for its agents on other nodes; None: any.
        supervised: the driver has somebody who starts it again.

    Raises:
        UserError: the watcher cannot be started.
    """

    def __init__(self, config: Config, run_dir: Path, ports: Sequence[int] | None, *, supervised: bool = False) -> None:
        where = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        forget_left(where)
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=where))
        self._joined = config.runtime.ray_address is not None
        rule = config.faults.hangs
        settings = Settings(
            str(self._folder),
            str(run_dir.resolve()),
            os.getpid(),
            end_run=rule.end_run,
            supervised=supervised,
            urls=config.sglang.urls,
            token=secrets.token_hex(16) if self._joined else "",
            ports=list(ports or ()),
            tick_s=min(TICK_S, rule.floor_s / 4),
        )
        (self._folder / SETTINGS).write_text(json.dumps(dataclasses.asdict(settings)))
        self.beats = DriverBeats(self._folder, rule)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_stare.hangs.watcher", str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # out of Ctrl-C's reach
        )
        os.environ[FOLDER_VARIABLE] = str(self._folder)
        if self._joined:
            try:
                os.environ[WATCHER], os.environ[TOKEN] = self._port(), settings.token
            except BaseException:
                self.close()
                raise

    def _port(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                if port := (self._folder / LISTENING).read_text():
                    return port
            time.sleep(0.02)
        raise UserError("the watcher of the run does not start", where="faults.hangs.enabled", fix="set it to false")

    def close(self) -> None:
        """Ends the watcher."""
        for name in CARRIED:
            os.environ.pop(name, None)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:  # it is at a bundle
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def forget_left(where: Path) -> None:
    """Removes the folders of watchers that were killed, with their machine's memory for instance: what they left would
    stay until the machine is started anew. Their locks say which, whoever's namespace they are in."""
    for folder in where.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (folder / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - folder.stat().st_mtime > OLD_S:
                shutil.rmtree(folder)


def carried(host: str) -> dict[str, str]:
    """The environment variables that tell a worker where its beats go; none where nobody watches.

    Args:
        host: of the driver, which the watcher's agents call.
    """
    found = {name: os.environ[name] for name in CARRIED if name in os.environ}
    if WATCHER in found:
        found[WATCHER] = f"{host}:{found[WATCHER]}"
    return found


def beats_here(role: str, node: str) -> CallBeats:
    """The beats of a worker, which knows from its environment whether somebody watches; of a joined cluster it sees to
    its node's agent too.

    Args:
        node: Ray's id of it.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return CallBeats(None, role)
    here = Path(folder)
    if WATCHER in os.environ:
        here = here.with_name(f"{here.name}-{node[:8]}")
        try:
            ensure(here, f"{os.uname().nodename}/{node[:8]}")
        except OSError:
            return CallBeats(None, role)
    for name, value in flight.environment(here).items():  # read where a rank makes its groups, if they are NCCL's
        os.environ.setdefault(name, value)
    return CallBeats(here if here.is_dir() else None, role)
