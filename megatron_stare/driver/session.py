"""Opens the resources of a run (workers, verifiers, prompts, files) in order, and closes them in
reverse order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from megatron_stare.cluster.colocation import Colocation
from megatron_stare.cluster.trainer_group import Runner
from megatron_stare.config.engines_alone import evaluation_engines, synced_in
from megatron_stare.config.load import former_names
from megatron_stare.config.process_settings import port_share
from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.data.prompt_source import PromptQueue
from megatron_stare.driver.agreement_watch import AgreementWatch
from megatron_stare.driver.checkpoints import Checkpoints, export_policy
from megatron_stare.driver.demonstrations import Demonstrations, HeldOutLoss
from megatron_stare.driver.evaluator import Evaluator
from megatron_stare.driver.guards import FOLDER, Guards
from megatron_stare.driver.held_run import HeldRun
from megatron_stare.driver.opening import Inputs, check_dump_step
from megatron_stare.driver.parts import GuardedSteps, HeldOut, Measured, Part, PhaseMemory, Saves
from megatron_stare.driver.policy_trainer import PolicyTrainer
from megatron_stare.driver.resuming import (
    offering_older,
    prompt_inputs,
    refuse_other_inputs,
    resume_point,
)
from megatron_stare.driver.supervision import supervised
from megatron_stare.driver.training_source import TrainingSource
from megatron_stare.errors import RollBack
from megatron_stare.hangs.driver_side import BlackBox
from megatron_stare.observability.metrics.monitor import Monitor
from megatron_stare.observability.sink import RunOutline
from megatron_stare.planning.own_plan import ModelFlops
from megatron_stare.planning.placement import Awaited
from megatron_stare.planning.preflight import notices
from megatron_stare.process.interruption import (
    ClosingStack,
    end_for_time,
    makes_steps,
    poll,
    raise_if_received,
)
from megatron_stare.process.memory import freeze, frozen_heap
from megatron_stare.process.output import kept_output
from megatron_stare.process.signs_of_life import counted, unsaid
from megatron_stare.process.time_limit import TimeLimit
from megatron_stare.registry import Extension
from megatron_stare.rewards.known_answers import open_pool
from megatron_stare.rewards.verifier_pool import VerifierPool
from megatron_stare.rollout.engines.model_folder import token_texts
from megatron_stare.rollout.engines.replicas import replica_count, replica_nodes
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.calls import CALLS, CallJournal
from megatron_stare.rollout.sources.kept import without
from megatron_stare.rollout.sources.make_source import Groups, make_groups, make_source
from megatron_stare.rollout.sources.rollout_source import RolloutSource
from megatron_stare.run_dir.heartbeat import forget_heartbeat
from megatron_stare.run_dir.run_state import CONFIG, LOGS, RunState
from megatron_stare.tasks.task import Task


class Session:
    """Context manager for a run in progress. On exit, the session stops every process that it
    started.

    Args:
        inputs: inputs of the run, already checked.
        held: the run's directory, and the checkpoint to resume from, if any.
        dump_step: the step to dump, if any.
        limit: time limit of the run.

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
        self.config, self.dir, self.limit = inputs.config, held.dir, limit or TimeLimit(None)
        self._inputs, self._held = inputs, held
        self._parts: list[Part] = []  # called after every step, in this order
        self._before_steps: Callable[[], None] = lambda: None  # called before the first step
        # None: nothing is sampled
        self.groups: Groups | None = None
        self._kept: Callable[[], bytes] = bytes  # returns the responses in flight
        self.rollouts: RolloutSource
        with ClosingStack() as stack:
            stack.enter_context(frozen_heap())
            stack.callback(self.dir.forget_unfinished)
            restored = self._find_state(dump_step)
            self._open_monitor(stack)
            poll()
            runner = self._open_workers(stack)
            poll()
            self._open_saves(stack)
            if self.config.supervised:
                self._open_demonstrations()
                self._open_trainer(dump_step)
            else:
                own = self._open_evaluators(stack, runner)
                self._open_rollouts(stack)
                self._open_trainer(dump_step)
                self._add_held_out(own)
            self._tell(runner)
            self._continue(restored)
            freeze()
            stack.callback(self._last_phase, "closing")
            held.opened()
            self._open = stack.pop_all()

    def _find_state(self, dump_step: int | None) -> Path | None:
        """Sets the state of the run and the position in the prompt source. A resumed run starts
        with the state and the position that the chosen checkpoint contains. A new run starts with
        the initial state, at the beginning of the prompt source. Returns the checkpoint that the
        run must load, or None if the run loads no checkpoint."""
        inputs, held = self._inputs, self._held
        made_with = prompt_inputs(self.config, inputs.tokenizer, inputs.source)
        self.source = PromptQueue(inputs.source)
        self.state = RunState(data=self.source.state(), method=inputs.run.method.initial_state())
        restored: Path | None = None
        if held.resumes:
            restored, state = resume_point(self.dir.path, self.config, held.from_step)
            if state:
                refuse_other_inputs(state.inputs, made_with, self.config)
                self.state = state
                self.source.restore(state.data)
            self.state.rollbacks = max(self.state.rollbacks, self.dir.rollbacks(), key=len)
            self.source.leave_out(self.state.left_out)
        self.state.inputs = made_with
        self.state.stops = sorted(getattr(inputs.source, "ends", ()))
        held.state = self.state
        if not (held.restarted or held.went_back):  # else the lost session may have done it
            check_dump_step(self.config, dump_step, self.state.step)
        return restored

    def _open_monitor(self, stack: ClosingStack) -> None:
        self.black_box: BlackBox | None = None
        sinks = dict(self._inputs.sinks)
        if self.config.faults.hangs.enabled:
            ports = port_share(
                self.config, 0, replica_count(self.config) * replica_nodes(self.config)
            )
            self.black_box = BlackBox(self.config, self.dir.path, ports, supervised=supervised())
            stack.callback(self.black_box.close)
            sinks["black_box"] = self.black_box.beats
        else:
            forget_heartbeat(self.dir.path)
        self.monitor = Monitor(sinks, RunOutline(self.dir.path, self.config), self._inputs.metrics)
        stack.callback(self.monitor.close)
        if self._held.resumes:
            unattended = self._held.restarted or self._held.went_back
            self.monitor.resume(self.state.step, unattended=unattended)
        else:
            self.monitor.start()

    def _open_workers(self, stack: ClosingStack) -> Runner:
        """Starts verifiers, ranks and engines."""
        if not self.config.supervised:
            workers = counted(self.config.reward.workers, "reward worker")
            self.monitor.note(f"starting {workers} ...")
        stack.enter_context(kept_output(self.dir.path / LOGS))
        self.verifiers = self._pools(stack, self._inputs.verifiers())
        with self.monitor.phase("start"):
            run = self._inputs.run
            run = replace(run, config=synced_in(run.config, self.dir.path))
            runner = make_runner(run, self._held.awaited(), self.monitor.note)
        stack.callback(runner.close)
        self.monitor.pids_here = runner.pids_here
        stack.push(partial(_say_what_was_lost, runner))
        self.ranks, self.engines = runner.trainers, runner.engines
        memory = PhaseMemory(
            self.monitor.phase, self.ranks, self.engines if self.config.sglang.colocated else None
        )
        self.phase = memory.phase
        self.monitor.derived.append(ModelFlops(self._inputs.run).metrics)
        self._add(memory, Measured(self._held.metrics), Measured(lambda: self._held.plan.metrics))
        return runner

    def _pools(
        self, stack: ClosingStack, verifiers: Mapping[Extension, Task]
    ) -> dict[Extension, VerifierPool]:
        pools: dict[Extension, VerifierPool] = {}
        for verifier, task in verifiers.items():
            with task.blamed():
                pools[verifier] = open_pool(verifier, self.config, self.config.reward.workers)
            stack.callback(pools[verifier].close)
        return pools

    def _open_saves(self, stack: ClosingStack) -> None:
        """Creates the guards, the `Saves` object, which saves checkpoints, and the `AgreementWatch`
        object, which compares the engines' log-probs with the trainer's log-probs."""
        self.agreement = AgreementWatch(self._inputs.run, self.ranks, self.engines)
        self.agreement.restore(self.monitor.resumed)
        self.guards = Guards(self.config.faults.guards, self.config.coarsest_dtype)
        self.guards.restore(self.monitor.resumed)
        self.monitor.resumed = []
        self.colocation = Colocation(self.config, self.ranks, self.engines)
        self.checkpoints = Checkpoints(self.config, self.ranks, self.dir, self.monitor.note)
        saves = Saves(
            self.config,
            self.checkpoints,
            self.state,
            self.guards,
            self.engines,
            self.colocation,
            self.phase,
            lambda: self._kept(),
        )
        stack.push(saves.close)
        self._add(
            GuardedSteps(self.guards, self.state, self.dir, self.monitor.note),
            saves,
            Measured(lambda: self.colocation.metrics),
            Measured(lambda: self.engines.metrics),
        )

    def _open_evaluators(
        self, stack: ClosingStack, runner: Runner
    ) -> tuple[EnginePool, Evaluator] | None:
        """Creates `self.evaluator`, which evaluates on the training engines. If the run has
        evaluations and reserves engines for evaluation, returns the reserved engines together with
        a second evaluator, which evaluates on the reserved engines. Returns None if the run has no
        evaluations or reserves no engines for evaluation."""
        reward, stop_ids = self.config.reward, self._inputs.stop_ids
        self.evaluator = Evaluator(self.engines, self.verifiers, reward, stop_ids)
        if not self._inputs.evaluations or not (
            alone := evaluation_engines(synced_in(self.config, self.dir.path))
        ):
            return None
        engines = runner.engines_beside(alone)
        # own pools, because another thread uses the training's pools at the same time
        verifiers = {
            evaluation.task.verifier: evaluation.task for evaluation in self._inputs.evaluations
        }
        return engines, Evaluator(engines, self._pools(stack, verifiers), reward, stop_ids)

    def _open_rollouts(self, stack: ClosingStack) -> None:
        config, task = self.config, self._inputs.task
        stack.callback(self._inputs.environment.close)
        for evaluation in self._inputs.evaluations:
            stack.callback(evaluation.environment.close)
        self.groups = groups = make_groups(config, self.source)
        groups.restore(without(self.state.kept, self.state.left_out))
        self._kept = groups.kept()
        journal = CallJournal(self.dir.path / CALLS)
        self.samples = make_source(
            config,
            self.evaluator.rollouts(task.verifier, self._inputs.environment, journal),
            groups,
            lambda step: replace(
                task.sampling(step, config.run.seed, self._inputs.stop_ids),
                return_experts=config.moe.routing_replay,
            ),
            self.source.state,
            self._progress,
            self.colocation.release,
        )
        self._add(Measured(lambda: self.samples.metrics))
        stack.callback(self.samples.close)
        judge = self._inputs.run.method.judge
        self.rollouts = TrainingSource(
            self.samples,
            judge,
            self.colocation,
            self.agreement,
            self.phase,
            self._published,
            self.checkpoints.looking,
        )

    def _open_demonstrations(self) -> None:
        """Creates the source of demonstrations. If there are held-out demonstrations, also creates
        a HeldOutLoss object, which logs the loss on the held-out demonstrations."""
        self.rollouts = Demonstrations(
            self.source,
            self.config.batch.prompts,
            self._inputs.run.method.judge,
            self.monitor.phase,
            self._published,
        )
        if self._inputs.held_out:
            part = HeldOutLoss(
                self.config, self._inputs.held_out, self.ranks, self.state, self.monitor.phase
            )
            self._add(part)
            self._before_steps = lambda: part.before_steps(self.monitor.note)

    def _open_trainer(self, dump_step: int | None) -> None:
        dump = None if dump_step is None else (dump_step, self.dir.path / f"dump_step_{dump_step}")
        texts = partial(token_texts, tokenizer=self._inputs.tokenizer)
        events = self.dir.path / FOLDER
        self.trainer = PolicyTrainer(
            self.config,
            self.ranks,
            self.state,
            self.agreement,
            self.phase,
            dump,
            texts,
            self.guards,
            events,
            self._profiled,
        )

    def _profiled(self, step: int) -> AbstractContextManager[None]:
        asked = self.config.observability
        if step not in asked.profile_steps:
            return nullcontext()
        folder = self.dir.path / "profile"
        return self.ranks.profiled(asked.profile_ranks, folder, step, self.monitor.note)

    def _add_held_out(self, own: tuple[EnginePool, Evaluator] | None) -> None:
        held_out = HeldOut(
            self.config,
            self._inputs.evaluations,
            self.state,
            self.dir,
            self.monitor,
            self.phase,
            samples=self.samples,
            training=self.evaluator,
            own=own,
            weights=lambda: self.trainer.weights(),
            looking=self.checkpoints.looking,
            synced=self.colocation.synced,
            progress=self._progress,
        )
        self._add(held_out)
        self._before_steps = held_out.after_step

    def _add(self, *parts: Part) -> None:
        self._parts += parts
        self.monitor.gauges += [part.metrics for part in parts]

    def _tell(self, runner: Runner) -> None:
        """Writes the placement of the workers to the run directory, and logs notes for the user
        about the start of the run."""
        held = self._held
        self.dir.record_placement(runner.notes())
        told = () if held.restarted or held.went_back else held.plan.notes
        data = self._inputs.data_remarks()
        for line in [*notices(self.config), *told, *data, *runner.notes(), *self.ranks.notes()]:
            self.monitor.note(line)

    def _continue(self, restored: Path | None) -> None:
        """If there is a checkpoint to resume from, loads the checkpoint and logs the step after
        which the run continues. Removes the steps after the checkpoint from the record of a resumed
        run. The removal comes after the load, so a failed load removes no step from the record."""
        if restored:
            with offering_older(restored):
                self.checkpoints.load(restored)
            self.monitor.note(f"continuing after step {self.state.step}")
            for aside in self.dir.set_aside(self.state.step):
                self.monitor.note(
                    f"a later checkpoint was set aside as {aside}, and may be removed"
                )
        elif self._held.resumes:
            self.monitor.note("the run ended before its first checkpoint: starting from step 0")
        if self._held.resumes:
            self.monitor.resume_record(self.state.step)
        if self._held.restarted and self._held.restarts:
            self.monitor.note(f"automatic restart {self._held.restarts} of this run")
        if self._held.resumes:
            for line in former_names(self.dir.path / CONFIG):
                self.monitor.note(line)
            # record the changes that a resume may make: run.steps, the layout and others
            self.dir.record(self.config)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._open.__exit__(kind, error, trace)
        finally:
            makes_steps(None)

    def steps(self) -> Iterator[int]:
        """Yields the number of each remaining step of the run. After the caller has processed a
        step, this method lets the guards (driver/guards.py) check the step's metrics. This method
        also saves a checkpoint if a checkpoint is due, and evaluates the policy if an evaluation is
        due.

        Raises:
            RollBack: the run must continue from its newest checkpoint and leave out the prompts of
                the last step.
            GuardError: a metric of the last step ends the run.
        """
        makes_steps(self.config.checkpoint.grace_s)
        self._held.stepping = True
        self.limit.begin_steps()
        # step 0, or a resumed run that ended between a checkpoint and its evaluation
        self._before_steps()
        for step in range(self.state.step + 1, self.config.run.steps + 1):
            raise_if_received()
            self.limit.begin_step()
            if self.limit.passed_before_another(self.checkpoints.longest_s):
                end_for_time()
            self.monitor.begin_step()
            if self.black_box is not None:
                self.black_box.beats.begin_step(step)
            yield step
            for part in self._parts:
                part.after_step()
        raise_if_received()
        makes_steps(None)

    def finish(self) -> Path:
        """Exports the policy after the last step, tells the sinks that the run is finished, and
        returns the run directory."""
        self._last_phase("export")
        self.checkpoints.finish()
        export_policy(
            self.ranks,
            self.dir.path / "hf",
            Path(self.config.model.path),
            self.state.step,
            stops=self.state.stops,
        )
        self.monitor.finish()
        return self.dir.path

    def _last_phase(self, name: str) -> None:
        if self.black_box is not None:
            self.black_box.beats.last_phase(name)

    def _progress(self, done: int, wanted: int) -> None:
        self._tell_news()
        self.monitor.progress(done, wanted)

    def _tell_news(self) -> None:
        """Logs events of the engines, such as a lost server."""
        for line in self.engines.news():
            self.monitor.note(line)

    def _published(self, version: int) -> None:
        """Updates the run's state after a step. The rollout source calls `_published` when the
        weight sync of the step is done or was skipped. The argument `version` is the number of the
        step. The state stores this number."""
        self.state.step, self.state.data = version, self.rollouts.state()
        if self.groups is not None:
            self._kept = self.groups.kept()
        self._tell_news()


def _say_what_was_lost(
    runner: Runner, kind: object, error: BaseException | None, trace: object
) -> None:
    """If `error` was caused by the loss of a process of the run, raises an exception that reports
    the lost process."""
    if (
        isinstance(error, Exception)
        and not isinstance(error, RollBack)
        and (lost := runner.lost(error))
    ):
        raise lost from error


def make_runner(
    run: ResolvedRun, awaited: Awaited | None = None, tell: Callable[[str], None] = unsaid
) -> Runner:
    """Returns the runner that the configuration selects. Imports only the module of the selected
    runner, so that runs with the inline runner do not need Ray.

    Args:
        tell: callback that receives a line of text before each slow part of the start. A slow part
            takes seconds.
    """
    if run.config.runtime.runner == "inline":
        from megatron_stare.cluster.inline import InlineRunner

        return InlineRunner(run, tell)
    from megatron_stare.cluster.ray_runner import RayRunner

    return RayRunner(run, awaited, tell)
