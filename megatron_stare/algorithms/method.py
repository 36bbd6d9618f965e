"""The contract between a method and the trainer.

A step goes: `judge` gives the responses their advantages (rollout batch, once, by the driver) ->
log-prob pass -> `requests`, answered over all ranks -> `control` updates the method's state, once
-> for every mini-batch `requests`, answered over that alone, then `token_loss` and `coefficients`,
micro-batch by micro-batch. The training loss is the sum over tokens of coefficient times token
loss. Shape legend: B samples, N response positions at hand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_stare.algorithms.token_sets import TokenSet
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Count, Request, Statistics, scalar
from megatron_stare.records.rollout_batch import RolloutBatch

State = dict[str, Tensor]  # 0-dim float64 tensors: what a method remembers from step to step


@dataclass(frozen=True)
class TokenTerms:
    """`loss` [N], one value a token before aggregation; `shares` [N]: logged as means over the loss
    tokens."""

    loss: Tensor
    shares: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A policy-optimisation method; the fields of a subclass are its settings in YAML."""

    # token: a token's loss depends on its own log-prob alone; sequence: on its whole response
    coupling: ClassVar[Literal["token", "sequence"]] = "token"

    @property
    def needs_entropy_gradient(self) -> bool:
        """Tells whether the training pass must give `TokenBatch.current_entropy`, with gradient."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Tells whether the reference policy must compute log-probs of the batch
        (`TokenBatch.reference_log_prob`)."""
        return False

    @property
    def reads_log_prob_pass(self) -> str | None:
        """Reason why the method needs old log-probs or entropies beside its gate, a sentence; None:
        it needs neither.

        Only with None may a run skip the log-prob pass (`statistics.gate: lagged`). Then there is
        one update a rollout batch; `requests` finds NaN for both, and `control` moves the state
        after the training pass, which gives them; in `token_loss` the old log-prob is the current
        one, detached.
        """
        return f"{type(self).__name__} does not say that it can do without the log-prob pass"

    @property
    def selects(self) -> tuple[TokenSet, ...]:
        """The sets of tokens that `selected` tells apart; diagnostics name them."""
        return ()

    def carries_loss(self, batch: RolloutBatch) -> Tensor:
        """[B] bool: the responses whose tokens of the loss mask carry loss; the others leave N and
        every quantile."""
        return batch.verified

    def baseline_mask(self, batch: RolloutBatch) -> Tensor:
        """[B] bool: the responses that the advantages of the others are measured against."""
        return batch.verified

    def shaped_rewards(self, batch: RolloutBatch) -> Tensor:
        """[B] float64 rewards with length penalties added."""
        return batch.rewards

    def judge(self, batch: RolloutBatch) -> RolloutBatch:
        """A rewarded rollout batch with its advantages, which responses carry loss, and what
        shaping added.

        The one place where these are computed: every rank reads them as columns.
        """
        shaped, judged_against = self.shaped_rewards(batch), self.baseline_mask(batch)
        return replace(
            batch,
            advantages=self.advantages(shaped, batch.groups, judged_against),
            carries_loss=self.carries_loss(batch),
            baseline_mask=judged_against,
            penalties=shaped - batch.rewards,
        )

    @abstractmethod
    def advantages(self, rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
        """[B] advantages from rewards [B], prompt-group numbers [B] and which samples count [B]."""

    def initial_state(self) -> dict[str, float]:
        """State before the first step, by name; every checkpoint holds the state."""
        return {}

    def requests(self, batch: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        """The statistics that the method needs, of the rollout batch for `control`, of a mini-batch
        for the loss.

        Asked again while it names new ones, so that a request may build on answers in `known`.
        `tokens`, the number of positions that carry loss, is what `coefficients` divides by.
        """
        return {"tokens": Count(batch.loss_mask)}

    def control(self, state: State, statistics: Statistics) -> State:
        """The state this step uses and the next one starts from, by the rollout batch's statistics.
        No host synchronisation."""
        return state

    @abstractmethod
    def token_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        """Loss of every position, purely local; differentiable through batch.log_prob."""

    @abstractmethod
    def coefficients(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        """[N] what every token's loss is multiplied by before summing; 0 outside
        batch.loss_mask."""

    def selected(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        """[N] int8, for people who read responses and for diagnostics: which of the sets that the
        method `selects` a token is in. 1 in L+, the rare ones of positive advantage, -1 in L-, of
        negative advantage; 2 in U+ and -2 in U-, the common ones; 0 elsewhere, and for methods that
        pick none."""
        return torch.zeros_like(batch.loss_mask, dtype=torch.int8)

    def empty(self, statistics: Statistics) -> Tensor:
        """0-dim bool: no token of the mini-batch has a loss, by the statistics of all its tokens.
        There is no optimizer step then: it would follow momentum and weight decay alone."""
        return scalar(statistics, "tokens") == 0

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        """Scalars to log, by name; tensors are 0-dim and stay on the device until the end of the
        step."""
        return {}
