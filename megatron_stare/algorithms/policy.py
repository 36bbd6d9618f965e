"""Defines PolicyGradient, the base class with the settings and the add-ons that all policy-gradient
methods share. Filters run before the statistics are computed. Add-ons change the rewards or add
terms to the policy loss.

A subclass must define `policy_loss`, and can define `filters`, `asks` and `control`. The add-ons of
this file (truncation, length penalties, importance correction, KL to a reference, entropy bonus)
work with every subclass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megatron_stare.algorithms.advantage import group_advantages
from megatron_stare.algorithms.aggregate import BY_CONSTANT, PER_SEQUENCE, Aggregation, coefficients
from megatron_stare.algorithms.correction import Correction
from megatron_stare.algorithms.entropy_bonus import COEF, USED, EntropyBonus
from megatron_stare.algorithms.filters import Filter, Narrowed, narrow
from megatron_stare.algorithms.kl import ReferenceKl, kl_estimate
from megatron_stare.algorithms.method import Method, State, TokenTerms
from megatron_stare.algorithms.shaping import LengthPenalty, Overlong, Truncated, informative_groups
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import (
    Count,
    Request,
    SegmentSum,
    Statistics,
    scalar,
    tensor,
)
from megatron_stare.records.metric import Metric
from megatron_stare.records.rollout_batch import RolloutBatch

METRICS = (
    Metric(
        "loss/tokens",
        "tokens",
        "N, the divisor of the loss: tokens that carry loss and that no filter removed",
        "near the sum of the response lengths",
    ),
    Metric(
        "loss/kept",
        "share",
        "tokens that keep their loss after the filters",
        "near 1 for corrections; algorithm.share for 20-Entropy",
    ),
    Metric(
        "correction/weight",
        "factor",
        "mean importance weight, trainer probability over engine probability",
        "near 1; far from 1: engine and trainer differ, or samples come from old weights",
    ),
    Metric(
        "reference/kl",
        "nats",
        "mean estimate of the KL to the reference policy",
        "below some tenths; rises with the distance trained",
    ),
    Metric(
        "entropy_bonus/used",
        "factor",
        "coefficient of the entropy bonus in this step's loss",
        "0 to coef_max of algorithm.entropy_bonus",
    ),
    Metric(
        "entropy_bonus/coef",
        "factor",
        "coefficient that the next step may use",
        "long at coef_max: the bonus cannot hold the entropy",
    ),
)


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Method):
    """Settings of every policy-gradient method.

    `aggregation`: the rule that turns token losses into one number (see aggregate.py).
    `length_norm`: the constant L_max, in tokens, of the two 'dr_grpo' aggregations.
    `truncated`: the treatment of responses that are cut off at the length limit (see shaping.py).
    `equal_groups`: the treatment of prompt groups in which all rewards are equal. 'keep' treats
        these prompt groups like all other prompt groups: the loss, its divisor N and the mean
        entropies include the tokens of these groups. 'mask' excludes the tokens of these prompt
        groups from the loss, from its divisor N and from the mean entropies. The setting 'mask'
        acts like Skywork-OR1's code, which drops prompt groups with equal rewards and does not
        refill the batch.
    `overlong`: DAPO's soft overlong punishment, or null.
    `length_penalty`: Group Relative Overlong Punishment (GROP), or null.
    `correction`: the importance correction from the rollout policy to the training policy, or null.
    `reference_kl`: the loss term with the KL to a reference policy, or null.
    `entropy_bonus`: the entropy bonus, or null. The entropy bonus has either a fixed coefficient or
        a target entropy.
    """

    aggregation: Aggregation = "token_mean"
    length_norm: int | None = None
    truncated: Truncated = "keep"
    equal_groups: Literal["keep", "mask"] = "keep"
    overlong: Overlong | None = None
    length_penalty: LengthPenalty | None = None
    correction: Correction | None = None
    reference_kl: ReferenceKl | None = None
    entropy_bonus: EntropyBonus | None = None

    def __post_init__(self) -> None:
        by_constant = self.aggregation in BY_CONSTANT
        if by_constant != (self.length_norm is not None):
            need = (
                "needs length_norm"
                if by_constant
                else "does not use length_norm; set length_norm=null"
            )
            raise ValueError(f"aggregation {self.aggregation} {need}")
        if self.length_norm is not None and self.length_norm < 1:
            raise ValueError("length_norm must be at least 1 token")
        if self.overlong is not None and self.length_penalty is not None:
            raise ValueError(
                "overlong and length_penalty both punish length; set one of them to null"
            )
        if any(each.leaves_count for each in self.filters()) and by_constant:
            raise ValueError(
                f"aggregation {self.aggregation} divides by a constant, so tokens cannot leave the"
                " denominator: use token_mean or sequence_mean, denominator all, or a correction"
                " with mode icepop"
            )

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_bonus is not None

    @property
    def needs_reference(self) -> bool:
        return self.reference_kl is not None and self.reference_kl.coef > 0

    @property
    def reads_log_prob_pass(self) -> str | None:
        """Returns the reason why an add-on needs the log-prob pass, or None if no add-on needs the
        pass (see Method). A subclass must override this property if the subclass's own loss needs
        the log-prob pass."""
        if self.correction is not None:
            return (
                "the importance correction compares old log-probs with the engine's before the loss"
            )
        if self.needs_reference:
            return "the reference policy passes beside the log-prob pass"
        if self.entropy_bonus is not None and self.entropy_bonus.target is not None:
            return (
                "entropy_bonus.target is steered by the log-prob pass, and acts a step late already"
            )
        return None

    def carries_loss(self, batch: RolloutBatch) -> Tensor:
        carries = batch.verified if self.truncated == "keep" else batch.verified & ~batch.truncated
        if self.equal_groups == "keep":
            return carries
        return (
            carries
            & informative_groups(batch.rewards, batch.groups, self.baseline_mask(batch))[
                batch.groups
            ]
        )

    def baseline_mask(self, batch: RolloutBatch) -> Tensor:
        return batch.verified & ~batch.truncated if self.truncated == "drop" else batch.verified

    def shaped_rewards(self, batch: RolloutBatch) -> Tensor:
        if self.overlong is not None:
            return batch.rewards + self.overlong.penalty(batch.response_lengths)
        if self.length_penalty is not None:
            correct = batch.rewards >= self.length_penalty.correct_from
            counted = self.baseline_mask(batch)
            return batch.rewards + self.length_penalty.penalty(
                batch.response_lengths, correct, batch.groups, counted
            )
        return batch.rewards

    def advantages(self, rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
        return group_advantages(rewards, groups, counted)

    def initial_state(self) -> dict[str, float]:
        return self.entropy_bonus.initial_state() if self.entropy_bonus is not None else {}

    def filters(self) -> tuple[Filter, ...]:
        """Returns the filters that remove tokens from the loss, in the order in which they are
        applied."""
        return (self.correction,) if self.correction is not None else ()

    def narrowed(self, batch: TokenBatch, known: Statistics) -> Narrowed:
        return narrow(self.filters(), batch, known)

    def requests(self, batch: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        narrowed = self.narrowed(batch, known)
        asked = narrowed.asked
        if self.entropy_bonus is not None:
            asked |= self.entropy_bonus.requests(batch)
        if not narrowed.complete:
            return asked
        asked["tokens"] = Count(narrowed.counted)
        if self.filters() and self.aggregation in PER_SEQUENCE:
            assert batch.sequence_lengths is not None
            number = batch.sequence_lengths.shape[0]
            asked["lengths"] = SegmentSum(
                narrowed.counted, batch.sequence, number, narrowed.counted
            )
        if self.correction is not None:
            asked |= self.correction.final_requests(narrowed.kept, known)
        if self.filters():  # without filters it equals "tokens"
            asked["with_loss"] = Count(self.with_loss(batch, narrowed, known))
        return asked | dict(self.asks(batch, narrowed.kept, known))

    def asks(self, batch: TokenBatch, kept: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        """Returns the method's own requests for statistics. The requests of the filters and of the
        add-ons are not included. The argument `kept` is a copy of `batch` whose loss mask excludes
        all tokens that the filters removed."""
        return {}

    def with_loss(self, batch: TokenBatch, narrowed: Narrowed, known: Statistics) -> Tensor:
        """Returns a bool tensor [N] that is True for every token that contributes to the loss. A
        token has a policy loss if the filters kept the token and the token's correction weight is
        above 0.

        If the loss has neither a KL term nor an entropy bonus, only tokens with a policy loss
        contribute to the loss. If the loss has a KL term or an entropy bonus, every token that the
        denominator of the loss counts contributes to the loss, because both terms also apply to
        tokens without a policy loss.
        """
        if self.needs_reference or self.entropy_bonus is not None:
            return narrowed.counted
        if self.correction is None:
            return narrowed.kept.loss_mask
        return narrowed.kept.loss_mask & (self.correction.plain_weights(batch, known) > 0)

    def empty(self, statistics: Statistics) -> Tensor:
        return scalar(statistics, "with_loss" if self.filters() else "tokens") == 0

    def control(self, state: State, statistics: Statistics) -> State:
        return (
            self.entropy_bonus.control(state, statistics)
            if self.entropy_bonus is not None
            else state
        )

    @abstractmethod
    def policy_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        """Returns one policy loss per token, [N], without the importance correction, the KL term
        and the entropy bonus. Only the losses of the tokens that the filters kept are used."""

    def token_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        kept = self.narrowed(batch, statistics).kept
        terms = self.policy_loss(kept, statistics, state)
        loss, shares = terms.loss, dict(terms.shares)
        if self.correction is not None:
            weight = self.correction.weights(batch, statistics)
            loss, shares["correction/weight"] = loss * weight, weight
        if self.filters():
            loss = torch.where(kept.loss_mask, loss, 0.0)
            shares["loss/kept"] = kept.loss_mask
        if self.reference_kl is not None and self.needs_reference:
            kl = kl_estimate(
                batch.log_prob,
                _given(batch.reference_log_prob, "log-prob"),
                self.reference_kl.estimator,
            )
            loss, shares["reference/kl"] = loss + self.reference_kl.coef * kl, kl.detach()
        if self.entropy_bonus is not None:
            entropy = _given(batch.current_entropy, "entropy with gradient")
            loss = loss - state[USED].to(loss.dtype) * entropy
        return replace(terms, loss=loss, shares=shares)

    def coefficients(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        lengths = tensor(statistics, "lengths") if "lengths" in statistics else None
        return coefficients(
            replace(batch, loss_mask=self.narrowed(batch, statistics).counted),
            self.aggregation,
            scalar(statistics, "tokens"),
            lengths=lengths,
            length_norm=self.length_norm,
        )

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        logged: dict[str, Tensor | float] = {"loss/tokens": scalar(statistics, "tokens")}
        if self.entropy_bonus is not None:
            logged["entropy_bonus/used"], logged["entropy_bonus/coef"] = state[USED], state[COEF]
        return logged


def _given(value: Tensor | None, what: str) -> Tensor:
    if value is None:
        raise ValueError(f"the method needs the {what} of every token, and the trainer gave none")
    return value
