"""Defines the parts of a session. After every step, the driver calls each part. The parts apply the
guards, save checkpoints, run held-out evaluations, and measure the memory of each phase."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from megatron_stare.cluster.colocation import Colocation
from megatron_stare.cluster.trainer_group import TrainerGroup, WeightStream
from megatron_stare.config.schema import Config
from megatron_stare.driver.checkpoints import Checkpoints
from megatron_stare.driver.evaluator import Evaluator
from megatron_stare.driver.guards import Guards
from megatron_stare.errors import GuardError, NonFiniteError, RollBack, UserError
from megatron_stare.observability.metrics.monitor import Monitor
from megatron_stare.process.interruption import (
    SIGNALS,
    is_to_be_saved,
    open_to,
    raise_if_received,
    seconds_left,
)
from megatron_stare.process.workers import WorkerLostError
from megatron_stare.records.metric import Metric
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.asynchronous_source import AsynchronousSource
from megatron_stare.rollout.sources.synchronous_source import SynchronousSource
from megatron_stare.run_dir.run_files import evaluated_steps
from megatron_stare.run_dir.run_state import RunDir, RunState
from megatron_stare.tasks.task import Evaluation

Phase = Callable[[str], AbstractContextManager[None]]

# seconds that a checkpoint being written gets after a signal; Slurm kills 30 s after its signal
INTERRUPTED_S = 20.0
# phases whose memory is logged, and the quantities that are logged for each
PHASES = ("rollout", "log_probs", "update", "sync", "checkpoint", "eval")
HELD = {
    "peak_mb": (
        "peak memory of the trainer's fullest rank in",
        "below the GPU's size; level over steps",
    ),
    "live_mb": (
        (
            "without CUDA, tensors of the policy and what autograd keeps for the backward pass on"
            " the fullest rank, in"
        ),
        "level over steps; in log_probs and update, compare with plan/",
    ),
    "device_mb": (
        "memory that all processes together hold on the fullest GPU at the end of",
        "below the GPU's size",
    ),
    "engines_mb": (
        "memory that servers hold on the trainer's devices at the end of",
        "small, except in rollout, sync and eval",
    ),
}
METRICS = tuple(
    Metric(f"memory/{phase}_{what}", "MB", f"10^6 bytes: {meaning} the phase {phase}", healthy)
    for phase in PHASES
    for what, (meaning, healthy) in HELD.items()
)


class Part:
    """A part of a session, such as the part that saves checkpoints. After every step, the driver's
    thread calls the method `after_step` of each part. The parts are called in the order in which
    they were added to the session."""

    def after_step(self) -> None:
        """Carries out the part's task after a step, such as saving a checkpoint. Before the driver
        calls `after_step`, the driver trains and logs the step, and syncs the new weights to the
        engines."""

    def metrics(self) -> Mapping[str, float]:
        """Returns the part's metrics for the step being logged."""
        return {}


class Measured(Part):
    """A Part that only logs metrics, and does nothing in `after_step`. A function computes the
    metrics."""

    def __init__(self, metrics: Callable[[], Mapping[str, float]]) -> None:
        self._metrics = metrics

    def metrics(self) -> Mapping[str, float]:
        return self._metrics()


