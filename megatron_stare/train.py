"""The training loop. It reads like the algorithm; everything it calls lives elsewhere.

next:     rollouts -> rewards -> group advantages                              (orchestration/training_source.py)
step:     log-prob and entropy pass -> statistics, gate, weights -> for every mini-batch: forward and backward of the
          weighted loss -> optimizer step                                      (orchestration/policy_trainer.py)
publish:  weight sync, and the proof that it arrived                           (orchestration/training_source.py)
log:      metrics, alerts and samples to every sink                            (observability/monitor.py)
steps:    between two steps, the checkpoint and the evaluation that are due    (run/session.py)

A session that lost a worker is opened again from the newest checkpoint (run/held_run.py).
"""

from __future__ import annotations

from pathlib import Path

from megatron_stare.config.schema import Config
from megatron_stare.observability.monitor import Monitor
from megatron_stare.observability.sink import RunOutline
from megatron_stare.run.held_run import HeldRun
from megatron_stare.run.opening import Inputs, check_dump_step, finished_run, read_inputs
from megatron_stare.run.session import Session


def train(config: Config, *, resume: bool = False, dump_step: int | None = None) -> Path:
    """Trains, and returns the run directory.

    Args:
        resume: continue the newest checkpoint of the run.
        dump_step: the step of whose first update batch, weights, loss and gradients are written out; None: no step.

    Raises:
        UserError: something the user can mend; the last checkpoint is intact.
    """
    inputs = read_inputs(config)
    if resume and (finished := finished_run(inputs.config)):
        check_dump_step(inputs.config, dump_step, inputs.config.run.steps)
        print(f"all {inputs.config.run.steps} steps of this run are made already; give run.steps=... to go on")
        Monitor(inputs.sinks, RunOutline(finished, inputs.config)).finish()
        return finished
    with HeldRun(config, inputs, resume=resume, dump_step=dump_step) as held:
        return held.until_done(inputs, lambda inputs: make_steps(inputs, held, dump_step))


def make_steps(inputs: Inputs, held: HeldRun, dump_step: int | None) -> Path:
    """One session: all the steps that are still to do. Returns the run directory."""
    with Session(inputs, held, dump_step=dump_step) as run:
        run.rollouts.publish(run.trainer.weights(), run.state.step)
        for step in run.steps():
            batch = run.rollouts.next(step)
            result = run.trainer.step(batch)
            run.rollouts.publish(run.trainer.weights(), step)
            run.monitor.log(step, batch, result)
        run.finish()
        return run.dir.path
