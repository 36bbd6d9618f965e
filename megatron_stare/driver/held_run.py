"""Keeps the directory of a run locked across sessions. If a worker or an engine is lost and the run
can recover, reopens the run from its newest checkpoint.

`train.py` uses this module. Only `_open_again` decides whether another session follows a failed
session.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from megatron_stare.config.schema import Config
from megatron_stare.driver.opening import Inputs, check_dump_step, finished_run, read_inputs
from megatron_stare.driver.resuming import find_run
from megatron_stare.driver.supervision import restarted, tell_came_up, tell_run_dir
from megatron_stare.errors import RollBack, UserError
from megatron_stare.hangs.bundle import FOLDER as BLACK_BOX
from megatron_stare.observability.metrics.monitor import Monitor
from megatron_stare.observability.sink import RunOutline
from megatron_stare.planning.own_plan import own_plan
from megatron_stare.planning.placement import Awaited, PlacementError
from megatron_stare.process.interruption import (
    TO_BE_CONTINUED,
    Standing,
    pause,
    raise_if_received,
    stands_at,
    stopped_at,
    uninterrupted,
)
from megatron_stare.process.recovery import Attempts, RecoveryRule, note_restart, restarts_of
from megatron_stare.process.workers import WorkerLostError, WorkerSilentError
from megatron_stare.records.metric import Metric
from megatron_stare.rollout.engines.engine import EngineLostError
from megatron_stare.rollout.fleet.health import NoEngineError
from megatron_stare.run_dir.heartbeat import beating
from megatron_stare.run_dir.run_state import CONFIG, LOGS, PLACEMENT, RunDir, RunState

T = TypeVar("T")
METRICS = (
    Metric(
        "restarts/run",
        "times",
        "automatic restarts of the run after a loss, since it began",
        "0; restarts.jsonl has a line with the reason of each",
    ),
)


class HeldRun:
    """Context manager that keeps the directory of one run locked. If a new run fails before its
    first step, HeldRun removes the files that the run created, except for the logs of its processes
    and the black box.

    Args:
        config: configuration as requested by the user. Every restart reads the inputs again from
            this configuration.
        inputs: inputs that were read from `config`.
        resume: if true, continue an existing run from a checkpoint instead of starting a new run.
        from_step: step of the checkpoint to continue from; None: the newest checkpoint.
        dump_step: the step to dump, if any.

    Raises:
        UserError: the directory cannot be used.
    """

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        *,
        resume: bool,
        from_step: int | None = None,
        dump_step: int | None = None,
    ) -> None:
        self._asked, self._config = config, inputs.config
        self._attempts = Attempts(RecoveryRule.of(config.faults.run))
        self._began = not resume  # this process began the run
        self.resumes = resume  # the next session continues a checkpoint
        self.from_step = from_step  # step of that checkpoint; None: the newest
        self.restarted = restarted()  # the next session follows a loss
        self.went_back = False  # a session ended in a rollback; see driver/guards.py
        self._came_up = False  # a session was fully opened
        self._is_up = False  # the newest session was
        self.stepping = False  # a session reached its steps
        self.state = RunState()  # of the open session, or of the last
        self.plan = own_plan(inputs.run)  # made before any session has process groups
        if resume:
            self.dir = RunDir.reopen(find_run(inputs.config))
        else:
            check_dump_step(inputs.config, dump_step, 0)
            self.dir = RunDir.create(inputs.config)
        tell_run_dir(self.dir.path)
        stands_at(self._stands)

    @property
    def restarts(self) -> int:
        """Number of times that the run was reopened after a process was lost."""
        return restarts_of(self.dir.path)

    def opened(self) -> None:
        """Records that a session has started completely. Sets `from_step` to None, so that the next
        session resumes from the newest checkpoint. If `from_step` was set, the session has renamed
        the checkpoints of all steps after `from_step`. A resumed run ignores renamed checkpoints.
        The next session therefore resumes from the checkpoint of `from_step`, unless the run has
        saved a newer checkpoint by then."""
        self._came_up, self._is_up, self.from_step = True, True, None
        tell_came_up()

    def awaited(self) -> Awaited | None:
        """Returns an `Awaited` object if a process of the run was lost and the run is therefore
        being restarted. The object contains the time limit and the other options for the wait until
        lost nodes are back. Returns None if no process of the run has been lost since the user's
        command started."""
        if not self.restarted:
            return None
        return Awaited(self._config.faults.run.nodes_s, (self.dir.path / PLACEMENT).exists(), _tell)

    def metrics(self) -> dict[str, float]:
        """See METRICS."""
        return {"restarts/run": float(self.restarts)}

    def until_done(self, inputs: Inputs, session: Callable[[Inputs], T]) -> T:
        """Runs sessions one after another. If a session ends without an error, no further session
        is started, and the result of this session is returned. Reopens the run after a rollback,
        and also if a worker or an engine was lost and the run can recover.

        Raises:
            Exception: the error that ended the last session.
        """
        while True:
            self._is_up = False
            try:
                return session(inputs)
            except Exception as error:
                inputs = self._open_again(error)

    def _open_again(self, error: Exception) -> Inputs:
        """Prepares the next session after a failed session. Reads the inputs of the next session.
        After the loss of a worker or an engine, `_open_again` waits for the backoff time before it
        reads the inputs.

        Raises:
            Exception: the session's error, if the error is neither a rollback nor a recoverable
                loss, or if no attempt is left after a loss.
            UserError: the inputs have changed since the run began and are no longer valid.
        """
        step = self.state.step
        # rollbacks are recorded in the run directory and limited by faults.guards.rollbacks
        if isinstance(error, RollBack):
            raise_if_received()
            self.resumes = self.went_back = True
            with beating(self.dir.path, "restart"):
                return read_inputs(self._asked)
        loss = self._is_loss(error)
        if not loss or (wait_s := self._attempts.lost(step)) is None:
            # not the run's fault, but the machines': it can be continued when they are whole
            if loss or (self.restarted and not self._is_up and _lacks_nodes(error)):
                error.exit_code = TO_BE_CONTINUED  # type: ignore[attr-defined]
            raise error
        what = str(error).splitlines()[0]
        counted = f"{self._attempts.counting} of {self._attempts.rule.attempts}"
        said = (
            f"lost after step {step}: {what}\n  the run reopens in {wait_s:g} s (attempt {counted})"
        )
        _tell(said)
        with contextlib.suppress(OSError):  # a full disk must not end the run here
            note_restart(self.dir.path, "driver", what, step, wait_s)
        with beating(self.dir.path, "restart"):
            pause(wait_s)
            self.resumes = self.restarted = True
            return read_inputs(self._asked)

    def _is_loss(self, error: Exception) -> bool:
        """Tells whether the error is a recoverable loss of a worker or an engine.

        Until the first session has started completely, only the death of a worker process counts as
        a recoverable loss. If a session fails to start although no worker process has died, the
        cause is usually an error in the configuration.
        """
        if self._came_up:
            return isinstance(error, WorkerLostError | EngineLostError | NoEngineError)
        return isinstance(error, WorkerLostError) and not isinstance(error, WorkerSilentError)

    def _stands(self) -> Standing | None:
        """Returns a `Standing` object, which contains the last finished step and the newest
        checkpoint of the run. Returns None if the run directory contains no config.yaml. A
        directory without config.yaml does not count as a run. For example, `RunDir.discard` removes
        config.yaml after a failed start."""
        return self._standing() if (self.dir.path / CONFIG).exists() else None

    def _standing(self) -> Standing:
        return Standing(
            self.dir.path,
            self.state.step,
            self._config.run.steps,
            self.dir.newest_step(),
            self.from_step,
        )

    def __enter__(self) -> HeldRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with uninterrupted():
            made = max(self.state.step, self._attempts.furthest)
            standing = self._standing()
            early = isinstance(error, KeyboardInterrupt) or (
                isinstance(error, UserError) and self.stepping
            )
            if early and (made or standing.checkpoint is not None):
                stopped_at(standing)
            if error is not None and self._began and not (made or self.went_back):
                hung = (self.dir.path / BLACK_BOX).exists()
                # the words of ranks and servers say why; who ends a sound start needs none
                evidence = hung or not isinstance(error, KeyboardInterrupt)
                self.dir.discard(but=(LOGS, BLACK_BOX) if evidence else ())
            self.dir.close()


def _lacks_nodes(error: Exception) -> bool:
    """Returns True if a cluster cannot be reached, or lacks nodes or GPUs that a run needs."""
    return isinstance(error, PlacementError) or (
        isinstance(error, UserError) and error.where == "runtime.ray_address"
    )


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        print(line, file=sys.stderr, flush=True)


def made_already(inputs: Inputs, from_step: int | None, dump_step: int | None) -> Path | None:
    """Checks whether the run that is to be resumed has already finished. Returns the run's
    directory if the run has finished, and None otherwise. Trains no step. Calls the sinks' `finish`
    again if the run has finished.

    Raises:
        UserError: the run does not exist or cannot be resumed, or the run has already trained the
            step to dump.
    """
    config = inputs.config
    if (finished := finished_run(config, from_step)) is None:
        return None
    if not restarted():  # an earlier driver may have dumped the step
        check_dump_step(config, dump_step, config.run.steps)
    print(
        f"all {config.run.steps} steps of this run are done already; give a larger"
        " run.steps=... to train on"
    )
    Monitor(inputs.sinks, RunOutline(finished, config)).finish()
    return finished
