"""`train --supervise`: a parent that starts the driver of a run, and starts it again where it is
lost.

A driver may be killed, and Ray ends it from C++, without `finally` or atexit, where its own control
store is gone. So its parent imports neither Ray nor torch. It knows the run by its directory, which
the driver tells it through a pipe, and what to expect of another start by the files in there.

The driver learns of its supervisor by an environment variable, which is not handed on. Where the
supervisor dies, the kernel sends the driver SIGTERM, and it ends as by anybody's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import psutil
import yaml

from megatron_stare.config.formats import with_new_names
from megatron_stare.errors import DataError
from megatron_stare.process.recovery import Attempts, RecoveryRule, note_restart
from megatron_stare.run_dir.json_lines import read_jsonl
from megatron_stare.run_dir.run_files import CONFIG_FILE, METRICS_FILE

VARIABLE = "MEGATRON_STARE_SUPERVISOR"  # process id, descriptor of the pipe, number of restarts
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
ENDING = (signal.SIGINT, signal.SIGTERM)
FORWARDED = (*ENDING, signal.SIGUSR1)
TRAIN = (sys.executable, "-m", "megatron_stare.cli", "train")
CAME_UP = "came up"  # what a driver tells, beside the run's directory, which is a whole path
LEFT_S = 10.0  # that what a dead driver had started is given to end by itself

_pipe: int | None = None  # to the supervisor of this process, where it has one
_restarts = 0  # that the supervisor has made


def supervise(
    arguments: Sequence[str], limit_s: float | None = None, program: Sequence[str] = TRAIN
) -> int:
    """Runs `train` with these arguments in a process of its own, and again where that is lost.

    Args:
        arguments: each option one word.
        limit_s: of `--stop-after`, from now on, seconds.

    Returns:
        The exit code of the last, 128 + n where that was killed by signal n.
    """
    caught = [number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*caught, signal.SIGCHLD})
    try:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        return _Supervisor(program, arguments, limit_s, caught, before).run()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Supervisor:
    """Signals are blocked and taken one by one, so none is lost and none comes in between.

    Args:
        program: that a driver runs.
        arguments: of its first start.
        limit_s: of all together, seconds; None: none.
        caught: signals that are handed on.
        mask: of signals, for the driver.
    """

    def __init__(
        self,
        program: Sequence[str],
        arguments: Sequence[str],
        limit_s: float | None,
        caught: Sequence[int],
        mask: Collection[int],
    ) -> None:
        self._program = program
        self._arguments = list(arguments)
        self._caught = caught
        self._mask = mask
        self._until = None if limit_s is None else time.monotonic() + limit_s
        self._ended_by: int | None = None  # the signal by which somebody ended the run
        self._run_dir: Path | None = None
        self._came_up = False  # a driver came to the run's first step, or to the next

    def run(self) -> int:
        attempts, restarts = Attempts(RecoveryRule()), 0
        while True:
            code = self._drive(restarts)
            self._sweep()
            if self._ended_by is not None or not _is_lost(code):
                return _shell_code(code)
            step = self._made()
            attempts.rule = self._rule()
            fate = f"the driver {_fate(code)} after step {step}"
            wait_s = attempts.lost(step)
            if wait_s is None:
                _say(f"{fate}, and was restarted {attempts.counting} times without progress")
                return _shell_code(code)
            restarts += 1
            _say(
                f"{fate}; it restarts in {wait_s:g} s (attempt {attempts.counting} of"
                f" {attempts.rule.attempts})"
            )
            if self._run_dir is not None:
                with contextlib.suppress(OSError):
                    note_restart(self._run_dir, "supervisor", fate, step, wait_s)
            self._pause(wait_s)
            if self._ended_by is not None:
                return 128 + self._ended_by

    def _drive(self, restarts: int) -> int:
        """Starts a driver and waits for its end. Returns its code, -n for signal n."""
        here, there = os.pipe()
        os.set_inheritable(there, True)
        command = [*self._program, *self._now()]
        environment = {**os.environ, VARIABLE: f"{os.getpid()} {there} {restarts}"}
        # in a group of its own: a terminal's Ctrl-C comes to it once, from here
        driver = os.posix_spawn(
            command[0], command, environment, setpgroup=0, setsigmask=self._mask
        )
        os.close(there)
        with os.fdopen(here, "rb", buffering=0) as pipe:
            os.set_blocking(here, False)
            while True:
                # the driver's orphans become children of this process too
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == driver:
                    self._hear((pipe.read() or b"").decode().splitlines())
                    return os.waitstatus_to_exitcode(status)
                if not pid:
                    self._forward(
                        signal.sigwaitinfo({*self._caught, signal.SIGCHLD}).si_signo, driver
                    )

    def _hear(self, told: Sequence[str]) -> None:
        for line in told:
            self._came_up |= line == CAME_UP
            self._run_dir = self._run_dir if line == CAME_UP else Path(line)

    def _forward(self, number: int, driver: int) -> None:
        if number == signal.SIGCHLD:
            return
        if number in ENDING:
            self._ended_by = number
        os.kill(driver, number)  # it is there: nobody else waits for it

    def _now(self) -> list[str]:
        """The arguments of the next driver: where the run has a directory by now, it is continued;
        what it had come to is not given up once more, and it has the time that is left."""
        arguments = self._arguments
        if self._run_dir is not None and (self._run_dir / CONFIG_FILE).exists():
            given_up = ("run.dir=", "--resume", *(["--from-step="] if self._came_up else []))
            config, *rest = (each for each in arguments if not each.startswith(given_up))
            arguments = [config, f"run.dir={self._run_dir}", *rest, "--resume"]
        if self._until is None:
            return arguments
        return [*arguments, f"--stop-after={max(1, round(self._until - time.monotonic()))}"]

    def _made(self) -> int:
        """The last step in the record of the run."""
        if self._run_dir is None:
            return 0
        with contextlib.suppress(OSError, DataError, LookupError, ValueError):
            return int(read_jsonl(self._run_dir / METRICS_FILE)[-1]["step"])
        return 0

    def _rule(self) -> RecoveryRule:
        """Rule from the run's configuration; the default while that is not known."""
        if self._run_dir is not None:
            with contextlib.suppress(OSError, yaml.YAMLError, LookupError, TypeError):
                config = with_new_names(yaml.safe_load((self._run_dir / CONFIG_FILE).read_text()))
                return RecoveryRule.of(config["faults"]["run"])
        return RecoveryRule()

    def _pause(self, wait_s: float) -> None:
        """Waits, or until somebody ends the run."""
        until = time.monotonic() + wait_s
        while self._ended_by is None and (left := until - time.monotonic()) > 0:
            found = signal.sigtimedwait(set(self._caught), left)
            if found is not None and found.si_signo in ENDING:
                self._ended_by = found.si_signo

    def _sweep(self) -> None:
        """Waits until nothing is left that the driver had started; what does not end by itself is
        killed."""
        until = time.monotonic() + LEFT_S
        while True:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            left = until - time.monotonic()
            if left <= 0:
                for each in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        each.kill()
                left = 1.0
            signal.sigtimedwait({signal.SIGCHLD}, left)


