"""Runs that are made to hang, by hanging a real part of them, and what their black box says.

HANGS are the eight that the black box must name: each a whole run with Ray, and what is done to it
after some steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from support.interrupts import interruptible
from support.runs import ROOT, SMALL, command, environment, model
from support.stalling import STALL

from megatron_stare.run_dir.heartbeat import Beat, beats_of
from megatron_stare.run_dir.json_lines import read_jsonl

MODEL = ROOT / "assets/tiny-adder"
PATIENCE_S = 280.0  # of a test with a run that says nothing
# of a run beside which others are started, and as many again, where that slows little
QUIET_STEPS, MORE_AFTER = 6, 3
BUSY = ["nice", "-n", "13", sys.executable, "-c", "while True: pass"]
QUICKLY = {
    "eval.prompts": 0,
    "run.steps": 200,
    "run.checkpoint_every": 0,
    "faults.hangs.floor_s": 6,
}


class HungRun:
    """A run in a process of its own. A context manager; nothing of it stays."""

    def __init__(self, folder: Path, *overrides: str, **settings: Any) -> None:
        self.dir, self.stall = folder / "run", folder / "stall"
        self._closing = contextlib.ExitStack()
        self.process = subprocess.Popen(
            self.words(*overrides, **{**QUICKLY, **settings}),
            cwd=folder,
            env={**environment(), STALL: str(self.stall)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=interruptible,
        )
        self._given_up = threading.Timer(PATIENCE_S, self.process.kill)
        self._given_up.start()

    def words(self, *overrides: str, **settings: Any) -> list[str]:
        """Words of the run's command line."""
        return command(model(), f"run.dir={self.dir}", *overrides, **settings)

    def step(self, number: int) -> None:
        """Waits for the line of the step."""
        assert any(re.match(rf"\s*step\s+{number}/", line) for line in self.process.stdout), (
            self.process.stderr.read()
        )

    @property
    def tree(self) -> list[psutil.Process]:
        found = []
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def named(self, name: str) -> psutil.Process:
        """The run's process of this name."""
        (found,) = (each for each in self.tree if each.name() == name)
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Its record so far."""
        return list(read_jsonl(self.dir / "metrics.jsonl"))

    def beats(self) -> dict[str, Beat]:
        """Beats of all processes, by role."""
        words = (each.cmdline() for each in self.tree)
        (folder,) = (each[-1] for each in words if "megatron_stare.hangs.watcher" in each)
        return {beat.role: beat for beat in beats_of(Path(folder))}

    def stop(self, pid: int) -> None:
        """Stops a process of it until the end."""
        os.kill(pid, signal.SIGSTOP)

    def told(self) -> tuple[str, dict[str, Any]]:
        """Waits for the screen; it, and facts.json of the bundle."""
        seen = []
        for line in self.process.stderr:
            seen.append(line)
            if line.startswith("  the black box: "):
                folder = Path(line.partition(": ")[2].strip())
                begin = max(n for n, text in enumerate(seen) if re.match(r"step \d+, ", text))
                return "".join(seen[begin:]), json.loads((folder / "facts.json").read_text())
        raise AssertionError(f"no screen among {seen}")

    def at_the_end(self, call: Callable[[], Any]) -> None:
        self._closing.callback(call)

    def __enter__(self) -> HungRun:
        return self

    def __exit__(self, *exception: object) -> None:
        self._given_up.cancel()
        every = self.tree
        self._closing.close()
        self.process.kill()
        for process in every:
            with contextlib.suppress(psutil.Error):
                if "megatron_stare.hangs.watcher" not in process.cmdline():  # which ends by itself
                    process.kill()
        self.process.communicate()
        psutil.wait_procs(every, timeout=20)


class HungEvaluation(HungRun):
    """`megatron-stare eval` of the model that ships, into the folder `dir`."""

    def words(self, *overrides: str, **settings: Any) -> list[str]:
        """See HungRun."""
        python, *_, config = command()[:5]
        small = [f"{key}={value}" for key, value in {**SMALL, **settings}.items()]
        asked = [f"--checkpoint={MODEL}", f"--out={self.dir}"]
        return [
            python,
            "-m",
            "megatron_stare.cli",
            "eval",
            config,
            *small,
            model(),
            *overrides,
            *asked,
        ]

    def answered(self, task: str) -> None:
        """Waits until all of its responses are there."""
        ended = re.compile(rf"{task}: (\d+) of \1 responses")
        seen = []
        for line in self.process.stderr:
            seen.append(line)
            if ended.match(line):
                return
        raise AssertionError(seen)


@dataclass(frozen=True)
class Loaded:
    """Outcome of a run with too little of its machine: seconds of whole steps, and the longest of a
    phase.

    longest: by phase, of all steps.
    """

    usual_s: float
    loaded_s: tuple[float, ...]
    busy: int  # processes beside it at last
    longest: dict[str, float]
    code: int
    said: str


def loaded(run: HungRun, slower: float, steps: int = 5) -> Loaded:
    """Lets a run make some steps, starts processes beside it that want all of the machine, until as
    many steps have taken so much longer than usual; ends them, lets it make some more, and ends it
    as Ctrl-C does. What is started goes before Ray's workers, whose niceness is 15, and behind most
    else."""
    run.step(QUIET_STEPS)
    usual = statistics.median(row["time/step_s"] for row in run.rows()[1:])
    number, slow = QUIET_STEPS, 0
    busy: list[subprocess.Popen[bytes]] = []
    try:
        while slow < steps:
            if (number - QUIET_STEPS) % MORE_AFTER == 0 and slow * 2 <= number - QUIET_STEPS:
                at_once = os.cpu_count() or 1
                busy += [subprocess.Popen(BUSY) for _ in range(at_once)]
            number += 1
            run.step(number)
            slow += run.rows()[-1]["time/step_s"] >= slower * usual
    finally:
        for each in busy:
            each.kill()
            each.wait()
    run.step(number + QUIET_STEPS)
    run.process.send_signal(signal.SIGINT)
    said = run.process.communicate()[1]
    rows = run.rows()
    under_load = [row["time/step_s"] for row in rows if QUIET_STEPS < row["step"] <= number]
    longest = {
        name: max(row[f"time/{name}_s"] for row in rows)
        for name in ("rollout", "log_probs", "update", "sync")
    }
    return Loaded(usual, tuple(under_load), len(busy), longest, run.process.returncode, said)


def stall_file_system(place: Path) -> Callable[[], None]:
    """Mounts a file system at a folder that answers nothing, as a server of one that is gone does;
    what ends it.

    It is FUSE's own client in the kernel, whose server this process would be, and never reads what
    it is asked.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"stalled", str(place).encode(), b"fuse", 0, options):
        os.close(device)
        raise OSError(ctypes.get_errno(), "cannot mount")

    def end() -> None:
        os.close(device)  # whoever waits is told that there is no such file system
        libc.umount2(str(place).encode(), 2)

    return end


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """A server that accepts connections, reads what it is asked, and answers nothing; its URL."""
    held = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class Hang:
    """One of the eight.

    Args:
        settings: of the run.
        begin: hangs it, and gives when it did.
        rule: that must find it.
        sentence: pattern of what must be said of who waits for whom.
    """

    begin: Callable[[HungRun], None]
    rule: str
    sentence: str
    settings: dict[str, Any]


