"""Watches that the engine's servers and the trainer compute the same log-probs in every step; stops the run if not."""

from __future__ import annotations

from megatron_stare.batch import RolloutBatch
from megatron_stare.config.schema import Config
from megatron_stare.orchestration.groups import TrainerGroup
from megatron_stare.rollout.agreement import (
    CANARY_TOKENS,
    agreement_metrics,
    canary_batch,
    canary_differences,
    canary_verdict,
    limit_of,
    require_agreement,
    rollout_difference,
    rollout_verdict,
    summary,
)
from megatron_stare.rollout.pool import EnginePool
from megatron_stare.weights.shape import read_shape


class AgreementWatch:
    """Compares after every weight sync and every log-prob pass. Silent where rollouts do not come from servers: for
    an engine in process the metrics of the update say how far its log-probs are off."""

    def __init__(self, config: Config, trainers: TrainerGroup, engines: EnginePool) -> None:
        self._on = engines.served
        # without the log-prob pass there is nothing to compare rollouts with, and the canary alone watches
        self._has_scores = not config.skips_log_prob_pass
        self._trainers, self._engines = trainers, engines
        self._temperature = config.rollout.temperature
        self._limit = limit_of(config.sglang.agreement_limit, config.model.dtype)
        longest = min(CANARY_TOKENS, config.rollout.max_prompt_tokens + config.rollout.max_new_tokens)
        vocab_size = read_shape(config.model.path).vocab_size
        self._canary = canary_batch(vocab_size, config.sglang.canary_prompts, longest)
        self._newest: dict[str, float] = {}

    def after_sync(self) -> None:
        """Has the canary scored by every server and by the trainer.

        Raises:
            AgreementError: they differ by more than the limit; says what is to blame.
        """
        if not self._on or not self._canary.size:
            return
        sequences = [part.tolist() for part in self._canary.tokens.split(self._canary.lengths.tolist())]
        differences = canary_differences(
            self._canary, self._trainers.log_probs(self._canary, 1.0), self._engines.prompt_log_probs(sequences)
        )
        self._newest = dict(summary(differences))
        if verdict := canary_verdict(differences, self._limit):
            largest = max((d.largest for d in differences), key=lambda x: (x != x, x))  # NaN is the largest
            require_agreement("log-probs of the canary", largest, self._limit, verdict, "weight sync")

    def after_score(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """The metrics of a rollout batch that the trainer has just scored, and of the canary before it.

        Raises:
            AgreementError: a token's log-probs differ by more than the limit; says what is to blame.
        """
        if not self._on:
            return {}
        if not self._has_scores:
            return dict(self._newest)
        sampled = rollout_difference(batch, self._trainers.log_probs(batch))
        if not sampled.agrees(self._limit):
            unscaled = rollout_difference(batch, self._trainers.log_probs(batch, 1.0))
            verdict = rollout_verdict(sampled, unscaled, self._temperature, self._limit)
            require_agreement("log-probs of sampled tokens", sampled.largest, self._limit, verdict, f"step {step}")
        return {**agreement_metrics(sampled, batch.weight_versions[batch.sampled], step), **self._newest}
