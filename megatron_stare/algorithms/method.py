"""The contract between a method and the trainer.

A training step:

1. The driver calls `judge`, which computes the advantages of the rollout batch.
2. The trainer runs the log-prob pass.
3. The trainer answers `requests` over all ranks; `control` updates the method's state.
4. For every mini-batch the trainer answers `requests` over that mini-batch alone, then calls
   `token_loss` and `coefficients` on each micro-batch.

The training loss is the sum over tokens of coefficient times token loss. Shape legend: B samples, N
response positions in the batch passed in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_stare.algorithms.token_sets import TokenSet
from megatron_stare.errors import DataError
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Count, Request, Statistics, scalar
from megatron_stare.records.rollout_batch import RolloutBatch

State = dict[str, Tensor]  # 0-dim float64 tensors that a method keeps from step to step


@dataclass(frozen=True)
class TokenTerms:
    """Token losses and values to log. `loss` [N] has the token losses before aggregation. `shares`
    has [N] values by metric name. The trainer logs each metric as the mean of its values over the
    loss tokens."""

    loss: Tensor
    shares: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A policy-optimisation method; the fields of a subclass are its settings in YAML."""

    # token: a token's loss depends on its own log-prob alone; sequence: on its whole response
    coupling: ClassVar[Literal["token", "sequence"]] = "token"
    # True: learns from responses that others wrote, so a run has no engine and no verifier
    supervised: ClassVar[bool] = False

    @property
    def needs_entropy_gradient(self) -> bool:
        """Tells whether the training pass must compute `TokenBatch.current_entropy`, with
        gradient."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Tells whether the reference policy must compute log-probs of the batch
        (`TokenBatch.reference_log_prob`)."""
        return False

    @property
    def reads_log_prob_pass(self) -> str | None:
        """Returns a sentence that names why the method needs the old log-probs or entropies of the
        log-prob pass. Returns None if nothing in the method reads the log-prob pass, or if only the
        method's gate reads the log-prob pass.

        A run may skip the log-prob pass (`statistics.gate: lagged`) only if this property is None.
        A run without the log-prob pass makes one update per rollout batch. In a run without the
        log-prob pass, `requests` finds NaN for old log-probs and entropies. `control` runs after
        the training pass, which computes log-probs and entropies. `token_loss` gets the detached
        current log-prob as the old log-prob.
        """
        return f"{type(self).__name__} does not say that it can do without the log-prob pass"

    @property
    def selects(self) -> tuple[TokenSet, ...]:
        """Returns the token sets that `selected` distinguishes; diagnostics log them by name."""
        return ()

    def carries_loss(self, batch: RolloutBatch) -> Tensor:
        """Returns the responses whose loss-mask tokens carry loss, [B] bool. If a response carries
        no loss, the tokens of the response count neither in N nor in quantiles."""
        return batch.verified

    def baseline_mask(self, batch: RolloutBatch) -> Tensor:
        """[B] bool: responses that form the baseline of the advantages."""
        return batch.verified

    def shaped_rewards(self, batch: RolloutBatch) -> Tensor:
        """[B] float64 rewards with length penalties added."""
        return batch.rewards

    def judge(self, batch: RolloutBatch) -> RolloutBatch:
        """Returns the rollout batch with the columns `advantages`, `carries_loss`, `baseline_mask`
        and `penalties` filled in.

        Only `judge` computes the four columns; every rank reads the four columns from the batch.

        Raises:
            DataError: a response has several branches, and the loss couples a response's tokens.
        """
        if batch.branched is not None and self.coupling == "sequence":
            raise DataError(
                "a response has several branches, which are trained apart, but this method's loss"
                " couples all of its tokens",
                where="algorithm",
                fix="use another method, or let the environment's `branches` return True, so that"
                " this is refused before the run",
            )
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
        """[B] advantages from rewards [B], prompt-group numbers [B], and `counted` [B] bool, the
        samples in the baseline."""

    def initial_state(self) -> dict[str, float]:
        """Returns the state before the first step, by name; every checkpoint saves the state."""
        return {}

    def requests(self, batch: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        """Returns the statistics that the method needs: of the rollout batch for `control`, of a
        mini-batch for the loss.

        The trainer calls `requests` again until a call returns no new names, so that a request may
        build on the answers in `known`. `coefficients` divides by `tokens`, the number of positions
        that carry loss.
        """
        return {"tokens": Count(batch.loss_mask)}

    def control(self, state: State, statistics: Statistics) -> State:
        """Returns the state for this step, computed from the statistics of the rollout batch; the
        next step starts from it. `control` must not synchronise with the host."""
        return state

    @abstractmethod
    def token_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        """Returns the loss of every position, computed without communication and differentiable
        through batch.log_prob."""

    @abstractmethod
    def coefficients(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        """[N] factor on every token's loss before summing; 0 outside batch.loss_mask."""

    def selected(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        """[N] int8 code of each token's set among `selects`, for diagnostics and for people who
        read responses.

        1 is L+ and -1 is L-, the rare tokens of positive and negative advantage. 2 is U+ and -2 is
        U-, the common tokens of positive and negative advantage. 0 means no set.
        """
        return torch.zeros_like(batch.loss_mask, dtype=torch.int8)

    def empty(self, statistics: Statistics) -> Tensor:
        """Tells whether no token of the whole mini-batch has a loss, 0-dim bool. If no token has a
        loss, the trainer skips the optimizer step, because a step without gradient would still
        apply momentum and weight decay."""
        return scalar(statistics, "tokens") == 0

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        """Returns scalars to log, by name. Tensors are 0-dim and stay on the device until the end
        of the step."""
        return {}
