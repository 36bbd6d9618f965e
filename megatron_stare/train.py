"""The training loop. It reads like the algorithm; everything it calls lives elsewhere.

next:     rollouts -> rewards -> group advantages                              (orchestration/training_source.py)
step:     log-prob and entropy pass -> statistics, gate, weights -> for every mini-batch: forward and backward of the
          weighted loss -> optimizer step                                      (orchestration/policy_trainer.py)
publish:  weight sync, and the proof that it arrived                           (orchestration/training_source.py)
log:      metrics, alerts and samples to every sink                            (observability/monitor.py)
steps:    between two steps, the checkpoint and the evaluation that are due    (run/session.py)
"""

from __future__ import annotations

from pathlib import Path

from megatron_stare.config.schema import Config
from megatron_stare.observability.monitor import Monitor
from megatron_stare.observability.sink import RunOutline
from megatron_stare.run.opening import check_dump_step, finished_run, read_inputs
from megatron_stare.run.session import Session, until_done


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
        Monitor(inputs.sinks, RunOutline(finished, config)).finish()
        return finished
    return until_done(Session(inputs, resume=resume, dump_step=dump_step), make_steps)


def make_steps(session: Session) -> Path:
    """All the steps that are still to do. Returns the run directory. Raises RollBack as Session.steps does."""
    with session as run:
        run.rollouts.publish(run.trainer.weights(), run.state.step)
        for step in run.steps():
            batch = run.rollouts.next(step)
            result = run.trainer.step(batch)
            run.rollouts.publish(run.trainer.weights(), step)
            run.monitor.log(step, batch, result)
        run.finish()
        return run.dir.path
