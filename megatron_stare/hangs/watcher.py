"""The watcher is a separate process that detects when a run makes no progress. The command of the
watcher is `python -m megatron_stare.hangs.watcher FOLDER`.

The driver starts the watcher (`driver_side.py`). The watcher ends when its standard input closes.
The kernel closes the watcher's standard input even if the driver is killed. The watcher reads the
driver's heartbeats (beats) and copies them into the run directory. When a phase exceeds its time
limit, the watcher collects facts about all processes of the run, and writes them into a folder, the
bundle. The watcher also prints one screen of text that says which process waits for which. The
watcher imports neither torch nor Ray. The watcher sends no requests to the processes that the run
started. If a call can block on a file system, the watcher makes the call on a thread that the
watcher can abandon.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_stare.hangs import bundle, node_facts, proc_files
from megatron_stare.hangs.bundle import STATES, screen
from megatron_stare.hangs.hang_facts import (
    Facts,
    ProcessFacts,
    ReplicaFacts,
    RequestFacts,
    ServerFacts,
)
from megatron_stare.hangs.nodes import LOCK, Nodes
from megatron_stare.hangs.verdict import Verdict, verdict
from megatron_stare.hangs.vigil import Starvation, Vigil, of_the_run
from megatron_stare.run_dir.heartbeat import (
    COPY_S,
    DRIVER,
    HEARTBEAT_FILE,
    REQUESTS,
    Beat,
    beat_file,
    newest_progress,
    read_beat,
    write_beat,
)

SETTINGS = "watch.json"  # file in the folder of beats
TICK_S = 1.0  # between two looks at the driver's beat
ASK_S = 5.0  # for a server to send any answer
LET_GO_S = 30.0  # for the run to end or continue after culprits were killed


@dataclass(frozen=True)
class Settings:
    """Settings that the driver passes to its watcher.

    Args:
        supervised: whether a supervisor restarts the driver.
        urls: URLs of the servers that the run uses but did not start. The URL at index i belongs to
            engine i.
        token: token that the agents of nodes must send; "": the run has no agents.
        ports: ports on which the watcher may listen for agents; empty: any port.
    """

    folder: str
    run_dir: str
    driver: int
    end_run: bool = False
    supervised: bool = False
    urls: Sequence[str] = ()
    token: str = ""
    ports: Sequence[int] = ()
    tick_s: float = TICK_S


class Watcher:
    """Watches one run until the driver of the run ends."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._folder = settings, Path(settings.folder)
        self._run_dir = Path(settings.run_dir)
        self._vigil, self._starvation = Vigil(settings.tick_s), Starvation()
        self._nodes = (
            Nodes(settings.token, settings.ports, self._folder) if settings.token else None
        )
        self._copier = _Copier(self._run_dir / HEARTBEAT_FILE)
        self._copied = -COPY_S
        self._bundle = ""
        self._failed = ""  # newest failure of the watcher itself

    def run(self) -> None:
        """Watches until the driver has ended. Reports errors of the watcher itself, and continues
        to watch."""
        while not self._driver_ended():
            try:
                self._look()
            except Exception as error:  # the run is not watched any more if this process ends
                said = f"the watcher failed: {error!r}"
                if said != self._failed:  # not once a tick
                    say(said)
                self._failed = said
        beat = self._read()
        if beat is not None:
            self._copy(replace(beat, process="ended"))
        self._copier.last()

    def _look(self) -> None:
        """Copies the driver's heartbeat into the run directory every COPY_S seconds, and reports a
        hang."""
        beat = self._read()
        if beat is None:
            return
        if time.monotonic() - self._copied >= COPY_S:
            self._copy(beat)
        if self._vigil.hangs(beat, time.monotonic(), self._starved(beat)):
            self._tell(beat)

    def _read(self) -> Beat | None:
        """Reads the driver's heartbeat. Progress of any rank counts as progress of the driver. The
        driver itself reports no progress while the driver waits for ranks. If only the driver's own
        progress counted, the watcher could mistake a long update for a hang."""
        beat = read_beat(beat_file(self._folder, DRIVER))
        if beat is None:
            return None
        elsewhere = None if self._nodes is None else self._nodes.moved
        known = (beat.moved, newest_progress(self._folder), elsewhere)
        return replace(beat, moved=max(moved for moved in known if moved is not None))

    def _driver_ended(self) -> bool:
        """Returns True if the driver has ended. Waits at most `tick_s` seconds until the driver
        ends."""
        ready, _, _ = select.select([sys.stdin], [], [], self._settings.tick_s)
        return bool(ready) or os.getppid() != self._settings.driver

    def _starved(self, beat: Beat) -> float:
        """Returns the seconds that the run waited for a CPU since the last tick. Returns 0 until
        half of the phase's time limit has passed without progress."""
        if not self._vigil.near(beat, time.monotonic()):
            self._starvation.forget()
            return 0.0
        return self._starvation.since(of_the_run(self._folder))

    def _copy(self, beat: Beat) -> None:
        self._copied = time.monotonic()
        now = proc_files.status(beat.pid)
        state = beat.process or STATES["X" if now is None else now.state]
        self._copier.put(replace(beat, written=time.time(), process=state, black_box=self._bundle))

    def _tell(self, beat: Beat) -> None:
        """Collects facts about the hang, writes the bundle, and prints which process waits for
        which. If the disk or the memory is full, this method prints the report but writes no
        bundle. Kills the processes that block the run if faults.hangs.end_run is true and the hang
        continues."""
        flights: Path | None = None
        with contextlib.suppress(OSError):
            flights = Path(tempfile.mkdtemp(prefix="flight-", dir=self._folder))
        facts = self.collect(beat, flights)
        found = verdict(facts)
        wanted = bundle.place(self._run_dir, beat)
        shown = screen(facts, found, str(wanted))
        try:
            written = str(bundle.write(facts, shown, flights, wanted))
        except OSError as error:
            failed = f"{bundle.LABEL} could not be written: {error}"
            shown = shown.replace(f"{bundle.LABEL}: {wanted}", failed)
        else:
            shown = shown.replace(str(wanted), written)
            self._bundle = written
        if flights is not None:
            shutil.rmtree(flights, ignore_errors=True)
        now = self._read()
        if now is not None and now.moved != beat.moved:
            shown += "\n  it went on while this was written"
        say(shown)
        if now is not None:
            self._copy(now)
        if self._settings.end_run and (now is None or now.moved == beat.moved):
            self._end(beat, found)

    def collect(self, beat: Beat, flights: Path | None) -> Facts:
        """Collects all facts that are available within a minute. Writes NCCL's dumps into the
        folder `flights`. If `flights` is None, the dumps are lost."""
        settings = self._settings
        without_s = self._vigil.without_s(beat, time.monotonic())
        others = self._nodes.ask() if self._nodes is not None else None
        with ThreadPoolExecutor(8) as pool:
            servers = pool.map(lambda numbered: asked(*numbered), enumerate(settings.urls))
            dumping = pool.submit(node_facts.dump_flights, self._folder)
            here = node_facts.look(self._folder, settings.driver, leave_out=[os.getpid()])
            dumps, flight_said = dumping.result()
            found_servers = tuple(servers)
        missing: dict[str, str] = {}
        if others is not None:
            answers, missing = others()
            for answer in answers:
                # Ray nodes of one host see each other's processes; equal pids of two hosts differ
                known = set(map(_process, here))
                here += [each for each in answer["processes"] if _process(each) not in known]
                dumps |= {name: bytes.fromhex(content) for name, content in answer["dumps"].items()}
        return Facts(
            beat,
            without_s,
            tuple(map(ProcessFacts.of, here)),
            read_requests(self._folder / REQUESTS),
            found_servers,
            missing,
            _keep(dumps, flights) if dumps else flight_said,
        )

    def _end(self, beat: Beat, found: Verdict) -> None:
        """Kills the processes that block the run. Then sends SIGTERM to the driver if the hang
        continues. Finally sends SIGKILL to the driver if the hang continues after SIGTERM.

        A supervised driver gets only SIGKILL, because the supervisor does not restart a driver that
        SIGTERM has ended.
        """
        names = ", ".join(f"{p.role} (pid {p.pid})" for p in found.culprits) or "nobody"
        say(f"faults.hangs.end_run: killing {names}")
        for process in found.culprits:
            if process.role == DRIVER:
                continue
            if process.node == node_facts.here():
                proc_files.kill(process.pid)
            elif self._nodes is not None:
                self._nodes.kill(process.node, process.pid)
        signals = (
            (signal.SIGKILL,) if self._settings.supervised else (signal.SIGTERM, signal.SIGKILL)
        )
        for number in signals:
            deadline = time.monotonic() + LET_GO_S
            if found.culprits and found.culprits[0].role == DRIVER and number == signals[0]:
                deadline = 0.0
            while time.monotonic() < deadline:
                if self._driver_ended():
                    return
                now = self._read()
                if now is not None and now.moved != beat.moved:
                    return
            say(
                f"faults.hangs.end_run: {number.name} to the driver, process"
                f" {self._settings.driver}"
            )
            with contextlib.suppress(OSError):
                os.kill(self._settings.driver, number)

    def close(self) -> None:
        """Disconnects the agents of other nodes, and removes this node's folder of heartbeats."""
        if self._nodes is not None:
            self._nodes.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Copier:
    """Writes the driver's heartbeats into the run directory, on a separate thread. If the file
    system stalls, newer heartbeats replace older ones that are not written yet."""

    def __init__(self, file: Path) -> None:
        self._file, self._next = file, threading.Event()
        self._beat: Beat | None = None
        self._lock, self._idle = threading.Lock(), threading.Event()
        self._idle.set()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, beat: Beat) -> None:
        with self._lock:
            self._beat = beat
            self._idle.clear()
        self._next.set()

    def last(self) -> None:
        """Waits until the newest heartbeat is written, but at most one second."""
        self._idle.wait(1.0)

    def _run(self) -> None:
        while self._next.wait():
            self._next.clear()
            with self._lock:
                beat = self._beat
            with contextlib.suppress(OSError):
                if beat is not None:
                    write_beat(self._file, beat)
            with self._lock:
                if beat is self._beat:
                    self._idle.set()


