"""Supplies demonstrations, that is, conversations to train on. Measures the loss on held-out
demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from megatron_stare.cluster.trainer_group import TrainerGroup
from megatron_stare.config.schema import Config
from megatron_stare.data.prompt_source import PromptQueue
from megatron_stare.driver.parts import Part
from megatron_stare.errors import DataError
from megatron_stare.process.interruption import ENDING, open_to
from megatron_stare.records.batch import Demonstration, Prompt
from megatron_stare.records.metric import Metric
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import NOT_SAMPLED, Trajectory
from megatron_stare.rollout.sources.rollout_source import RolloutSource
from megatron_stare.run_dir.run_state import RunState
from megatron_stare.weights.sync.target import WeightStream

METRICS = (
    Metric(
        "heldout/loss",
        "nats",
        "supervised fine-tuning: mean negative log-likelihood of the loss tokens of data.eval_path,"
        " after the step",
        "falls, then levels; rising again: the policy memorises the rows",
    ),
    Metric("time/held_out_s", "s", "supervised fine-tuning: the loss on held-out rows", "steady"),
    Metric("time/data_s", "s", "supervised fine-tuning: rendering the step's rows", "near 0"),
)


def batch_of(prompts: Sequence[Prompt], step: int = 0) -> RolloutBatch:
    """Returns the rollout batch that consists of the given demonstrations.

    Raises:
        DataError: a prompt is not a Demonstration, or has no response or no prompt tokens.
    """
    return RolloutBatch.from_trajectories(map(_trajectory, prompts), step)


def _trajectory(prompt: Prompt) -> Trajectory:
    if not isinstance(prompt, Demonstration) or not prompt.response or not prompt.token_ids:
        raise DataError(
            "a source of demonstrations gave a prompt without response or tokens", where=prompt.id
        )
    n = len(prompt.response)
    return Trajectory(
        prompt=prompt,
        sample_index=0,
        tokens=torch.tensor(prompt.response, dtype=torch.int32),
        log_probs=torch.zeros(n),
        loss_mask=torch.tensor(prompt.loss_mask, dtype=torch.bool),
        versions=((NOT_SAMPLED, n),),
        finish_reason="stop",
        text=prompt.written,
    )


class Demonstrations(RolloutSource):
    """Supplies batches of demonstrations. New weights are not sent anywhere, because no engine
    samples responses.

    Args:
        queue: queue of demonstrations, in the order of the run.
        rows: number of demonstrations per step.
        judge: fills the columns of a batch, as `Method.judge` does.
        phase: opens a phase of the step, by name.
        published: called with the number of each finished step.
    """

    def __init__(
        self,
        queue: PromptQueue,
        rows: int,
        judge: Callable[[RolloutBatch], RolloutBatch],
        phase: Callable[[str], AbstractContextManager[None]],
        published: Callable[[int], None],
    ) -> None:
        self._queue, self._rows, self._judge = queue, rows, judge
        self._phase, self._published = phase, published

    def next(self, step: int) -> RolloutBatch:
        """See RolloutSource."""
        with self._phase("data"), open_to(*ENDING):
            return self._judge(batch_of(self._queue.take(self._rows), step))

    def publish(self, weights: WeightStream, version: int) -> None:
        """Calls `published` with `version`, which is the number of the finished step. Does not use
        `weights`."""
        self._published(version)

    def state(self) -> dict[str, int]:
        return self._queue.state()


class HeldOutLoss(Part):
    """Logs the loss on held-out demonstrations every `eval.every` steps and after the last step.

    Args:
        prompts: the held-out demonstrations.
        state: state of the run. `state.step` is the number of the step that is being logged.
        phase: opens a phase of the step, by name.
    """

    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        ranks: TrainerGroup,
        state: RunState,
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._every, self._last = config.eval.every, config.run.steps
        self._batch, self._ranks, self._state, self._phase = batch_of(prompts), ranks, state, phase

    def before_steps(self, note: Callable[[str], None]) -> None:
        """Notes the loss before training. Does nothing if the run has already finished a step."""
        if self._state.step == 0:
            note(f"held-out loss before training: {self.loss():.4f} nats a token")

    def loss(self) -> float:
        """Returns the mean negative log-likelihood, in nats, that the policy assigns to the loss
        tokens."""
        with self._phase("held_out"):
            return self._ranks.mean_loss(self._batch)

    def metrics(self) -> Mapping[str, float]:
        step = self._state.step
        due = step == self._last or (self._every > 0 and step % self._every == 0)
        return {"heldout/loss": self.loss()} if due else {}
