"""Batches that are sampled when they are asked for, from the newest weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_stare.process.interruption import run_whole
from megatron_stare.records.batch import SamplingParams
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.rollout.sources.ages import Ages
from megatron_stare.rollout.sources.rollout_source import (
    GroupSampling,
    Progress,
    Rollouts,
    RolloutSource,
    training_params,
)
from megatron_stare.rollout.sources.turns import check_versions
from megatron_stare.weights.sync.target import WeightStream


class SynchronousSource(RolloutSource):
    """Samples a step's batch when it is asked for, from the weights that were published last.

    Args:
        groups: takes prompts, and says which of their trajectories a step trains on.
        sampling: for a step's number, how its trajectories are sampled.
        prompts: the state of the stream that `groups` takes them from.
        idle: called when a batch is made and the engines have nothing to do until the next
            `publish`.
        ages: of a run that trains on tokens of older weights too; None: every token is of the
            newest.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        groups: GroupSampling,
        sampling: Callable[[int], SamplingParams],
        prompts: Callable[[], dict[str, int]],
        progress: Progress = lambda *_: None,
        idle: Callable[[], None] = lambda: None,
        ages: Ages | None = None,
    ) -> None:
        self._rollouts, self._groups, self._ages = rollouts, groups, ages
        self._sampling = sampling
        self._prompts = prompts
        self._progress = progress
        self._idle = idle
        self.version = -1  # of the newest weights
        self.metrics: Mapping[str, float] = {}  # of the last batch

    def next(self, step: int) -> RolloutBatch:
        """See RolloutSource. Waits for the step's last verdict; unblocked by it, or by the first
        error.

        Raises:
            WeightVersionError: a token was sampled by other weights than it may be.
            ValueError: greedily, or from a part of the vocabulary; the loss takes the policy for
                what was sampled from.
        """
        params = training_params(self._sampling(step))
        collected = run_whole(
            lambda: self._groups.collect(self._rollouts, params, self._progress, lambda: None)
        )
        if self._ages is None:
            check_versions(collected.trajectories, self.version)
            self.metrics = collected.metrics
        else:
            self.metrics = {**collected.metrics, **self._ages.settle(collected.trajectories, step)}
        self._idle()
        return RolloutBatch.from_trajectories(collected.trajectories, step)

    def publish(self, weights: WeightStream, version: int) -> None:
        self._rollouts.pool.update_weights(version, weights)
        self.version = version

    def state(self) -> dict[str, int]:
        return self._prompts()