class PhaseMemory(Part):
    """Measures memory at the end of every phase, in units of 10^6 bytes.

    For every phase, logs `memory/<phase>_peak_mb`. On a GPU, also logs `memory/<phase>_device_mb`.
    Without CUDA, also logs `memory/<phase>_live_mb`. The metrics `peak_mb`, `device_mb` and
    `live_mb` are the largest values over all ranks of the trainer. If engines are given, also logs
    `memory/<phase>_engines_mb`.

    Args:
        phase: opens a phase of the step, by name.
        engines: engines that share the trainer's devices, if any.
    """

    def __init__(self, phase: Phase, ranks: TrainerGroup, engines: EnginePool | None) -> None:
        self._phase, self._ranks, self._engines = phase, ranks, engines
        self._metrics: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager for a phase of the step. Memory use between two phases counts towards the
        later phase."""
        with self._phase(name):
            yield
        found = self._ranks.memory_mb()
        if self._engines is not None and (held := self._engines.memory_mb()) is not None:
            found["engines_mb"] = held
        self._metrics |= {f"memory/{name}_{what}": mb for what, mb in found.items()}

    def metrics(self) -> Mapping[str, float]:
        """Returns the metrics of all phases that ended since the last call."""
        taken, self._metrics = self._metrics, {}
        return taken


class GuardedSteps(Part):
    """Carries out the actions of guards after a step: ends the run, or rolls the run back. Writes a
    rollback into the run directory, and then raises RollBack."""

    def __init__(
        self, guards: Guards, state: RunState, run_dir: RunDir, note: Callable[[str], None]
    ) -> None:
        self.guards, self._state, self._dir, self._note = guards, state, run_dir, note

    def after_step(self) -> None:
        """Carries out the actions of the guards that fired in the last step.

        Raises:
            RollBack: the run must continue from its newest checkpoint and leave out the prompts of
                the last step.
            GuardError: a metric of the last step ends the run.
        """
        try:
            self.guards.heed(len(self._state.rollbacks))
        except RollBack as back:
            newest = self._dir.newest_step()
            self._dir.note_rollback(self._state.rollbacks, back)
            where = "its start" if newest is None else "its newest checkpoint"
            self._note(
                f"{back}: the run rolls back to {where} and skips the step's {len(back.prompts)}"
                " prompts"
            )
            raise

    def metrics(self) -> Mapping[str, float]:
        made, left_out = len(self._state.rollbacks), len(self._state.left_out)
        return {"guard/rollbacks": float(made), "guard/left_out": float(left_out)} if made else {}


class Saves(Part):
    """Saves the checkpoints that are due, and the last complete step of an interrupted run.

    Args:
        checkpoints: writes the checkpoints.
        state: state of the run. A checkpoint contains the state after the last finished step.
        guards: the guards of the run. If a guard ends the run at a step, the step is not saved.
        engines: engines of the run. An interrupted colocated run closes them before its final save,
            to free memory.
        phase: opens a phase of the step, by name.
        kept: returns the responses in flight after the last finished step.
    """

    def __init__(
        self,
        config: Config,
        checkpoints: Checkpoints,
        state: RunState,
        guards: Guards,
        engines: EnginePool,
        colocation: Colocation,
        phase: Phase,
        kept: Callable[[], bytes],
    ) -> None:
        self._config = config
        self._checkpoints = checkpoints
        self._state = state
        self._guards = guards
        self._engines, self._colocation, self._phase, self._kept = engines, colocation, phase, kept

    def after_step(self) -> None:
        """Completes the pending checkpoint if all its files are written. Begins a new checkpoint if
        a checkpoint is due at this step.

        Raises:
            UserError: one of the two checkpoints cannot be written.
            KeyboardInterrupt: a signal ends the run. `close` then saves the step.
        """
        raise_if_received()
        self._checkpoints.look()
        run = self._config.run
        if self._state.step == run.steps or (
            run.checkpoint_every and self._state.step % run.checkpoint_every == 0
        ):
            with self._phase("checkpoint"), self._colocation.saving():
                self._checkpoints.save(self._whole_state())

    def metrics(self) -> Mapping[str, float]:
        return self._checkpoints.metrics()

    def close(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Finishes the pending checkpoint, unless the run lost a worker.

        If a signal or the time limit interrupted the run, `close` waits a limited time for the
        pending checkpoint, and then saves a checkpoint of the last finished step. `close` does not
        save this step if a guard ends the run at this step, or if `is_to_be_saved` returns False.
        For example, `is_to_be_saved` returns False when the grace period is over. If a guard or
        non-finite values ended the run, `close` waits for the pending checkpoint, but saves no new
        checkpoint. If any other error ended the run, `close` waits only a limited time for the
        pending checkpoint, because the ranks may have failed. Incomplete checkpoints are removed
        later.

        Raises:
            UserError: the last step cannot be saved.
        """
        if isinstance(error, RollBack | GuardError | NonFiniteError):
            with contextlib.suppress(UserError):
                self._checkpoints.finish()
        elif isinstance(error, Exception) and not isinstance(error, WorkerLostError):
            with contextlib.suppress(Exception):  # the error that ended the run is the one to show
                self._checkpoints.finish(INTERRUPTED_S)
        if not isinstance(error, KeyboardInterrupt):
            return
        with contextlib.suppress(UserError):
            # one that takes a minute is worth it, as long as nothing hurries
            self._checkpoints.finish(seconds_left() if is_to_be_saved() else INTERRUPTED_S)
        due = is_to_be_saved() and self._state.step and self._state.step != self._checkpoints.newest
        if due and not self._guards.ends:  # else a resume would start from the bad step
            if self._config.sglang.colocated:
                self._engines.close()  # frees their memory for the trainer
            try:
                self._checkpoints.save(self._whole_state(), seconds_left())
                self._checkpoints.finish(seconds_left())
            except Exception as error:
                if isinstance(error, UserError) and not isinstance(error, WorkerLostError):
                    raise
                # lost workers, a timeout of the write, or an error of a rank, such as memory, whose
                # traceback comes first
                said = str(error).splitlines() or [type(error).__name__]
                why = said[0 if isinstance(error, WorkerLostError) else -1]
                with contextlib.suppress(OSError):  # the terminal is gone
                    print(f"step {self._state.step} could not be saved: {why}", file=sys.stderr)

    def _whole_state(self) -> RunState:
        return replace(self._state, kept=self._kept())