def _is_lost(code: int) -> bool:
    """Tells whether a driver with this return code is to be started again.

    It is after a signal that is not a request to end, an abort, or an error that is not the user's.
    """
    return -code not in ENDING if code < 0 else code == 1


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _fate(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def attach() -> bool:
    """Ends this process, a driver, with the supervisor that started it, and keeps the way to it. To
    be called where SIGTERM is caught, on a thread that lasts as long as the run. Returns whether
    there is one."""
    global _pipe, _restarts
    given = os.environ.pop(VARIABLE, None)
    if given is None:
        return False
    supervisor, _pipe, _restarts = map(int, given.split())
    os.set_inheritable(_pipe, False)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != supervisor:  # it died before
        os.kill(os.getpid(), signal.SIGTERM)
    return True


def tell_run_dir(path: Path) -> None:
    """Tells the supervisor, where there is one, which run this is."""
    _tell(str(path.absolute()))


def tell_came_up() -> None:
    """Tells it that the run goes on from where it was asked to."""
    _tell(CAME_UP)


def _tell(line: str) -> None:
    if _pipe is not None:
        with contextlib.suppress(OSError):
            os.write(_pipe, f"{line}\n".encode())


def supervised() -> bool:
    """Tells whether this driver has a supervisor."""
    return _pipe is not None


def restarted() -> bool:
    """Tells whether this driver was started in the place of one that was lost."""
    return _restarts > 0