def _process(facts: dict[str, Any]) -> tuple[str, int]:
    """Returns a process's host and pid. In the facts from an agent, the field `node` consists of
    the host's name, a slash, and the first 8 characters of the Ray node's id."""
    return facts["node"].partition("/")[0], facts["pid"]


def asked(engine: int, url: str) -> ServerFacts:
    """Checks whether a server answers at all. If the server refuses the request for lack of an API
    key, the refusal counts as an answer. A reply in a protocol other than HTTP also counts as an
    answer."""
    where, answer = urlsplit(url), "cannot be reached"
    try:
        port = where.port or (443 if where.scheme == "https" else 80)
        with socket.create_connection((where.hostname or "", port), ASK_S) as line:
            answer = "accepts what it is asked and does not answer"
            line.sendall(f"GET /model_info HTTP/1.0\r\nHost: {where.netloc}\r\n\r\n".encode())
            answer = "" if line.recv(1) else "closes the connection without a word"
    except TimeoutError:
        pass  # `answer` holds how far it got
    except OSError as error:
        answer = f"cannot be asked: {error.strerror or error}"
    return ServerFacts(engine, url, answer)


def _keep(dumps: Mapping[str, bytes], flights: Path | None) -> str:
    """Writes NCCL's dumps, keyed by file name, into the folder `flights`. Returns a text with the
    number of dumps that were written and the number of dumps that were lost."""
    kept = 0
    if flights is not None:
        for name, content in dumps.items():
            with contextlib.suppress(OSError):
                (flights / name).write_bytes(content)
                kept += 1
    lost = len(dumps) - kept
    return f"NCCL's flight recorder: {kept} dumps (folder nccl)" + (
        f"; {lost} could not be written" if lost else ""
    )


