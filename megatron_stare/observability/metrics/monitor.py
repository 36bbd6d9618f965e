"""Passes a run's reports to all sinks. A report describes a step, an evaluation, an alert or a
phase, or contains a note for the user.

The driver loop calls the monitor. If a sink that is not essential fails during the run, the run and
the other sinks continue. If an essential sink fails during the run, the run ends. The built-in sink
that writes the run's record is essential. If a sink cannot start, the run also ends. Only a run
that resumes automatically, after the loss of a process or after a rollback, continues without a
sink that cannot start. Even a run that resumes automatically ends if an essential sink cannot
start.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron_stare.errors import UserError
from megatron_stare.observability.metrics.own_metrics import WHERE as OWN
from megatron_stare.observability.metrics.own_metrics import OwnMetric, measure
from megatron_stare.observability.metrics.reflections import reflections, selected_reflections
from megatron_stare.observability.metrics.rules import Watch
from megatron_stare.observability.metrics.step_metrics import Stopwatch, step_metrics
from megatron_stare.observability.sink import WHERE, RunOutline, Sink
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.run_dir.run_files import METRICS_FILE, read_metrics

Gauge = Callable[[], Mapping[str, float]]
Derived = Callable[[RolloutBatch, Mapping[str, float]], Mapping[str, float]]


class Monitor:
    """Passes all reports of a run to its sinks.

    Args:
        sinks: sinks by name. Essential sinks are called first, so that a report is recorded before
            other sinks show the report.
        run: the run's directory and configuration.
        own: the user's functions that compute metrics of a step's batch, keyed by path.
    """

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        run: RunOutline,
        own: Mapping[str, OwnMetric] = MappingProxyType({}),
    ) -> None:
        self._own = own
        self._sinks = dict(sorted(sinks.items(), key=lambda item: not item[1].essential))
        self._run = run
        self._open: dict[str, Sink] = {}
        self._failed: set[str] = set()
        self._watch = Watch(run.config.coarsest_dtype, sampled=not run.config.supervised)
        self._stopwatch = Stopwatch(self._shown)
        # metrics that do not come from the trainer, read when a step is logged
        self.gauges: list[Gauge] = []
        # returns the pids of the run's workers on this node
        self.pids_here: Callable[[], Iterable[int]] = tuple
        # functions that compute metrics from the batch and the other metrics
        self.derived: list[Derived] = []
        # metrics of earlier steps, in a resumed run
        self.resumed: list[dict[str, Any]] = []

    def start(self) -> None:
        """Starts all sinks for a new run. Raises UserError if a sink cannot start."""
        for name, sink in self._sinks.items():
            self._begin(name, sink, lambda sink: sink.start(self._run))

    def resume(self, step: int, *, unattended: bool = False) -> None:
        """Starts all sinks that are not essential, for a run that resumes after step number `step`.

        Args:
            unattended: True if the run resumes automatically, after the loss of a process or after
                a rollback. If `unattended` is True, a sink that cannot start is left out, because
                no user may be there to fix the sink.

        Raises:
            UserError: a sink cannot start, and `unattended` is False.
        """
        self.resumed = self._rows(step)
        self._watch.restore(self.resumed)
        self._resume_sinks(step, self.resumed, essential=False, unattended=unattended)

    def resume_record(self, step: int) -> None:
        """Starts the essential sinks, for a run that resumes after step number `step`. At their
        start, essential sinks remove all steps after `step` from the run's record. Call
        `resume_record` only after the checkpoint is loaded, so that a failed load removes no step
        from the record. Raises UserError if a sink cannot start."""
        self._resume_sinks(step, self._rows(step), essential=True, unattended=False)

    def begin_step(self) -> None:
        """Starts the clock of the next step."""
        self._stopwatch = Stopwatch(self._shown)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that measures how long the phase `name` of the current step
        takes. The time is logged as `time/<name>_s`."""
        return self._stopwatch(name)

    def progress(self, done: int, total: int) -> None:
        """Reports to the sinks how many responses of the current phase are finished, and how many
        responses the phase needs in total."""
        self._tell(lambda sink: sink.progress(done, total))

    def note(self, text: str) -> None:
        """Passes a remark for the user to all sinks."""
        self._tell(lambda sink: sink.note(text))

    def log(self, step: int, batch: RolloutBatch, result: Mapping[str, float]) -> None:
        """Logs a finished step. The record of a logged step is not lost if the process is killed.

        Args:
            result: the trainer's metrics of the step.

        Raises:
            UserError: the record of the run cannot be written.
        """
        gauged = {name: value for gauge in self.gauges for name, value in gauge().items()}
        sampled = not self._run.config.supervised
        found = step_metrics(
            batch,
            batch.trajectories,
            {**result, **gauged},
            self._stopwatch,
            sampled=sampled,
            pids_here=self.pids_here,
        )
        found |= reflections(batch.trajectories, self._run.config.observability.reflection_words)
        found |= selected_reflections(batch.trajectories)
        metrics = {name: float(value) for name, value in found.items()}
        for derive in self.derived:
            metrics |= derive(batch, metrics)
        for name, function in self._own.items():
            try:
                metrics |= measure(function, batch, metrics)
            except Exception as error:  # any error of a user's function
                self._warn_once(
                    name, f"{name!r} of {OWN} failed: {_said(error)}; the run goes on without it"
                )
        changed = self._watch.add(step, metrics)
        active = tuple(self._watch.active.values())
        self._tell(lambda sink: sink.step(step, metrics, batch))
        self._tell(lambda sink: sink.alerts(changed, active))

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Reports a finished evaluation. Raises UserError if the evaluation cannot be recorded."""
        self._tell(lambda sink: sink.evaluation(record))

    def finish(self) -> None:
        """Tells every sink that the run has made all its steps."""
        for name, sink in self._sinks.items():
            self._guarded(name, sink, lambda sink: sink.finish(self._run))

    def close(self) -> None:
        """Closes every sink that was started. Raises UserError if an essential sink could not be
        closed properly."""
        first: UserError | None = None
        for name, sink in reversed(self._open.items()):
            try:
                self._guarded(name, sink, lambda sink: sink.close())
            except UserError as error:
                first = first or error
        self._open.clear()
        if first:
            raise first

    @contextlib.contextmanager
    def _shown(self, phase: str) -> Iterator[None]:
        self._tell(lambda sink: sink.begin_phase(phase))
        try:
            yield
        finally:
            self._tell(lambda sink: sink.end_phase(phase))

    def _rows(self, step: int) -> list[dict[str, Any]]:
        return [row for row in read_metrics(self._run.dir / METRICS_FILE) if row["step"] <= step]

    def _resume_sinks(
        self,
        step: int,
        rows: Sequence[Mapping[str, float]],
        *,
        essential: bool,
        unattended: bool,
    ) -> None:
        for name, sink in self._sinks.items():
            if sink.essential == essential:
                self._begin(name, sink, lambda sink: sink.resume(self._run, step, rows), unattended)

    def _begin(
        self, name: str, sink: Sink, call: Callable[[Sink], None], unattended: bool = False
    ) -> None:
        """Starts a sink. If a sink cannot start and `unattended` is False, the run ends, because no
        training time is lost yet and the user can fix the sink. If `unattended` is True, the run
        continues without the sink that cannot start."""
        self._open[name] = sink
        try:
            call(sink)
        except Exception as error:
            if unattended:
                del self._open[name]
                with contextlib.suppress(Exception):
                    sink.close()
                self._warn_once(
                    name,
                    f"the run goes on without the sink {name!r} of {WHERE}, which cannot start:"
                    f" {_said(error)}",
                )
                return
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{name!r} cannot start: {_said(error)}",
                where=WHERE,
                fix="mend it, or leave this sink out",
            ) from error

    def _tell(self, call: Callable[[Sink], None]) -> None:
        for name, sink in self._sinks.items():
            if name in self._open:
                self._guarded(name, sink, call)

    def _guarded(self, name: str, sink: Sink, call: Callable[[Sink], None]) -> None:
        """Calls one sink and handles its errors."""
        try:
            call(sink)
        except Exception as error:
            known = name in self._failed
            if not sink.essential:
                self._warn_once(
                    name,
                    f"the sink {name!r} of {WHERE} failed: {_said(error)}; the run goes on, and"
                    " the sink misses records",
                )
                # a sink may keep an error and raise it at every step, whose frames hold its batch
                error.__traceback__ = None
            elif not isinstance(error, OSError):
                raise
            # otherwise the sink is being closed because of this failure, so its remaining writes
            # fail too
            elif not known:
                self._failed.add(name)
                raise UserError(
                    f"the record of the run cannot be written ({error.strerror or error})",
                    where=str(error.filename or self._run.dir),
                    fix="make room, and continue with --resume",
                ) from error

    def _warn_once(self, name: str, text: str) -> None:
        """Prints a warning about a failing sink or metric, but only once for each name."""
        if name in self._failed:
            return
        self._failed.add(name)
        with contextlib.suppress(OSError):  # the terminal itself may be gone
            print(f"warning: {text}", file=sys.stderr, flush=True)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
