"""Runs the training loop. Other modules implement the methods that the loop calls.

`next` makes rollouts and computes their rewards and group advantages (driver/training_source.py).
`step` computes log-probs, gate and token weights; then it trains (driver/policy_trainer.py).
`publish` syncs the weights to the engines and verifies the sync (driver/training_source.py).
`log` sends metrics, alerts and samples to every sink (observability/metrics/monitor.py).
`steps` also saves checkpoints and runs evaluations (driver/session.py, driver/parts.py).
`until_done` opens a new session after the loss of a worker (driver/held_run.py).
"""

from __future__ import annotations

from pathlib import Path

from megatron_stare.config.schema import Config
from megatron_stare.driver.held_run import HeldRun, made_already
from megatron_stare.driver.opening import Inputs, read_inputs
from megatron_stare.driver.session import Session
from megatron_stare.process.time_limit import TimeLimit


def train(
    config: Config,
    *,
    resume: bool = False,
    from_step: int | None = None,
    dump_step: int | None = None,
    limit: TimeLimit | None = None,
) -> Path:
    """Trains the policy and returns the run directory.

    Args:
        resume: resume from the checkpoint of `from_step`, or from the newest if that is None.
        dump_step: step whose first update is dumped, with batch, weights, loss and gradients.
        limit: time limit of the run.

    Raises:
        UserError: an error that the user can fix. The last checkpoint is intact.
    """
    inputs = read_inputs(config)
    if resume and (made := made_already(inputs, from_step, dump_step)):
        return made
    with HeldRun(config, inputs, resume=resume, from_step=from_step, dump_step=dump_step) as held:
        return held.until_done(inputs, lambda inputs: _session(inputs, held, dump_step, limit))


def _session(inputs: Inputs, held: HeldRun, dump_step: int | None, limit: TimeLimit | None) -> Path:
    with Session(inputs, held, dump_step=dump_step, limit=limit) as run:
        make_steps(run)
        return run.finish()


def make_steps(run: Session) -> None:
    """Runs all remaining training steps of an open session."""
    run.rollouts.publish(run.trainer.weights(), run.state.step)
    for step in run.steps():
        batch = run.rollouts.next(step)
        result = run.trainer.step(batch)
        run.rollouts.publish(run.trainer.weights(), step)
        run.monitor.log(step, batch, result)