class HeldOut(Part):
    """Evaluates the newest weights on held-out problems before, during and after training. If the
    run directory already contains a task's evaluation at a step, this evaluation does not run
    again.

    Args:
        evaluations: the tasks with their problems.
        samples: the source of training rollouts, which knows the newest weight version.
        training: evaluator on the training engines. The training engines pause the training
            rollouts during an evaluation.
        own: engines reserved for evaluation, and the evaluator on these engines. None: the training
            engines evaluate.
        weights: returns the policy's tensors.
        looking: context in which the pending checkpoint is completed; see Checkpoints.looking.
        synced: called after the reserved engines have received new weights.
        progress: receives the number of finished responses and the number of all responses of the
            evaluation.
    """

    def __init__(
        self,
        config: Config,
        evaluations: Sequence[Evaluation],
        state: RunState,
        run_dir: RunDir,
        monitor: Monitor,
        phase: Phase,
        *,
        samples: SynchronousSource | AsynchronousSource,
        training: Evaluator,
        own: tuple[EnginePool, Evaluator] | None,
        weights: Callable[[], WeightStream],
        looking: Callable[[], AbstractContextManager[None]],
        synced: Callable[[], None],
        progress: Callable[[int, int], None],
    ) -> None:
        self._config = config
        self._evaluations = evaluations
        self._state = state
        self._dir = run_dir
        self._monitor, self._phase, self._samples = monitor, phase, samples
        self._training, self._own = training, own
        self._weights, self._synced, self._progress = weights, synced, progress
        self._looking = looking
        # weight version on the reserved engines
        self._held: int | None = None
        # steps with their tasks, read at the first evaluation: eval.jsonl may grow to gigabytes
        self._evaluated: set[tuple[int, str | None]] | None = None

    def after_step(self) -> None:
        """Runs every evaluation that is due at the current step and is not recorded yet."""
        step, every = self._state.step, self._config.eval.every
        if step not in (0, self._config.run.steps) and not (every > 0 and step % every == 0):
            return
        if self._evaluated is None:
            self._evaluated = evaluated_steps(self._dir.path)
        for evaluation in self._evaluations:
            if (step, evaluation.task.name) in self._evaluated:
                continue
            with (
                self._phase("eval"),
                open_to(*SIGNALS),
                self._answering() as evaluator,
                self._looking(),  # innermost, because `_phase` and `_answering` call the ranks
            ):
                found = evaluator.evaluate(evaluation, step, self._samples.version, self._progress)
            self._monitor.evaluation(found.record)
            self._evaluated.add((step, evaluation.task.name))

    @contextlib.contextmanager
    def _answering(self) -> Iterator[Evaluator]:
        """Yields an evaluator whose engines have the newest weights."""
        if self._own is None:
            with self._samples.quiet():
                yield self._training
            return
        engines, evaluator = self._own
        if self._held != self._samples.version:
            engines.update_weights(self._samples.version, self._weights())
            self._held = self._samples.version
            self._synced()
        yield evaluator
