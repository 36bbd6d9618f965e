"""The contract between a method and the trainer.

A step goes: `advantages` from rewards (whole batch) -> log-prob pass -> `requests`, answered over all ranks ->
`control` updates the method's state -> `token_loss` and `coefficients`, micro-batch by micro-batch. The training loss
is the sum over tokens of coefficient times token loss. Shape legend: B samples, N response positions at hand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from megatron_stare.batch import TokenBatch
from megatron_stare.statistics import Count, Request, Statistics

State = dict[str, Tensor]  # 0-dim float64 tensors: what a method remembers from step to step


@dataclass(frozen=True)
class TokenTerms:
    """`loss` [N], one value a token before aggregation; `shares`: 0/1 flags [N] logged as shares of the loss tokens."""

    loss: Tensor
    shares: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A policy-optimisation method; the fields of a subclass are its settings in YAML."""

    # token: a token's loss depends on its own log-prob alone; sequence: on its whole response
    coupling: ClassVar[Literal["token", "sequence"]] = "token"

    @abstractmethod
    def advantages(self, rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
        """[B] advantages from rewards [B], prompt-group numbers [B] and which samples count [B]."""

    def initial_state(self) -> dict[str, float]:
        """What the method remembers before the first step; it is saved in every checkpoint."""
        return {}

    def requests(self, batch: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        """The statistics of the whole batch that the method needs.

        Asked again while it names new ones, so that a request may build on answers in `known`. `tokens`, the number of
        positions that carry loss, is what `coefficients` divides by.
        """
        return {"tokens": Count(batch.mask)}

    def control(self, state: State, statistics: Statistics) -> State:
        """The state this step uses and the next one starts from. No host synchronisation."""
        return state

    @abstractmethod
    def token_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        """Loss of every position, purely local; differentiable through batch.log_prob."""

    @abstractmethod
    def coefficients(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        """[N] what every token's loss is multiplied by before summing; 0 outside batch.mask."""

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        """Scalars to log, by name; tensors are 0-dim and stay on the device until the end of the step."""
        return {}
