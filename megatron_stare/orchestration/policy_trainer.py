"""What the trainer does with one rollout batch: passes, statistics, optimizer steps, a reference that moves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from megatron_stare.config.schema import Config
from megatron_stare.orchestration.agreement_watch import AgreementWatch
from megatron_stare.orchestration.groups import TrainerGroup, WeightStream
from megatron_stare.orchestration.updates import combined, skipped_after
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.run_state import RunState


class PolicyTrainer:
    """The policy in training, as the driver loop sees it.

    Args:
        ranks: that hold it.
        state: of the run; a step moves the method's part of it and the count of updates that were not taken.
        agreement: compares log-probs with the engines' once the ranks have theirs.
        phase: opens a phase of the step, by name.
        dump: the step of whose first update batch, weights, loss and gradients are written out, and the folder; None:
            of no step.
    """

    def __init__(
        self,
        config: Config,
        ranks: TrainerGroup,
        state: RunState,
        agreement: AgreementWatch,
        phase: Callable[[str], AbstractContextManager[None]],
        dump: tuple[int, Path] | None = None,
    ) -> None:
        self._config, self._ranks, self._state = config, ranks, state
        self._agreement, self._phase, self._dump = agreement, phase, dump

    def step(self, batch: RolloutBatch) -> dict[str, float]:
        """Trains on a judged rollout batch: log-prob and entropy pass, statistics, gate and weights, and for every
        mini-batch forward and backward of the weighted loss and an optimizer step.

        Returns:
            The step's metrics.

        Raises:
            NonFiniteError: several gradients in a row were not finite.
            AgreementError: engines and trainer differ by more than the limit.
        """
        every = self._config.model.reference_refresh_every
        with self._phase("log_probs"):
            self._ranks.compute_log_probs(batch)
            agreement = self._agreement.after_log_probs(batch.step)
            self._ranks.measure(self._state.method)
        with self._phase("update"):
            dump_to = str(self._dump[1].resolve()) if self._dump and self._dump[0] == batch.step else None
            updates = [self._ranks.update(0, dump_to)]
            updates += [self._ranks.update(number) for number in range(1, self._config.batch.updates)]
            if every and batch.step % every == 0:
                self._ranks.refresh_reference()
        self._state.method = updates[-1].state
        self._state.skipped = skipped_after(updates, self._state.skipped, batch.step)
        return combined(updates) | agreement

    def weights(self) -> WeightStream:
        """The policy's tensors by Hugging Face name, as buckets the engines can take."""
        return self._ranks.export()
