"""Trains on one rollout batch. A training step consists of the log-prob pass, the statistics, the
optimizer steps, and the refresh of the reference policy."""

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
    """Driver-side interface to the policy that is being trained.

    Args:
        ranks: the ranks that hold the policy.
        state: state of the run. A training step changes the method's state and the count of skipped
            updates.
        agreement: compares the log-probs of engines and trainer after the log-prob pass.
        phase: opens a phase of the step, by name.
        dump: number of a step, and a folder. The batch, weights, loss and gradients of this step's
            first update are written to the folder.
        texts: returns the texts of token ids; None: no tokens are logged.
        guards: guards that judge every step; None: the run has no guards.
        events: folder for the batches of steps with a non-finite update and of steps at which a
            guard ends or rolls back the run. None: no batch is written.
        profiled: opens the profiler for the step with the given number.
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
        """Trains on a rollout batch that already has advantages, and returns the step's metrics.

        The log-prob pass computes log-probs and entropies. The ranks then use the log-probs and the
        entropies to compute the statistics, the gate and the token weights. For every mini-batch,
        the ranks compute the gradient of the weighted loss and take an optimizer step.

        Raises:
            NonFiniteError: the loss or the gradient was non-finite in several consecutive updates.
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
        """Runs the log-prob pass and all updates of a step. Returns the results of the updates, and
        the metrics on the agreement of engines and trainer."""
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
                # write the ranks' numbers out before the next update overwrites them
                if not updates[-1].finite:
                    self._keep(
                        batch, f"loss or gradient of update {number} is not finite", by_rank=True
                    )
                if updates[-1].held:  # later mini-batches are not trained without this update
                    break
            if watched:
                self._note_tokens(batch, watched)
            if every and batch.step % every == 0:
                self._ranks.refresh_reference()
        return updates, dict(agreement)

    def _judge(
        self, guards: Guards, batch: RolloutBatch, metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Returns the guards' metrics. If a guard ends or rolls back the run, this function also
        writes the batch to disk."""
        cursors = sorted({trajectory.prompt.cursor for trajectory in batch.trajectories})
        found = guards.judge(batch.step, metrics, cursors)
        if ending := [each for each in guards.fired if each.action in ENDS]:
            self._keep(batch, "; ".join(each.text for each in ending))
        return found

    def _keep(self, batch: RolloutBatch, why: str, *, by_rank: bool = False) -> None:
        """Writes the batch of a bad step to disk. The setting `faults.guards.dumps` limits the
        number of steps whose batches are on disk. If the batches of other steps on disk already
        reach this limit, the batch is not written. Ignores write errors, such as a full disk.

        Args:
            by_rank: if true, also write the non-finite values that every rank finds.
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
        """Returns the indices of the samples for which the run logs values of every single token,
        such as the token's entropy. Returns [] in most steps."""
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
        """Returns a stream of the policy's tensors for the engines. The tensors have their Hugging
        Face names, and the stream sends them in buckets."""
        return self._ranks.export()
