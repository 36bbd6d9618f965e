"""Samples a batch from the newest weights when training requests the batch."""

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
    """Samples the batch of a step on request, from the most recently published weights.

    Args:
        groups: takes prompts and selects the trajectories that a step trains on.
        sampling: function that returns the sampling parameters of a step, given the step's number.
        prompts: function that returns the state of the stream from which `groups` takes prompts.
        idle: called after a batch is made, when the engines are idle until the next `publish`.
        ages: limits on token ages, for a run that also trains on tokens of older weights. If `ages`
            is None, every token must be sampled by the newest weights.
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
        """See RolloutSource. Waits until all responses of the step are verified. If an error
        occurs, `next` raises the first error.

        Raises:
            WeightVersionError: a token was sampled by weights that are not allowed.
            ValueError: sampling is greedy or truncated. The loss assumes sampling from the full
                policy.
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
