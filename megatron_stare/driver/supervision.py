"""Supervises a run (`train --supervise`). The supervisor is a parent process that starts the driver
of the run, and starts a new driver if the driver is lost.

A driver may be killed. For example, if Ray's control store is lost, Ray's C++ code ends the driver
process at once, and neither `finally` blocks nor atexit handlers run. The supervisor must keep
running when the driver ends. For this reason, the supervisor does not import Ray or torch. The
driver sends the path of the run directory to the supervisor through a pipe. From files in the run
directory, the supervisor reads how many steps are done and which rule limits the restarts of the
driver.

The environment variable MEGATRON_STARE_SUPERVISOR gives the driver the process id of its
supervisor, the descriptor of the pipe and the number of restarts. The driver reads
MEGATRON_STARE_SUPERVISOR and then removes the variable from the environment. Processes that the
driver starts later therefore do not inherit the variable. If the supervisor dies, the kernel sends
SIGTERM to the driver, and the run ends as it does after any SIGTERM.
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
from megatron_stare.process.interruption import AFTER_STEP, ENDING, SIGNALS, TO_BE_CONTINUED
from megatron_stare.process.recovery import Attempts, RecoveryRule, note_restart
from megatron_stare.run_dir.json_lines import read_jsonl
from megatron_stare.run_dir.run_files import CONFIG_FILE, METRICS_FILE

VARIABLE = "MEGATRON_STARE_SUPERVISOR"  # process id, descriptor of the pipe, number of restarts
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # options of prctl(2)
CAME_UP = "came up"  # message of a driver; its other message is the run directory's absolute path
LEFT_S = 10.0  # seconds until processes that a dead driver started are killed

_pipe: int | None = None  # to this process's supervisor, if any
_restarts = 0  # number of restarts by the supervisor


def driver_of(command: str) -> tuple[str, ...]:
    """Returns the command line of a driver process that runs `megatron-stare COMMAND` for the given
    command."""
    return (sys.executable, "-m", "megatron_stare.cli", command)


def supervise(arguments: Sequence[str], limit_s: float | None, program: Sequence[str]) -> int:
    """Runs a driver with `arguments` in a child process. If the driver is lost, `supervise` starts
    a new driver.

    Args:
        arguments: arguments of the driver. Every option and its value form one word, such as
            `--stop-after=60`.
        program: command line of a driver, without the arguments.
        limit_s: time limit of `--stop-after` in seconds, counted from this call.

    Returns:
        The exit code of the last driver, or 128 + n if signal n killed the driver.
    """
    caught = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*caught, signal.SIGCHLD})
    try:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        return _Supervisor(program, arguments, limit_s, caught, before).run()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Supervisor:
    """Starts drivers and handles signals. The supervisor blocks signals and fetches them one at a
    time, so that no signal is lost and no signal interrupts other code.

    Args:
        program: command of a driver.
        arguments: arguments of the first driver.
        limit_s: time limit of all drivers together, seconds; None: no limit.
        caught: signals that are forwarded to the driver.
        mask: the driver's signal mask.
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
        self._ended_by: int | None = None  # the signal that asked for the run's end
        self._out_of_time = False  # SIGUSR1 came; no further driver is started
        self._run_dir: Path | None = None
        self._came_up = False  # some driver has fully opened the run

    def run(self) -> int:
        attempts, restarts = Attempts(RecoveryRule()), 0
        while True:
            code = self._drive(restarts)
            self._sweep()
            self._heed()
            if self._ended_by is not None or not _is_lost(code):
                return _shell_code(code)
            if self._out_of_time:  # the driver was lost before it had saved
                return TO_BE_CONTINUED
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
            if self._out_of_time:
                return TO_BE_CONTINUED

    def _drive(self, restarts: int) -> int:
        """Starts a driver, waits for its end, and returns its exit code. Returns -n if signal n
        killed the driver."""
        here, there = os.pipe()
        os.set_inheritable(there, True)
        command = [*self._program, *self._now()]
        environment = {**os.environ, VARIABLE: f"{os.getpid()} {there} {restarts}"}
        # in its own process group, so that it gets a terminal's Ctrl-C only once, from here
        driver = os.posix_spawn(
            command[0], command, environment, setpgroup=0, setsigmask=self._mask
        )
        os.close(there)
        with os.fdopen(here, "rb", buffering=0) as pipe:
            os.set_blocking(here, False)
            while True:
                # -1, since the driver's orphans become children of this process too
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
        self._note(number)
        os.kill(driver, number)  # the pid is valid until this process reaps it

    def _note(self, number: int) -> None:
        if number in ENDING:
            self._ended_by = number
        self._out_of_time |= number == AFTER_STEP

    def _now(self) -> list[str]:
        """Returns the arguments of the next driver.

        If the run directory exists, the driver resumes the run in this directory. Once a driver has
        loaded the checkpoint and started all workers, later drivers do not get the option
        `--from-step`. With `--from-step`, each restart would return to the same old checkpoint and
        discard all later steps. If the run has a time limit, the returned option `--stop-after`
        gives the seconds that remain until this limit.
        """
        arguments = self._arguments
        if self._run_dir is not None and (self._run_dir / CONFIG_FILE).exists():
            given_up = ("run.dir=", "--resume", *(["--from-step="] if self._came_up else []))
            config, *rest = (each for each in arguments if not each.startswith(given_up))
            arguments = [config, f"run.dir={self._run_dir}", *rest, "--resume"]
        if self._until is None:
            return arguments
        return [*arguments, f"--stop-after={max(1, round(self._until - time.monotonic()))}"]

    def _made(self) -> int:
        """Returns the number of the last step in the run's metrics, or 0 if the metrics contain no
        step."""
        if self._run_dir is None:
            return 0
        with contextlib.suppress(OSError, DataError, LookupError, ValueError):
            return int(read_jsonl(self._run_dir / METRICS_FILE)[-1]["step"])
        return 0

    def _rule(self) -> RecoveryRule:
        """Returns the rule that limits restarts of the driver, from the run's configuration.
        Returns the default rule if the configuration cannot be read yet."""
        if self._run_dir is not None:
            with contextlib.suppress(OSError, yaml.YAMLError, LookupError, TypeError):
                config = with_new_names(yaml.safe_load((self._run_dir / CONFIG_FILE).read_text()))
                return RecoveryRule.of(config["faults"]["run"])
        return RecoveryRule()

    def _pause(self, wait_s: float) -> None:
        """Waits until `wait_s` seconds have passed, or until the supervisor has received a signal
        that ends the run."""
        until = time.monotonic() + wait_s
        while (
            self._ended_by is None
            and not self._out_of_time
            and (left := until - time.monotonic()) > 0
        ):
            found = signal.sigtimedwait(set(self._caught), left)
            if found is not None:
                self._note(found.si_signo)

    def _heed(self) -> None:
        """Fetches and records the signals that arrived while no driver ran. A signal that stays
        pending would end the supervisor as soon as the supervisor unblocks its signals."""
        while (found := signal.sigtimedwait(set(self._caught), 0)) is not None:
            self._note(found.si_signo)

    def _sweep(self) -> None:
        """Waits until all processes that the driver started have ended. Kills the processes that
        are still alive after LEFT_S seconds."""
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
    """Returns True if a driver that ended with the return code `code` was lost and must be
    restarted.

    A driver was lost if the driver was killed by a signal that is not in the tuple `ENDING`, or if
    the driver ended with an error that is not a UserError. A driver that calls abort() also counts
    as lost, because abort() kills the process with the signal SIGABRT.
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
    """Connects this driver process with its supervisor. Returns True if the driver process has a
    supervisor, and False otherwise.

    Reads the descriptor of the pipe to the supervisor. Asks the kernel to send SIGTERM to this
    driver if the supervisor dies. Call `attach` on a thread that lives as long as the run. Call
    `attach` only after the SIGTERM handler is installed.
    """
    global _pipe, _restarts
    given = os.environ.pop(VARIABLE, None)
    if given is None:
        return False
    supervisor, _pipe, _restarts = map(int, given.split())
    os.set_inheritable(_pipe, False)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != supervisor:  # the supervisor died before
        os.kill(os.getpid(), signal.SIGTERM)
    return True


def tell_run_dir(path: Path) -> None:
    """Sends the path of the run directory to the supervisor of this driver process. Does nothing if
    this driver process has no supervisor."""
    _tell(str(path.absolute()))


def tell_came_up() -> None:
    """Tells this driver's supervisor that the run has started completely. Does nothing if this
    driver has no supervisor."""
    _tell(CAME_UP)


def _tell(line: str) -> None:
    if _pipe is not None:
        with contextlib.suppress(OSError):
            os.write(_pipe, f"{line}\n".encode())


def supervised() -> bool:
    """Returns True if a supervisor started this driver."""
    return _pipe is not None


def restarted() -> bool:
    """Returns True if the supervisor started this driver to replace a lost driver."""
    return _restarts > 0
