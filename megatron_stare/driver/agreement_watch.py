"""Checks in every step that the engines and the trainer compute the same log-probs. Stops the run
if the log-probs differ too much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_stare.cluster.trainer_group import TrainerGroup
from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.observability.metrics.conditions import TREND_FLOOR, Window
from megatron_stare.observability.metrics.rules import RULES, said
from megatron_stare.records.metric import Metric
from megatron_stare.rollout.agreement.agreement import (
    AgreementError,
    agreement_metrics,
    canary_batch,
    canary_verdict,
    require_agreement,
    rollout_verdict,
    summary,
)
from megatron_stare.rollout.agreement.limits import Limits
from megatron_stare.rollout.engines.model_folder import load_tokenizer
from megatron_stare.rollout.fleet.engine_pool import EnginePool

METRICS = (
    Metric(
        "agreement/trend",
        "ratio",
        "16 bits: median of agreement/mean over the newest agreement.window steps, divided by the"
        " median over the run's first",
        "below 2 (alert); agreement.trend stops the run",
    ),
)


# Fixed texts. Every server and the trainer compute their log-probs after each weight sync.
CANARY = Path(__file__).with_name("canary.txt")
LONGEST = 64  # tokens of the canary's longest sequence
CANARY_SEED = 20261121
ROUTING = (
    "for a mixture of experts, suspect routing first: engine and trainer choose a token's experts"
    " by logits that round differently; with moe.routing_replay=true, the trainer uses the"
    " engine's choice"
)


class AgreementWatch:
    """Compares the log-probs of engines and trainer after every weight sync and after every
    log-prob pass.

    AgreementWatch logs no metrics for an in-process engine in float32, because the metrics of the
    update already contain the log-prob difference. The limit on the log-prob difference applies
    even if no metrics are logged.
    """

    def __init__(self, run: ResolvedRun, trainers: TrainerGroup, engines: EnginePool) -> None:
        config = run.config
        self._limits = Limits.of(config)
        self._logged = engines.served or self._limits.coarse
        # Without the log-prob pass only the canary can be compared.
        self._has_log_probs = not config.skips_log_prob_pass
        self._trainers, self._engines = trainers, engines
        self._temperature = config.rollout.temperature
        self._older = bool(config.rollout.staleness) or config.partial.tokens is not None
        self._routes_apart = run.shape.experts > 0 and not config.moe.routing_replay
        self._means = Window(config.agreement.window, first=config.agreement.window)
        self._newest: dict[str, float] = {}
        self._sequences: list[list[int]] = []
        if engines.served and config.sglang.canary_prompts:
            longest = min(LONGEST, config.rollout.max_prompt_tokens + config.rollout.max_new_tokens)
            tokenizer = load_tokenizer(config.model.path)
            self._sequences = canary_sequences(
                tokenizer, run.shape.vocab_size, config.sglang.canary_prompts, longest
            )

    def lift_limits(self) -> None:
        """Removes the limits on the log-prob differences, so that the run continues even if the
        log-probs of engines and trainer differ widely."""
        self._limits = self._limits.lifted()

    def restore(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Adds the mean log-prob differences of earlier steps to the trend, so that the trend of a
        resumed run covers the whole run. Skips a step if some tokens of the step's batch were
        sampled with weights that were older than the weights at the start of the step.
        `after_log_probs` skips the same steps. `rows` contains the metrics of the earlier steps,
        oldest first."""
        for row in rows:
            ages = {name for name in row if name.startswith("agreement/max_of_age_")}
            if self._older and ages - {"agreement/max_of_age_1"}:
                continue
            if "agreement/mean" in row:
                self._means.add(row["agreement/mean"])

    def after_sync(self) -> None:
        """Compares every server's log-probs of the canary with the trainer's log-probs of the
        canary.

        Raises:
            AgreementError: the log-probs differ by more than the limit. The message names the
                likely cause.
        """
        if not self._sequences:
            return
        by_engine = self._engines.prompt_log_probs(self._sequences)
        log_probs = torch.tensor(
            [[x for sequence in found for x in sequence] for found in by_engine.values()]
        )
        differences = self._trainers.compare_with(canary_batch(self._sequences), log_probs, 1.0)
        self._newest = summary(differences)
        if verdict := canary_verdict(differences, self._limits, list(by_engine)):
            passed = next(filter(None, map(self._limits.canary_passed, differences)))
            require_agreement("log-probs of the canary", passed, verdict, "weight sync")

    def after_log_probs(self, step: int) -> dict[str, float]:
        """Returns the agreement metrics of the rollout batch and of the newest comparison on the
        canary.

        The limits do not apply to the log-probs of a batch that contains tokens sampled with older
        weights. The limits on the canary's log-probs are checked after every weight sync.

        Raises:
            AgreementError: the log-probs differ by more than a limit, or the difference keeps
                growing. If a limit is passed, the message names the likely cause.
        """
        if not self._has_log_probs:
            return dict(self._newest)
        sampled, where = self._trainers.compare(), f"step {step}"
        # log-probs under older weights differ because the policy changed, so they are not judged
        if self._older and set(sampled.of_version) - {step - 1}:
            return {**agreement_metrics(sampled, step), **self._newest} if self._logged else {}
        if passed := self._limits.passed(sampled):
            verdict = rollout_verdict(
                sampled, self._trainers.compare(1.0), self._temperature, self._limits
            )
            if self._routes_apart:
                verdict = f"{ROUTING}; else {verdict}"
            require_agreement("log-probs of sampled tokens", passed, verdict, where)
        if not self._logged:
            return {}
        metrics = agreement_metrics(sampled, step)
        if self._limits.coarse and sampled.everywhere.tokens:
            self._means.add(sampled.everywhere.mean)
            if (growth := self._means.growth()) is not None:
                metrics["agreement/trend"] = growth
            require_steady(metrics, self._limits, where)
        return {**metrics, **self._newest}