def _stop_role(role: str) -> Callable[[HungRun], None]:
    def begin(run: HungRun) -> None:
        run.step(3)
        run.stop(run.beats()[role].pid)

    return begin


def _stall_parts(run: HungRun) -> None:
    run.step(3)
    run.stall.touch()


def _stop_raylet(run: HungRun) -> None:
    run.step(3)
    run.stop(run.named("raylet").pid)


def _stall_disk(run: HungRun) -> None:
    run.step(5)  # two checkpoints were begun, and give the third its limit
    place = run.dir / "checkpoints"
    run.at_the_end(stall_file_system(place))


HANGS = {
    "a rank is stopped": Hang(
        _stall_parts,
        "stopped",
        r"rank 0 waits in all_reduce for rank 1, which is stopped \(SIGSTOP\)",
        {"algorithm": "support.stalling.StoppedRank", "parallel.tensor": 1, "parallel.data": 2},
    ),
    "an engine is stopped": Hang(
        _stop_role("rollout engine 0"), "stopped", r"engine 0, which is stopped \(SIGSTOP\)", {}
    ),
    "a verifier never answers": Hang(
        _stall_parts,
        "verifier",
        r"the driver waits for a verifier \(pid \d+\), which is at .*called by verify"
        r" \(stalling_verifier\.py:\d+\)",
        {
            "reward.verifier": "support.stalling_verifier.verify",
            "reward.timeout_s": 600,
            "reward.workers": 1,
        },
    ),
    "a rank does not join a collective": Hang(
        _stall_parts,
        "collective",
        r"rank 0 waits in all_reduce for rank 1, which is at LateRank\.asks \(stalling\.py:\d+\)",
        {"algorithm": "support.stalling.LateRank", "parallel.tensor": 1, "parallel.data": 2},
    ),
    "raylet is stopped": Hang(
        _stop_raylet, "stopped", r"Ray's raylet on .*, which is stopped \(SIGSTOP\)", {}
    ),
    "the file system of checkpoints stalls": Hang(
        _stall_disk,
        "file system",
        r"who waits? in \w+ of .*/checkpoints.* \(fuse at .*/checkpoints\), which does not answer",
        {"run.checkpoint_every": 2},
    ),
    "a server accepts and does not answer": Hang(
        lambda run: None,
        "server",
        r"the driver waits for engine 0's server at http://127\.0\.0\.1:\d+, which accepts what it"
        r" is asked and does",
        {"rollout.engine": "sglang", "faults.hangs.first_s": 60},
    ),
    "a thread of the driver is deadlocked": Hang(
        _stall_parts,
        "driver",
        r"all others are idle and wait for the driver, which is at Deadlocked\.step"
        r" \(stalling\.py:\d+\)",
        {"observability.sinks": "[jsonl,console,support.stalling.Deadlocked]"},
    ),
}


@contextlib.contextmanager
def hung(name: str, folder: Path) -> Iterator[tuple[HungRun, Hang]]:
    """The run of a hang, at work; it is begun by `begin`."""
    hang = HANGS[name]
    with contextlib.ExitStack() as stack:
        settings = dict(hang.settings)
        if settings.get("rollout.engine") == "sglang":
            settings["sglang.urls"] = f"[{stack.enter_context(silent_server())}]"
        yield stack.enter_context(HungRun(folder, **settings)), hang


def sentence_of(screen: str) -> str:
    """Sentence of the screen that says who waits for whom."""
    lines = screen.splitlines()
    return " ".join(line.strip() for line in lines[1 : lines.index("")])


def now() -> float:
    return time.monotonic()
