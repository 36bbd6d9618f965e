"""The contract between a method and the trainer.

A training step:

1. The driver calls `judge`, which computes the advantages of the rollout batch.

2. The trainer runs the log-prob pass.

3. The method's function `requests` returns requests for statistics. The trainer computes the
   requested statistics over all ranks. `control` then updates the method's state.

4. For every mini-batch, the trainer computes the requested statistics again, over this mini-batch
   alone. The trainer then calls `token_loss` and `coefficients` on each micro-batch.

The training loss is a sum over all tokens: each token adds its coefficient times its token loss. In
shapes, B is the number of samples, and N is the number of response positions in the batch that is
passed in.
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
    """Result of `Method.token_loss`. `loss` [N] contains the token losses before aggregation.
    `shares` maps the name of each metric to a tensor [N] with one value per token. The trainer logs
    each metric as the mean of its values over the loss tokens."""

    loss: Tensor
    shares: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A policy-optimisation method. The fields of a subclass are the method's settings in YAML."""

    # token: a token's loss depends on its own log-prob alone; sequence: on its whole response
    coupling: ClassVar[Literal["token", "sequence"]] = "token"
    # True: learns from responses that others wrote, so a run has no engine and no verifier
    supervised: ClassVar[bool] = False

    @property
    def needs_entropy_gradient(self) -> bool:
        """Returns True if the training pass must compute `TokenBatch.current_entropy`, with
        gradient."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Returns True if the reference policy must compute log-probs of the batch
        (`TokenBatch.reference_log_prob`)."""
        return False

    @property
    def needs_second_moment(self) -> bool:
        """Returns True if the log-prob pass must compute `TokenBatch.sum_p2` and
        `TokenBatch.sum_p2_log_p`, which the entropy sensitivity reads (sensitivity.py)."""
        return False

    @property
    def reads_log_prob_pass(self) -> str | None:
        """Returns the reason why the method needs the log-prob pass, as text for an error message.
        Returns None if the method can do without the log-prob pass. For example, a method needs the
        log-prob pass if its loss reads entropies that must be known before the training pass. A
        gate for the whole batch is not such a reason, because this gate can use the entropies of
        the training pass.

        The setting `statistics.gate: lagged` makes a run skip the log-prob pass. The preflight
        checks refuse `lagged` if `reads_log_prob_pass` returns a reason. A run without the log-prob
        pass makes one update per rollout batch. Without the log-prob pass, the trainer calls
        `requests` both before and after the training pass. Before the training pass, the old
        log-probs and entropies in the batch are NaN, because only the training pass computes
        log-probs and entropies. Without the log-prob pass, `control` runs after the training pass,
        and `token_loss` gets the detached current log-prob as the old log-prob.
        """
        return f"{type(self).__name__} does not say that it can do without the log-prob pass"

    @property
    def measures_every(self) -> int:
        """Returns n if the trainer must measure the entropy change in every n-th step and pass the
        entropy change to `observe`. Returns 0 if the trainer must not measure the entropy change.
        Each measurement of the entropy change takes one forward pass. The entropy change can be
        measured only in runs with one update per rollout batch."""
        return 0

    @property
    def selects(self) -> tuple[TokenSet, ...]:
        """Returns the token sets that `selected` distinguishes. Diagnostics log the metrics of each
        token set under the set's name."""
        return ()

    def carries_loss(self, batch: RolloutBatch) -> Tensor:
        """Returns the mask of the responses that contribute to the loss, [B] bool. If a response
        contributes to the loss, only its tokens in the loss mask contribute. If a response does not
        contribute to the loss, neither the token counts nor the quantiles include its tokens."""
        return batch.verified

    def baseline_mask(self, batch: RolloutBatch) -> Tensor:
        """Returns the mask of the responses that form the baseline of the advantages, [B] bool."""
        return batch.verified

    def shaped_rewards(self, batch: RolloutBatch) -> Tensor:
        """Returns the rewards with length penalties added, [B] float64."""
        return batch.rewards

    def judge(self, batch: RolloutBatch) -> RolloutBatch:
        """Returns the rollout batch with the columns `advantages`, `carries_loss`, `baseline_mask`
        and `penalties` filled in.

        Only `judge` computes the columns `advantages`, `carries_loss`, `baseline_mask` and
        `penalties`, and every rank reads these columns from the batch.

        Raises:
            DataError: a response has several branches, but the loss couples all tokens of a
                response.
        """
        if batch.branches.size > batch.size and self.coupling == "sequence":
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
        """Returns the advantages [B] of the responses, computed from their rewards [B] and the
        indices [B] of their prompt groups. The argument `counted` (bool [B]) is the mask of the
        responses that form the baseline of the advantages."""

    def initial_state(self) -> dict[str, float]:
        """Returns the state before the first step, as a mapping of names to values. Every
        checkpoint saves the state."""
        return {}

    def requests(self, batch: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        """Returns requests for the statistics that the method needs. `control` needs statistics of
        the rollout batch; the loss needs statistics of a mini-batch.

        The trainer calls `requests` repeatedly, until a call returns no request with a new name. A
        request can therefore build on the statistics in `known`. `coefficients` divides by the
        statistic `tokens`, which is the number of positions that count in the loss.
        """
        return {"tokens": Count(batch.loss_mask)}

    def control(self, state: State, statistics: Statistics) -> State:
        """Returns the state for this step, computed from the statistics of the rollout batch. The
        next step starts from the returned state. `control` must not cause a host-device
        synchronisation."""
        return state

    def observe(self, state: State, change: Tensor | None) -> State:
        """Returns the state with which the next step starts. The trainer calls `observe` after the
        first update of a step, but only in two cases: the step's number is a multiple of
        `measures_every`, or the optimizer step was not taken. A run without the log-prob pass never
        calls `observe`. `change` is a 0-dim tensor. The value of `change` is the mean entropy of
        the batch's tokens after the update, minus the mean entropy of the same tokens before the
        update. If the optimizer step was not taken, `change` is None. `observe` must not cause a
        host-device synchronisation."""
        return state

    @abstractmethod
    def token_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        """Returns the loss of every position, differentiable through batch.log_prob. In
        `token_loss`, only methods with the coupling 'sequence' may exchange data between ranks.
        They use `batch.over_ranks` for this."""

    @abstractmethod
    def coefficients(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        """Returns a tensor [N] with the factor by which the training loss multiplies each token's
        loss. The factor is 0 outside batch.loss_mask."""

    def selected(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        """Returns a tensor [N] int8 with one integer code for each token. The code tells which
        token set contains the token. The property `selects` lists the method's token sets. The
        codes are meant for diagnostics and for people who read responses.

        Code 1 is L+, the rare tokens of positive advantage, and -1 is L-, the rare tokens of
        negative advantage. Code 2 is U+, the common tokens of positive advantage, and -2 is U-, the
        common tokens of negative advantage. Code 0 means that the token is in no set.
        """
        return torch.zeros_like(batch.loss_mask, dtype=torch.int8)

    def empty(self, statistics: Statistics) -> Tensor:
        """Returns a 0-dim bool, which is True if no token of the whole mini-batch has a loss. If no
        token has a loss, the trainer skips the optimizer step, because a step without gradient
        would still apply momentum and weight decay."""
        return scalar(statistics, "tokens") == 0

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        """Returns scalars to log, by name. A scalar can be a 0-dim tensor, which stays on the
        device until the end of the step."""
        return {}
