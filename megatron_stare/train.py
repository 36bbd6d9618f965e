"""The training loop. It reads like the algorithm; everything it calls lives elsewhere.

rollouts -> rewards -> group advantages -> log-prob and entropy pass -> statistics, gate, weights
         -> for every mini-batch: forward and backward of the weighted loss -> optimizer step
         -> weight sync
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_stare.config.schema import Config
from megatron_stare.errors import NonFiniteError
from megatron_stare.evaluate import evaluate
from megatron_stare.observability.metrics import evaluated_steps
from megatron_stare.observability.report import write_report
from megatron_stare.observability.run_files import score_name
from megatron_stare.observability.step_metrics import Stopwatch, step_metrics
from megatron_stare.opening import check_dump_step, finished_run, read_inputs
from megatron_stare.orchestration.updates import UpdateResult, combined
from megatron_stare.session import Session
from megatron_stare.weights.hf_folder import write_folder

MAX_SKIPPED = 3  # consecutive updates without a finite gradient before the run stops


def train(config: Config, *, resume: bool = False, dump_step: int | None = None) -> Path:
    """Trains, and returns the run directory.

    Args:
        resume: continue the newest checkpoint of the run.
        dump_step: the step of whose first update batch, weights, loss and gradients are written out; None: no step.

    Raises:
        UserError: something the user can mend; the last checkpoint is intact.
    """
    inputs = read_inputs(config)
    config = inputs.config
    if resume and (finished := finished_run(config)):
        check_dump_step(config, dump_step, config.run.steps)
        print(f"all {config.run.steps} steps of this run are made already; give run.steps=... to go on")
        write_report([finished], finished / "report.html")
        return finished
    with Session(inputs, resume=resume, dump_step=dump_step) as run:
        run.sync(run.state.step)
        if evaluation_is_due(run, run.state.step):  # of a resumed run, where it ended between a checkpoint and this
            measure_pass_rate(run)

        for step in run.steps():
            watch = Stopwatch(run.display.phase)
            with watch("rollout"):
                batch = run.method.judge(run.rollouts.next(step))
            with watch("score"):
                run.trainers.score(batch)
                agreement = run.agreement.after_score(step)
                run.trainers.measure(run.state.method)
            with watch("update"):
                dump_to = str(run.dir.path.resolve() / f"dump_step_{step}") if step == dump_step else None
                updates = [run.trainers.update(0, dump_to)]
                updates += [run.trainers.update(number) for number in range(1, config.batch.updates)]
                if config.model.reference_refresh_every and step % config.model.reference_refresh_every == 0:
                    run.trainers.refresh_reference()
            with watch("sync"):
                run.sync(step)

            advance(run, step, updates)
            metrics = step_metrics(
                batch, batch.trajectories, combined(updates) | agreement | run.colocation.metrics, watch
            )
            run.writer.log(step, metrics)
            run.display.step(step, metrics)
            if step % config.run.rollouts_every == 0:
                run.writer.log_rollouts(step, batch.trajectories, config.run.rollouts_kept)
            last = step == config.run.steps
            if last or (config.run.checkpoint_every and step % config.run.checkpoint_every == 0):
                with run.display.phase("checkpoint"):
                    run.dir.save(run.state, run.trainers.save, config.run.keep_checkpoints)
            if evaluation_is_due(run, step):
                measure_pass_rate(run)

        write_folder(run.dir.path / "hf", run.trainers.weights(), config.model.path, run.state.step)
        write_report([run.dir.path], run.dir.path / "report.html")
        return run.dir.path


def advance(run: Session, step: int, updates: Sequence[UpdateResult]) -> None:
    """Moves the run's state on by one step. Raises NonFiniteError where the gradients of MAX_SKIPPED updates in a row
    were not finite; those of empty mini-batches, which have none, are passed over."""
    run.state.step, run.state.data, run.state.method = step, run.source.state(), updates[-1].state
    for update in updates:
        if update.empty:
            continue
        run.state.skipped = 0 if update.finite else run.state.skipped + 1
        if run.state.skipped >= MAX_SKIPPED:
            raise NonFiniteError(
                f"the gradient was not finite in {MAX_SKIPPED} optimizer steps in a row",
                where=f"step {step}",
                fix="lower optimizer.lr, and look at the last steps' loss and log-probs; the weights are unharmed",
            )


def evaluation_is_due(run: Session, step: int) -> bool:
    """Whether the weights after `step` are to be evaluated: before, after and in between."""
    every = run.config.eval.every
    return step in (0, run.config.run.steps) or (every > 0 and step % every == 0)


def measure_pass_rate(run: Session) -> None:
    """Evaluates the newest weights on every task on which they were not yet, and records it."""
    for evaluation in run.evaluations:
        task = evaluation.task
        if run.state.step in evaluated_steps(run.dir.path, task.name):
            continue
        with run.display.phase("eval"):
            record = evaluate(
                evaluation.prompts,
                partial(run.trajectories, evaluation),
                step=run.state.step,
                greedy=task.config.eval.greedy,
                samples=task.samples,
                about=task.about(),
            )
        run.writer.log_eval(record)
        greedy = f", greedy {record['greedy']:.3f}" if record["greedy"] is not None else ""
        run.display.note(
            f"{score_name(record)} of the {record['weights']} policy on {record['problems']} held-out problems"
            f"{f' of {task.name}' if task.name else ''}: sampled {record['pass1']:.3f}{greedy}"
        )
