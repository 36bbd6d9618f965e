"""Trains on one rollout batch: passes, statistics, optimizer steps, a reference that moves."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from safetensors import SafetensorError

from megatron_stare.cluster.trainer_group import TrainerGroup
from megatron_stare.config.schema import Config
from megatron_stare.driver.agreement_watch import AgreementWatch
from megatron_stare.driver.guards import ENDS, Guards, step_folder, write_guarded
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.token_numbers import of_responses, spread
from megatron_stare.records.updates import UpdateResult, combined, skipped_after
from megatron_stare.run_dir.run_state import RunState
from megatron_stare.weights.sync.target import WeightStream


class PolicyTrainer:
    """The policy in training, as the driver loop sees it.

    Args:
        ranks: that hold it.
        state: of the run; a step moves the method's part of it and the count of updates that were
            not taken.
        agreement: compares log-probs with the engines' once the ranks have theirs.
        phase: opens a phase of the step, by name.
        dump: the step of whose first update batch, weights, loss and gradients are written out, and
            the folder; None:
            of no step.
        texts: the text of every token of a response, from their ids; None: no response is written
            out by tokens.
        guards: say what is out of the ordinary in a step; None: the run has none.
        events: folder that batches of steps are written to which are not taken, or end the run;
            None: none is.
    """

    def __init__(
        self,
        config: Config,
        ranks: TrainerGroup,
        state: RunState,
        agreement: AgreementWatch,
        phase: Callable[[str], AbstractContextManager[None]],
        dump: tuple[int, Path] | None = None,
        texts: Callable[[Sequence[int]], Sequence[str]] | None = None,
        guards: Guards | None = None,
        events: Path | None = None,
        profiled: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self._config, self._ranks, self._state = config, ranks, state
        self._agreement, self._phase, self._texts, self._dump = agreement, phase, texts, dump
        self._guards, self._events, self._profiled = guards, events, profiled

    def step(self, batch: RolloutBatch) -> dict[str, float]:
        """Trains on a judged rollout batch: log-prob and entropy pass, statistics, gate and
        weights, and for every mini-batch forward and backward of the weighted loss and an optimizer
        step.

        Returns:
            The step's metrics.

        Raises:
            NonFiniteError: loss or gradient of several updates in a row was not finite.
            AgreementError: engines and trainer differ by more than the limit.
        """
        with self._profiled(batch.step):
            updates, agreement = self._train(batch)
        self._state.method = updates[-1].state
        most = self._config.faults.guards.not_finite
        self._state.skipped = skipped_after(updates, self._state.skipped, batch.step, most)
        metrics = combined(updates) | agreement
        return (
            metrics if self._guards is None else metrics | self._judge(self._guards, batch, metrics)
        )

    def _train(self, batch: RolloutBatch) -> tuple[list[UpdateResult], dict[str, float]]:
        """Has the ranks make the log-prob pass and all updates; returns the results of the updates
        and the metrics of agreement."""
        every = self._config.model.reference_refresh_every
        with self._phase("log_probs"):
            self._ranks.compute_log_probs(batch)
            agreement = self._agreement.after_log_probs(batch.step)
            self._ranks.measure(self._state.method)
        with self._phase("update"):
            dump_to = (
                str(self._dump[1].resolve()) if self._dump and self._dump[0] == batch.step else None
            )
            watched = self._watched(batch)
            limit = self._guards.norm_limit(agreement) if self._guards is not None else math.inf
            updates: list[UpdateResult] = []
            for number in range(self._config.batch.updates):
                updates.append(
                    self._ranks.update(number, None if number else dump_to, watched, limit)
                )
                # keep the ranks' numbers before the next update overwrites them
                if not updates[-1].finite:
                    self._keep(
                        batch, f"loss or gradient of update {number} is not finite", by_rank=True
                    )
                if updates[-1].held:  # nor would it be right to go on without it
                    break
            if watched:
                self._note_tokens(batch, watched)
            if every and batch.step % every == 0:
                self._ranks.refresh_reference()
        return updates, dict(agreement)

    def _judge(
        self, guards: Guards, batch: RolloutBatch, metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """The guards' metrics. A batch that ends the run, or is left out, is written down."""
        cursors = sorted({trajectory.prompt.cursor for trajectory in batch.trajectories})
        found = guards.judge(batch.step, metrics, cursors)
        if ending := [each for each in guards.fired if each.action in ENDS]:
            self._keep(batch, "; ".join(each.text for each in ending))
        return found

    def _keep(self, batch: RolloutBatch, why: str, *, by_rank: bool = False) -> None:
        """Writes the batch down, unless there are enough; a disk that has no room for it does not
        end the run.

        Args:
            by_rank: with what every rank finds not to be finite.
        """
        if self._events is None:
            return
        kept = [
            each
            for each in self._events.glob("step_*")
            if each != step_folder(self._events, batch.step)
        ]
        if len(kept) < self._config.faults.guards.dumps:
            ranks = self._ranks.not_finite() if by_rank else []
            with contextlib.suppress(OSError, SafetensorError):
                write_guarded(self._events, batch, self._ranks.log_probs(), why, ranks)

    def _watched(self, batch: RolloutBatch) -> list[int]:
        """The samples that are written out with the numbers of every token: none in most steps."""
        run = self._config.run
        if batch.step % run.rollouts_every or self._texts is None:
            return []
        written = spread(len(batch.trajectories), run.rollouts_kept)
        return [written[i] for i in spread(len(written), run.tokens_kept)]

    def _note_tokens(self, batch: RolloutBatch, watched: Sequence[int]) -> None:
        assert self._texts is not None
        masks = {sample: batch.trajectories[sample].loss_mask for sample in watched}
        for sample, numbers in of_responses(self._ranks.token_numbers(), masks).items():
            trajectory = batch.trajectories[sample]
            trajectory.numbers, trajectory.pieces = numbers, self._texts(trajectory.tokens.tolist())

    def weights(self) -> WeightStream:
        """The policy's tensors by Hugging Face name, as buckets the engines can take."""
        return self._ranks.export()
