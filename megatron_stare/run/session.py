"""Everything a run holds open - workers, verifiers, prompts, files - built in order and closed in reverse."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from megatron_stare.config.engines_alone import evaluation_engines
from megatron_stare.data.prompt_queue import PromptQueue
from megatron_stare.errors import GuardError, NonFiniteError, RollBack, UserError
from megatron_stare.interruption import ClosingStack, raise_if_received
from megatron_stare.observability.monitor import Monitor
from megatron_stare.observability.run_files import evaluated_steps
from megatron_stare.observability.sink import RunOutline
from megatron_stare.orchestration.agreement_watch import AgreementWatch
from megatron_stare.orchestration.checkpoints import Checkpoints
from megatron_stare.orchestration.colocation import Colocation
from megatron_stare.orchestration.groups import Runner
from megatron_stare.orchestration.guarded_batches import FOLDER
from megatron_stare.orchestration.guards import Guards
from megatron_stare.orchestration.phase_memory import PhaseMemory
from megatron_stare.orchestration.policy_export import export_policy
from megatron_stare.orchestration.policy_trainer import PolicyTrainer
from megatron_stare.orchestration.training_source import TrainingSource
from megatron_stare.resolved import ResolvedRun
from megatron_stare.rewards.known_answers import open_pool
from megatron_stare.rewards.verifier_pool import VerifierPool
from megatron_stare.rollout.engine_pool import EnginePool
from megatron_stare.rollout.kept import without
from megatron_stare.rollout.make_source import make_groups, make_source
from megatron_stare.rollout.model_folder import token_texts
from megatron_stare.run.evaluator import Evaluator
from megatron_stare.run.held_run import HeldRun
from megatron_stare.run.opening import Inputs, check_dump_step
from megatron_stare.run.preflight import notices
from megatron_stare.run.resuming import resume_point
from megatron_stare.run_state import RunState

INTERRUPTED_S = 20.0  # for a checkpoint under way when a signal ends the run; Slurm kills 30 s after it sends one


class Session:
    """A run in progress. A context manager; nothing it started outlives it.

    Args:
        inputs: read and checked before anything is started.
        held: the run's directory; and whether its newest checkpoint is continued.
        dump_step: the step that will be written out, if any.

    Raises:
        UserError: a worker or the verifier cannot be used, or the checkpoint not be continued.
    """

    def __init__(self, inputs: Inputs, held: HeldRun, *, dump_step: int | None = None) -> None:
        self.config = config = inputs.config
        method, self.stop_ids = inputs.run.method, inputs.stop_ids
        self.source = PromptQueue(inputs.source)
        self.task, self.evaluations = inputs.task, inputs.evaluations
        self.state = RunState(data=self.source.state(), method=method.initial_state())
        self.dir, resume = held.dir, held.resumes
        with ClosingStack() as stack:
            restored: Path | None = None
            stack.callback(self.dir.forget_unfinished)
            if resume:
                restored, state = resume_point(self.dir.path, config)
                if state:
                    self.state = state
                    self.source.restore(state.data)
                self.state.rollbacks = max(self.state.rollbacks, self.dir.rollbacks(), key=len)
                self.source.leave_out(self.state.left_out)
            held.state = self.state
            if not (held.restarted or held.went_back):  # or it may be made already
                check_dump_step(config, dump_step, self.state.step)
            self.monitor = Monitor(inputs.sinks, RunOutline(self.dir.path, config), inputs.metrics)
            stack.callback(self.monitor.close)
            self.monitor.resume(self.state.step) if resume else self.monitor.start()
            self.verifiers: dict[str, VerifierPool] = {}
            for verifier, task in inputs.verifiers().items():
                with task.blamed():
                    self.verifiers[verifier] = open_pool(verifier, config.reward, config.reward.workers)
                stack.callback(self.verifiers[verifier].close)
            with self.monitor.phase("start"):
                runner = make_runner(inputs.run)
            stack.callback(runner.close)
            stack.push(partial(_say_what_was_lost, runner))
            self.ranks, self.engines = runner.trainers, runner.engines
            memory = PhaseMemory(self.monitor.phase, self.ranks, self.engines if config.sglang.colocated else None)
            self.phase = memory.phase
            self.monitor.gauges.append(memory.take)
            self.monitor.gauges.append(held.metrics)
            self.checkpoints = Checkpoints(config, self.ranks, self.dir)
            stack.push(self._complete_checkpoint)
            agreement = AgreementWatch(inputs.run, self.ranks, self.engines)
            agreement.restore(self.monitor.resumed)
            self.guards = Guards(config.guards, config.model.dtype)
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
            self.samples = make_source(
                config,
                self.evaluator.rollouts(self.task.verifier, inputs.environment),
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
            left_out = [
                f"data: {n} prompts left out: {why}" for why, n in getattr(inputs.source, "dropped", {}).items()
            ]
            self.dir.record_placement(runner.notes())
            for line in [*notices(config), *left_out, *runner.notes(), *self.ranks.notes()]:
                self.monitor.note(line)
            if restored:
                self.ranks.load(str(restored.resolve()))
                self.monitor.note(f"continuing after step {self.state.step}")
            elif resume:
                self.monitor.note("the run ended before its first checkpoint: beginning anew")
            if held.restarted:
                self.monitor.note(f"restart {held.restarts} of this run, by itself")
            if resume:
                self.dir.record(config)  # run.steps, the layout and more may be others from here on
            held.came_up = True
            self._open = stack.pop_all()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def _complete_checkpoint(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Where the run is interrupted, goes back to its newest checkpoint or is stopped by a guard, the one under way
        is waited for; after an error that may be the ranks', it is not. What is not completed then is removed."""
        if isinstance(error, (KeyboardInterrupt, RollBack, GuardError, NonFiniteError)):
            with contextlib.suppress(UserError):
                self.checkpoints.finish(INTERRUPTED_S if isinstance(error, KeyboardInterrupt) else None)

    def steps(self) -> Iterator[int]:
        """The steps still to do. After each, and so before the next is given, what is due is saved and evaluated.

        Raises:
            RollBack: the run is to go on from its newest checkpoint, without the prompts of the last step.
            GuardError: a figure of the last step ends the run.
        """
        self._evaluate_if_due()  # of a resumed run, where it ended between a checkpoint and this
        for step in range(self.state.step + 1, self.config.run.steps + 1):
            raise_if_received()
            self.monitor.begin_step()
            yield step
            self._heed_guards()
            self.checkpoints.look()
            self._save_if_due()
            self._evaluate_if_due()

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

    def finish(self) -> None:
        """All steps are made: exports the policy, and tells whoever waits for the end."""
        self.checkpoints.finish()
        export_policy(self.ranks, self.dir.path / "hf", Path(self.config.model.path), self.state.step)
        self.monitor.finish()

    def _progress(self, done: int, wanted: int) -> None:
        self._tell_news()
        self.monitor.progress(done, wanted)

    def _tell_news(self) -> None:
        """What became of engines, to who watches."""
        for line in self.engines.news():
            self.monitor.note(line)

    def _published(self, version: int) -> None:
        """The weights of this version are what comes next is sampled by, so the run stands at this step."""
        self.state.step, self.state.data = version, self.rollouts.state()
        self._tell_news()

    def _save_if_due(self) -> None:
        """Writes the checkpoint that is due after the step the run stands at."""
        run = self.config.run
        if self.state.step == run.steps or (run.checkpoint_every and self.state.step % run.checkpoint_every == 0):
            with self.phase("checkpoint"), self.colocation.saving():
                self.checkpoints.save(replace(self.state, kept=self.groups.kept()))

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
            with self.phase("eval"), self._evaluated_by() as evaluator:
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


def make_runner(run: ResolvedRun) -> Runner:
    """The runner that the configuration names; its module is imported only then, so that inline runs need no Ray."""
    if run.config.runtime.runner == "inline":
        from megatron_stare.orchestration.inline import InlineRunner

        return InlineRunner(run)
    from megatron_stare.orchestration.ray_runner import RayRunner

    return RayRunner(run)