def read_requests(file: Path) -> tuple[ReplicaFacts, ...]:
    """Reads facts about the replicas and their oldest requests from the file that the driver
    writes. Returns () if the file is missing or cannot be read."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        told: dict[str, Any] = json.loads(file.read_text())
        now = time.monotonic()
        return tuple(
            ReplicaFacts(
                each["number"],
                each["state"],
                each["under_way"],
                tuple(
                    RequestFacts(each["number"], p, s, now - given)
                    for p, s, given in each["oldest"]
                ),
            )
            for each in told["replicas"]
        )
    return ()


def say(text: str) -> None:
    """Prints to standard error from a thread that can be abandoned. The thread can block forever if
    standard error is a pipe that no process reads."""

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode())

    _left(write, 2.0)


def _left(call: Callable[[], None], limit_s: float) -> None:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(limit_s)


def main(folder: str) -> None:
    """Watches the run whose heartbeats are in `folder`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # ignore signals of a terminal or scheduler: this process ends with the run
        signal.signal(number, signal.SIG_IGN)
    lock = (Path(folder) / LOCK).open("a")
    fcntl.flock(lock, fcntl.LOCK_EX)
    watcher = Watcher(Settings(**json.loads((Path(folder) / SETTINGS).read_text())))
    status = 1
    try:
        watcher.run()
        status = 0
    except Exception:
        say(traceback.format_exc())
    finally:
        watcher.close()
        os._exit(status)  # a thread may still wait for a file system


if __name__ == "__main__":
    main(sys.argv[1])
