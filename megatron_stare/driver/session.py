"""Everything a run holds open - workers, verifiers, prompts, files - built in order and closed in reverse."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from megatron_stare.cluster.colocation import Colocation
from megatron_stare.cluster.trainer_group import Runner, TrainerGroup
from megatron_stare.config.engines_alone import evaluation_engines
from megatron_stare.config.load import former_names
from megatron_stare.config.process_settings import port_share
from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.data.prompt_source import PromptQueue, dropped
from megatron_stare.driver.agreement_watch import AgreementWatch
from megatron_stare.driver.checkpoints import Checkpoints, export_policy
from megatron_stare.driver.evaluator import Evaluator
from megatron_stare.driver.guards import FOLDER, Guards
from megatron_stare.driver.held_run import HeldRun
from megatron_stare.driver.opening import Inputs, check_dump_step
from megatron_stare.driver.policy_trainer import PolicyTrainer
from megatron_stare.driver.resuming import offering_older, prompt_inputs, refuse_other_inputs, resume_point
from megatron_stare.driver.supervision import supervised
from megatron_stare.driver.training_source import TrainingSource
from megatron_stare.errors import GuardError, NonFiniteError, RollBack, UserError
from megatron_stare.hangs.driver_side import BlackBox
from megatron_stare.observability.metrics.monitor import Monitor
from megatron_stare.observability.sink import RunOutline
from megatron_stare.planning.placement import Awaited
from megatron_stare.planning.preflight import notices
from megatron_stare.process.interruption import (
    ClosingStack,
    end_for_time,
    is_to_be_saved,
    makes_steps,
    open_to,
    raise_if_received,
    seconds_left,
)
from megatron_stare.process.memory import freeze, frozen_heap
from megatron_stare.process.time_limit import TimeLimit
from megatron_stare.process.workers import WorkerLostError
from megatron_stare.records.metric import Metric
from megatron_stare.registry import Extension
from megatron_stare.rewards.known_answers import open_pool
from megatron_stare.rewards.verifier_pool import VerifierPool
from megatron_stare.rollout.engines.model_folder import token_texts
from megatron_stare.rollout.engines.replicas import replica_count, replica_nodes
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.calls import CALLS, CallJournal
from megatron_stare.rollout.sources.kept import without
from megatron_stare.rollout.sources.make_source import make_groups, make_source
from megatron_stare.run_dir.run_files import evaluated_steps
from megatron_stare.run_dir.run_state import CONFIG, RunState

INTERRUPTED_S = 20.0  # for a checkpoint under way when a signal ends the run; Slurm kills 30 s after it sends one
# phases of a step whose memory is logged, and what of it
PHASES = ("rollout", "log_probs", "update", "sync", "checkpoint", "eval")
HELD = {
    "peak_mb": ("the most that a rank of the trainer held in", "below the GPU's size; level over steps"),
    "live_mb": (
        "without CUDA, tensors of the policy and what autograd kept for backward on the fullest rank, of",
        "level over steps; in log_probs and update what plan/ is held against",
    ),
    "device_mb": ("what all processes hold of the fullest GPU at the end of", "below the GPU's size"),
    "engines_mb": ("what servers on the trainer's devices hold at the end of", "small but in rollout, sync and eval"),
}
METRICS = tuple(
    Metric(f"memory/{phase}_{what}", "MB", f"10^6 bytes: {meaning} the phase {phase}", healthy)
    for phase in PHASES
    for what, (meaning, healthy) in HELD.items()
)


class Session:
    """A run in progress. A context manager; nothing it started outlives it.

    Args:
        inputs: read and checked before anything is started.
        held: the run's directory; and the checkpoint that is continued, if any.
        dump_step: the step that will be written out, if any.
        limit: of the time that the run may take.

    Raises:
        UserError: a worker, the verifier or a checkpoint cannot be used.
    """

    def __init__(
        self,
        inputs: Inputs,
        held: HeldRun,
        *,
        dump_step: int | None = None,
        limit: TimeLimit | None = None,
    ) -> None:
        self.config = config = inputs.config
        method, self.stop_ids = inputs.run.method, inputs.stop_ids
        self.limit = limit or TimeLimit(None)
        made_with = prompt_inputs(config, inputs.tokenizer, inputs.source)
        self.source = PromptQueue(inputs.source)
        self.task, self.evaluations = inputs.task, inputs.evaluations
        self.state = RunState(data=self.source.state(), method=method.initial_state())
        self._held, self.dir, resume = held, held.dir, held.resumes
        with ClosingStack() as stack:
            stack.enter_context(frozen_heap())
            restored: Path | None = None
            stack.callback(self.dir.forget_unfinished)
            if resume:
                restored, state = resume_point(self.dir.path, config, held.from_step)
                if state:
                    refuse_other_inputs(state.inputs, made_with, config)
                    self.state = state
                    self.source.restore(state.data)
                self.state.rollbacks = max(self.state.rollbacks, self.dir.rollbacks(), key=len)
                self.source.leave_out(self.state.left_out)
            self.state.inputs = made_with
            held.state = self.state
            if not (held.restarted or held.went_back):  # or it may be made already
                check_dump_step(config, dump_step, self.state.step)
            self.black_box: BlackBox | None = None
            sinks = dict(inputs.sinks)
            if config.faults.hangs.enabled:
                ports = port_share(config, 0, replica_count(config) * replica_nodes(config))
                self.black_box = BlackBox(config, self.dir.path, ports, supervised=supervised())
                stack.callback(self.black_box.close)
                sinks["black_box"] = self.black_box.beats
            self.monitor = Monitor(sinks, RunOutline(self.dir.path, config), inputs.metrics)
            stack.callback(self.monitor.close)
            self.monitor.resume(self.state.step) if resume else self.monitor.start()
            self.verifiers: dict[Extension, VerifierPool] = {}
            for verifier, task in inputs.verifiers().items():
                with task.blamed():
                    self.verifiers[verifier] = open_pool(verifier, config.reward, config.reward.workers)
                stack.callback(self.verifiers[verifier].close)
            with self.monitor.phase("start"):
                runner = make_runner(inputs.run, held.awaited())
            stack.callback(runner.close)
            stack.push(partial(_say_what_was_lost, runner))
            self.ranks, self.engines = runner.trainers, runner.engines
            memory = PhaseMemory(self.monitor.phase, self.ranks, self.engines if config.sglang.colocated else None)
            self.phase = memory.phase
            self.monitor.gauges.append(memory.take)
            self.monitor.gauges += [held.metrics, lambda: held.plan.metrics]
            self.checkpoints = Checkpoints(config, self.ranks, self.dir, self.monitor.note)
            self.monitor.gauges.append(self.checkpoints.metrics)
            stack.push(self._close_checkpoints)
            agreement = AgreementWatch(inputs.run, self.ranks, self.engines)
            agreement.restore(self.monitor.resumed)
            self.guards = Guards(config.faults.guards, config.model.dtype)
            self.guards.restore(self.monitor.resumed)
            self.monitor.gauges.append(self._rollback_metrics)
            self.colocation = colocation = Colocation(config, self.ranks, self.engines)
            self.monitor.gauges.append(lambda: colocation.metrics)
            self.monitor.gauges.append(lambda: self.engines.metrics)
            self.monitor.gauges.append(lambda: self.samples.metrics)
            self.evaluator = Evaluator(self.engines, self.verifiers, config.reward, self.stop_ids)
            self.own_engines: EnginePool | None = None
            self.own_version: int | None = None  # of the weights that those hold
            if inputs.evaluations and (alone := evaluation_engines(config)):
                self.own_engines = runner.engines_beside(alone)
                pools = {}  # the training's are asked from another thread meanwhile
                for verifier in {evaluation.task.verifier for evaluation in inputs.evaluations}:
                    pools[verifier] = open_pool(verifier, config.reward, config.reward.workers)
                    stack.callback(pools[verifier].close)
                self.own_evaluator = Evaluator(self.own_engines, pools, config.reward, self.stop_ids)
            self.groups = make_groups(config, self.source)
            self.groups.restore(without(self.state.kept, self.state.left_out))
            self._kept = self.groups.kept()
            self.samples = make_source(
                config,
                self.evaluator.rollouts(self.task.verifier, inputs.environment, CallJournal(self.dir.path / CALLS)),
                self.groups,
                lambda step: replace(
                    self.task.sampling(step, config.run.seed, self.stop_ids),
                    return_experts=config.moe.routing_replay,
                ),
                self.source.state,
                self._progress,
                colocation.release,
            )
            stack.callback(self.samples.close)
            self.rollouts = TrainingSource(
                self.samples, method.judge, colocation, agreement, self.phase, self._published
            )
            dump = None if dump_step is None else (dump_step, self.dir.path / f"dump_step_{dump_step}")
            texts = partial(token_texts, tokenizer=inputs.tokenizer)
            events = self.dir.path / FOLDER
            self.trainer = PolicyTrainer(
                config, self.ranks, self.state, agreement, self.phase, dump, texts, self.guards, events
            )
            left_out = [f"data: {n} prompts left out: {why}" for why, n in dropped(inputs.source).items()]
            self.dir.record_placement(runner.notes())
            told = () if held.restarted or held.went_back else held.plan.notes
            left_out += inputs.data_remarks()
            for line in [*notices(config), *told, *left_out, *runner.notes(), *self.ranks.notes()]:
                self.monitor.note(line)
            if restored:
                with offering_older(restored):
                    self.checkpoints.load(restored)
                self.monitor.note(f"continuing after step {self.state.step}")
                for aside in self.dir.set_aside(self.state.step):
                    self.monitor.note(f"a later checkpoint is not continued; it is {aside} now, and may be removed")
            elif resume:
                self.monitor.note("the run ended before its first checkpoint: beginning anew")
            if held.restarted and held.restarts:
                self.monitor.note(f"restart {held.restarts} of this run, by itself")
            if resume:
                for line in former_names(self.dir.path / CONFIG):
                    self.monitor.note(line)
                self.dir.record(config)  # run.steps, the layout and more may be others from here on
            freeze()
            stack.callback(self._last_phase, "closing")
            held.opened()
            self._open = stack.pop_all()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._open.__exit__(kind, error, trace)
        finally:
            makes_steps(None)

    def _close_checkpoints(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Where the run is interrupted, the state of its last step is saved, if that was asked for, and the checkpoint
        under way is waited for, as it is where figures of a step end the run; after an error that may be the ranks',
        neither. What is not completed then is removed.

        Raises:
            UserError: the checkpoint that was asked for cannot be written.
        """
        if isinstance(error, RollBack | GuardError | NonFiniteError):
            with contextlib.suppress(UserError):
                self.checkpoints.finish()
        if not isinstance(error, KeyboardInterrupt):
            return
        with contextlib.suppress(UserError):
            self.checkpoints.finish(seconds_left() or INTERRUPTED_S)
        due = is_to_be_saved() and self.state.step and self.state.step != self.checkpoints.newest
        if due and not self.guards.ends:  # or a resume would begin with what they were to keep out
            if self.config.sglang.colocated:
                self.engines.close()  # whatever they were doing, the memory is the trainer's now
            try:
                self.checkpoints.save(self._whole_state(), seconds_left())
                self.checkpoints.finish(seconds_left())
            except WorkerLostError as lost:  # or it was not written in the time that is left
                with contextlib.suppress(OSError):  # of the terminal
                    print(f"step {self.state.step} could not be saved: {str(lost).splitlines()[0]}", file=sys.stderr)

    def steps(self) -> Iterator[int]:
        """The steps still to do. After each, and so before the next is given, what is due is saved and evaluated.

        Raises:
            RollBack: the run is to go on from its newest checkpoint, without the prompts of the last step.
            GuardError: a figure of the last step ends the run.
        """
        makes_steps(self.config.checkpoint.grace_s)
        self._held.stepping = True
        self.limit.begin_steps()
        self._evaluate_if_due()  # of a resumed run, where it ended between a checkpoint and this
        for step in range(self.state.step + 1, self.config.run.steps + 1):
            raise_if_received()
            self.limit.begin_step()
            if self.limit.passed_before_another(self.checkpoints.longest_s):
                end_for_time()
            self.monitor.begin_step()
            if self.black_box is not None:
                self.black_box.beats.begin_step(step)
            yield step
            self._heed_guards()
            raise_if_received()  # saved as the run is closed
            self.checkpoints.look()
            self._save_if_due()
            self._evaluate_if_due()
        raise_if_received()
        makes_steps(None)

    def _heed_guards(self) -> None:
        """Ends the run, or has it go back, where the last step's figures say so; that is noted on disk first."""
        try:
            self.guards.heed(len(self.state.rollbacks))
        except RollBack as back:
            newest = self.dir.newest_step()
            self.dir.note_rollback(self.state.rollbacks, back)
            where = "its start" if newest is None else "its newest checkpoint"
            self.monitor.note(f"{back}: the run goes back to {where}, without the step's {len(back.prompts)} prompts")
            raise

    def _rollback_metrics(self) -> dict[str, float]:
        made, left_out = len(self.state.rollbacks), len(self.state.left_out)
        return {"guard/rollbacks": float(made), "guard/left_out": float(left_out)} if made else {}

    def finish(self) -> Path:
        """All steps are made: exports the policy, tells whoever waits for the end, and returns the run directory."""
        self._last_phase("export")
        self.checkpoints.finish()
        export_policy(self.ranks, self.dir.path / "hf", Path(self.config.model.path), self.state.step)
        self.monitor.finish()
        return self.dir.path

    def _last_phase(self, name: str) -> None:
        if self.black_box is not None:
            self.black_box.beats.last_phase(name)

    def _progress(self, done: int, wanted: int) -> None:
        self._tell_news()
        self.monitor.progress(done, wanted)

    def _tell_news(self) -> None:
        """Tells who watches what became of engines."""
        for line in self.engines.news():
            self.monitor.note(line)

    def _published(self, version: int) -> None:
        """The weights of this version are what comes next is sampled by, so the run stands at this step."""
        self.state.step, self.state.data = version, self.rollouts.state()
        self._kept = self.groups.kept()
        self._tell_news()

    def _save_if_due(self) -> None:
        """Writes the checkpoint that is due after the step the run stands at."""
        run = self.config.run
        if self.state.step == run.steps or (run.checkpoint_every and self.state.step % run.checkpoint_every == 0):
            with self.phase("checkpoint"), self.colocation.saving():
                self.checkpoints.save(self._whole_state())

    def _whole_state(self) -> RunState:
        """The state as it was when the last step was finished, whatever was begun since."""
        return replace(self.state, kept=self._kept())

    def _evaluate_if_due(self) -> None:
        """Evaluates the newest weights on the held-out problems where that is due - before, after and in between - and
        was not yet done."""
        step, every = self.state.step, self.config.eval.every
        if step not in (0, self.config.run.steps) and not (every > 0 and step % every == 0):
            return
        for evaluation in self.evaluations:
            task = evaluation.task
            if step in evaluated_steps(self.dir.path, task.name):
                continue
            with self.phase("eval"), open_to(signal.SIGTERM, signal.SIGUSR1), self._evaluated_by() as evaluator:
                found = evaluator.evaluate(evaluation, step, self.samples.version, self._progress)
            self.monitor.evaluation(found.record)

    @contextlib.contextmanager
    def _evaluated_by(self) -> Iterator[Evaluator]:
        """Engines that hold the newest weights: the evaluation's own, which are given them, while training's may go on
        sampling; or training's, which do nothing else meanwhile."""
        if self.own_engines is None:
            with self.rollouts.quiet():
                yield self.evaluator
            return
        if self.own_version != self.samples.version:
            self.own_engines.update_weights(self.samples.version, self.trainer.weights())
            self.own_version = self.samples.version
            self.colocation.synced()
        yield self.own_evaluator