def require_steady(metrics: Mapping[str, float], limits: Limits, where: str) -> None:
    """Applies the rule "engine and trainer too far apart" to the metrics of a step.

    Args:
        metrics: metrics of the step, including `agreement/mean` and `agreement/trend` if they are
            known.

    Raises:
        AgreementError: the mean difference has grown past its limit over the run.
    """
    rule = RULES["engine and trainer too far apart"]
    if limits.trend is None:
        return
    when = rule.given(times=limits.trend, least=TREND_FLOOR * limits.bounds["mean"])
    if (found := when.judge(metrics, when.window())).holds:
        fix = "mend that, or raise agreement.trend where the growth is known to be harmless"
        raise AgreementError(said(rule.error, metrics, found), where=where, fix=fix)


def canary_sequences(
    tokenizer: Any, vocab_size: int, sequences: int, longest: int
) -> list[list[int]]:
    """Returns the canary, which is a list of fixed token sequences. The sequences have different
    lengths of up to `longest` tokens. Two runs use the same sequences if both runs have the same
    model and the same settings.

    The sequences are made from a text that ships with the package. Lines that the tokenizer cannot
    encode and decode without loss are left out. Each sequence begins at a different line of the
    text. If all lines of the text are left out, the sequences consist of random token ids, which
    are drawn with a fixed seed.

    Args:
        vocab_size: vocabulary size of the model. A token id that is not below `vocab_size` would
            crash a server.
    """
    lengths = torch.linspace(longest, max(2, longest // 4), sequences).long().tolist()
    lines = [
        ids
        for line in CANARY.read_text().splitlines()
        if (ids := _spelled(tokenizer, line, vocab_size))
    ]
    if not lines:
        generator = torch.Generator().manual_seed(CANARY_SEED)
        return [
            torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths
        ]
    found = []
    for number, length in enumerate(lengths):
        sequence: list[int] = []
        while len(sequence) < length:
            sequence += lines[number % len(lines)]
            number += 1
        found.append(sequence[:length])
    return found


def _spelled(tokenizer: Any, line: str, vocab_size: int) -> list[int]:
    """Returns the token ids of a line, without special tokens. Returns [] if the line has no
    tokens, if the decoded tokens differ from the line in more than white space, or if a token id is
    `vocab_size` or larger."""
    ids = tokenizer(line, add_special_tokens=False).input_ids
    text = tokenizer.decode(ids)
    # compared without white space: some tokenizers put spaces between tokens
    same = "".join(text.split()) == "".join(line.split())
    return ids if same and ids and max(ids) < vocab_size else []
