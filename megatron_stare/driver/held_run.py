"""A run's directory, held by this process from the run's first session to its last, and what
becomes of a session that an error ended: the run is opened again from its newest checkpoint, where
something was lost that may be there again.

Comes from `train.py`; what ends a session is decided on in `_open_again`, and nowhere else.
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
from megatron_stare.observability.metrics.monitor import Monitor
from megatron_stare.observability.sink import RunOutline
from megatron_stare.planning.own_plan import own_plan
from megatron_stare.planning.placement import Awaited
from megatron_stare.process.interruption import (
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
from megatron_stare.run_dir.run_state import CONFIG, PLACEMENT, RunDir, RunState

T = TypeVar("T")
METRICS = (
    Metric(
        "restarts/run",
        "times",
        "that the run was opened again after a loss, by itself, since it began",
        "0; each one is a line of restarts.jsonl that says why",
    ),
)


class HeldRun:
    """The directory of one run; a context manager. Where the run ends in an error before its first
    step, what it made of the directory is removed.

    Args:
        config: as it was asked for; read again for every restart.
        inputs: what it says.
        resume: continue the newest checkpoint of the run instead of starting one.
        from_step: of the checkpoint to continue, where it is not the newest.
        dump_step: the step that will be written out, if any.

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
        self._began = not resume  # it is this process that began the run
        self.resumes = resume  # the next session continues a checkpoint
        self.from_step = from_step  # of which step; None: the newest
        self.restarted = restarted()  # the next session is not the first that somebody asked for
        self.went_back = False  # a session left prompts out that it had met; see driver/guards.py
        self._came_up = False  # a session came up whole
        self.stepping = False  # a session came to its steps
        self.state = RunState()  # of the session that is open, or was last
        self.plan = own_plan(inputs.run)  # before any session has process groups
        if resume:
            self.dir = RunDir.reopen(find_run(inputs.config))
        else:
            check_dump_step(inputs.config, dump_step, 0)
            self.dir = RunDir.create(inputs.config)
        tell_run_dir(self.dir.path)
        stands_at(self._stands)

    @property
    def restarts(self) -> int:
        """How often the run was opened again after a loss."""
        return restarts_of(self.dir.path)

    def opened(self) -> None:
        """A session came up whole. Later checkpoints than its own are set aside, so the next one
        takes the newest."""
        self._came_up, self.from_step = True, None
        tell_came_up()

    def awaited(self) -> Awaited | None:
        """How the next session waits for nodes that were lost; None: it is the first that somebody
        asked for."""
        if not self.restarted:
            return None
        return Awaited(self._config.faults.run.nodes_s, (self.dir.path / PLACEMENT).exists(), _tell)

    def metrics(self) -> dict[str, float]:
        """See METRICS."""
        return {"restarts/run": float(self.restarts)}

    def until_done(self, inputs: Inputs, session: Callable[[Inputs], T]) -> T:
        """Runs sessions until one finishes, and returns its result; reopens the run after a
        recoverable loss.

        Raises:
            Exception: what ended the last of them.
        """
        while True:
            try:
                return session(inputs)
            except Exception as error:
                inputs = self._open_again(error)

    def _open_again(self, error: Exception) -> Inputs:
        """After a session that ended in this error: waits a while, and reads what the next session
        is opened with.

        Raises:
            Exception: the error itself, where nothing is lost, or was too often.
            UserError: what is to be read has changed meanwhile, and cannot work.
        """
        step = self.state.step
        # a rollback is noted in the run directory; faults.guards.rollbacks bounds their number
        if isinstance(error, RollBack):
            raise_if_received()
            self.resumes = self.went_back = True
            return read_inputs(self._asked)
        if not self._is_loss(error) or (wait_s := self._attempts.lost(step)) is None:
            raise error
        what = str(error).splitlines()[0]
        counted = f"{self._attempts.counting} of {self._attempts.rule.attempts}"
        said = (
            f"lost after step {step}: {what}\n  the run reopens in {wait_s:g} s (attempt {counted})"
        )
        _tell(said)
        with contextlib.suppress(OSError):  # a session says what it cannot do without
            note_restart(self.dir.path, "driver", what, step, wait_s)
        pause(wait_s)
        self.resumes = self.restarted = True
        return read_inputs(self._asked)

    def _is_loss(self, error: Exception) -> bool:
        """Tells whether the error is a loss of something that was there and may come back.

        What never came up is more likely to be asked for wrongly, unless it is a process that died.
        """
        if self._came_up:
            return isinstance(error, WorkerLostError | EngineLostError | NoEngineError)
        return isinstance(error, WorkerLostError) and not isinstance(error, WorkerSilentError)

    def _stands(self) -> Standing | None:
        """How far the run got; None: its directory was discarded."""
        return self._standing() if (self.dir.path / CONFIG).exists() else None

    def _standing(self) -> Standing:
        return Standing(
            self.dir.path, self.state.step, self._config.run.steps, self.dir.newest_step()
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
                self.dir.discard()
            self.dir.close()


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # of the terminal
        print(line, file=sys.stderr, flush=True)


def made_already(inputs: Inputs, from_step: int | None, dump_step: int | None) -> Path | None:
    """The directory of the run that is to be continued, where nothing is left to do of it but what
    sinks make at the end, which they do; None: there is something.

    Raises:
        UserError: there is no such run, it cannot be continued, or a step that is to be written out
            is made already.
    """
    config = inputs.config
    if (finished := finished_run(config, from_step)) is None:
        return None
    if not restarted():  # or it may have been written out, too
        check_dump_step(config, dump_step, config.run.steps)
    print(
        f"all {config.run.steps} steps of this run are done already; give a larger"
        " run.steps=... to train on"
    )
    Monitor(inputs.sinks, RunOutline(finished, config)).finish()
    return finished