def _say_what_was_lost(runner: Runner, kind: object, error: BaseException | None, trace: object) -> None:
    """Where an error came of a process that died, which only those that it worked with may have told, raises that."""
    if isinstance(error, Exception) and not isinstance(error, RollBack) and (lost := runner.lost(error)):
        raise lost from error


def make_runner(run: ResolvedRun, awaited: Awaited | None = None) -> Runner:
    """The runner that the configuration names; its module is imported only then, so that inline runs need no Ray."""
    if run.config.runtime.runner == "inline":
        from megatron_stare.cluster.inline import InlineRunner

        return InlineRunner(run)
    from megatron_stare.cluster.ray_runner import RayRunner

    return RayRunner(run, awaited)


class PhaseMemory:
    """Gives every phase the metrics `memory/<phase>_peak_mb` and, with a GPU, `memory/<phase>_device_mb`, without CUDA
    `memory/<phase>_live_mb`, of the rank that holds most, and where engines are named `memory/<phase>_engines_mb`;
    10^6 bytes.

    Args:
        phase: opens a phase of the step, by name.
        engines: that share the trainer's devices; None: none do.
    """

    def __init__(
        self, phase: Callable[[str], AbstractContextManager[None]], ranks: TrainerGroup, engines: EnginePool | None
    ) -> None:
        self._phase, self._ranks, self._engines = phase, ranks, engines
        self._metrics: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the step. What lies between two of them counts to the later one."""
        with self._phase(name):
            yield
        found = self._ranks.memory_mb()
        if self._engines is not None and (held := self._engines.memory_mb()) is not None:
            found["engines_mb"] = held
        self._metrics |= {f"memory/{name}_{what}": mb for what, mb in found.items()}

    def take(self) -> dict[str, float]:
        """The metrics of the phases since this was asked last."""
        taken, self._metrics = self._metrics, {}
        return taken
