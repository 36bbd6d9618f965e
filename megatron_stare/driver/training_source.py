"""Wraps a rollout source. The wrapper adds advantages to batches, verifies each weight sync, and
offloads engines that share devices with the trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from megatron_stare.cluster.colocation import Colocation
from megatron_stare.driver.agreement_watch import AgreementWatch
from megatron_stare.process.interruption import ENDING, is_asked_to_end, open_to
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.rollout.sources.rollout_source import RolloutSource
from megatron_stare.weights.sync.target import WeightStream


class TrainingSource(RolloutSource):
    """Wraps a rollout source, and does the work that only training needs, such as the computation
    of advantages.

    Args:
        source: produces the batches.
        judge: the only function that computes advantages from rewards.
        phase: opens a phase of the step, by name.
        published: called with the version of the weights that have been published.
        looking: context in which the pending checkpoint is completed; see Checkpoints.looking.
    """

    def __init__(
        self,
        source: RolloutSource,
        judge: Callable[[RolloutBatch], RolloutBatch],
        colocation: Colocation,
        agreement: AgreementWatch,
        phase: Callable[[str], AbstractContextManager[None]],
        published: Callable[[int], None],
        looking: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._source, self._judge = source, judge
        self._colocation, self._agreement = colocation, agreement
        self._phase, self._published, self._looking = phase, published, looking

    def next(self, step: int) -> RolloutBatch:
        """See RolloutSource. The returned batch contains advantages. If a signal interrupts `next`,
        the run's state stays at the previous step."""
        with self._phase("rollout"), open_to(*ENDING):
            with self._looking():
                batch = self._source.next(step)
            return self._judge(batch)

    def publish(self, weights: WeightStream, version: int) -> None:
        """See RolloutSource. If the driver has received a signal that ends the run, the weight sync
        is skipped, because the run will sample no more responses.

        Raises:
            AgreementError: the engines do not compute with the published weights.
        """
        if not is_asked_to_end():
            with self._phase("sync"):
                with self._colocation.syncing():
                    self._source.publish(weights, version)
                self._agreement.after_sync()
                self._colocation.synced()
        self._published(version)

    def state(self) -> dict[str, int]:
        return self._source.state()

    def quiet(self) -> AbstractContextManager[None]:
        return self._source.quiet()

    def close(self) -> None:
        self._source.close()
