"""STARE (arXiv 2606.19236): surprisal-guided advantage reweighting behind a target-entropy gate.

While the batch's mean entropy is below its target, the tokens that move entropy most - the share P of highest surprisal
among tokens of positive advantage (L+), of negative advantage (L-), or both - have their advantage multiplied:

    w = 1 + g (W - 1) on L+        w = 1 - g (1 - M) on L-        w = 1 elsewhere        g = 1[mean H < target]
    J = (1 / N) sum_{i,t} w min(rho A, clip(rho, 1 - low, 1 + high) A)

The paper takes the quantile over the whole batch, as here; its released code takes it per micro-batch and rank. Both
move W and M (adaptive) before the loss of the same step, and while the gate is closed too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megatron_stare.algorithms.aggregate import Aggregation
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.method import State, TokenTerms
from megatron_stare.batch import TokenBatch
from megatron_stare.metric import Metric
from megatron_stare.records.batch_statistics import Mean, Request, Statistics, TopK, scalar, threshold

METRICS = (
    Metric(
        "stare/gate",
        "0 or 1",
        "1: the gate is open, and L+ and L- are reweighted",
        "switches; always 0: the target lies below what the policy has, always 1: the weights are too weak",
    ),
    Metric(
        "stare/amplify",
        "factor",
        "W, on the advantage of L+ while the gate is open",
        "1 to algorithm.amplify_max; at its bound for long: raise it, or lower the target",
    ),
    Metric(
        "stare/attenuate",
        "factor",
        "M, on the advantage of L- while the gate is open",
        "algorithm.attenuate_min to 1; as above",
    ),
    Metric("stare/selected_plus", "tokens", "of L+", "algorithm.share of the tokens of positive advantage, rounded up"),
    Metric(
        "stare/selected_minus", "tokens", "of L-", "algorithm.share of the tokens of negative advantage, rounded up"
    ),
    Metric(
        "stare/threshold_plus",
        "nats",
        "least surprisal of L+",
        "above entropy/mean; near forecast/critical_surprisal or beyond",
    ),
    Metric("stare/threshold_minus", "nats", "least surprisal of L-", "as above"),
    Metric("entropy/target", "nats", "algorithm.entropy_target, which the gate holds entropy/mean to", "fixed"),
)


@dataclass(frozen=True, kw_only=True)
class Stare(Grpo):
    """Settings of STARE; defaults are the paper's.

    variant: the paper's names: 'O1' amplifies L+ (W), 'O4' attenuates L- (M), 'C2' does both.
    share: P, the share of tokens selected on each side.
    amplify: W, at least 1.        attenuate: M, in (0, 1].
    entropy_target: nats; the gate is open while the batch's mean entropy is below it. null: always open.
    gate_entropy: 'response' is the mean over all response tokens, 'kept' over those that filters left in the loss.
    adaptive: move W and M by `adapt_rate` a step towards the target, within [1, amplify_max] and [attenuate_min, 1].
    """

    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    aggregation: Aggregation = "token_mean"
    variant: Literal["O1", "O4", "C2"] = "O1"
    share: float = 0.1
    amplify: float = 1.1
    attenuate: float = 0.9
    entropy_target: float | None = 0.3
    gate_entropy: Literal["response", "kept"] = "response"
    adaptive: bool = False
    adapt_rate: float = 0.01
    amplify_max: float = 1.5
    attenuate_min: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1:
            raise ValueError("share must lie in [0, 1]")
        if self.amplify < 1 or not 0 < self.attenuate <= 1:
            raise ValueError("amplify must be at least 1 and attenuate in (0, 1]")
        if self.adaptive and self.entropy_target is None:
            raise ValueError("adaptive moves the weights towards entropy_target, which is null")

        if self.entropy_target is not None and self.entropy_bonus is not None and self.entropy_bonus.target is not None:
            raise ValueError("entropy_target and entropy_bonus.target steer the same entropy; set one of them to null")

    def initial_state(self) -> dict[str, float]:
        return {**super().initial_state(), "gate": 1.0, "amplify": self.amplify, "attenuate": self.attenuate}

    def sides(self) -> dict[str, int]:
        """The sides that are selected from, with the sign of their advantage."""
        return {"O1": {"plus": 1}, "O4": {"minus": -1}, "C2": {"plus": 1, "minus": -1}}[self.variant]

    def asks(self, batch: TokenBatch, kept: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        gated = batch if self.gate_entropy == "response" else kept
        asked: dict[str, Request] = {"entropy": Mean(gated.entropy, gated.loss_mask)}
        for side, sign in self.sides().items():
            asked[side] = TopK(kept.surprisal, kept.index, kept.loss_mask & (sign * kept.advantage > 0), self.share)
        return asked

    def control(self, state: State, statistics: Statistics) -> State:
        """Opens or closes the gate and, if adaptive, moves W and M, before the loss of the same step."""
        state = super().control(state, statistics)
        if self.entropy_target is None:
            return state
        entropy = scalar(statistics, "entropy")
        gap = self.entropy_target - entropy
        new = {"gate": (gap > 0).to(torch.float64)}
        if self.adaptive:
            move = self.adapt_rate * torch.sign(gap)
            new["amplify"] = (state["amplify"] + move).clamp(1.0, self.amplify_max)
            new["attenuate"] = (state["attenuate"] - move).clamp(self.attenuate_min, 1.0)
        # a batch without a finite entropy says nothing: keep what was
        return state | {name: torch.where(entropy.isfinite(), value, state[name]) for name, value in new.items()}

    def weights(self, batch: TokenBatch, statistics: Statistics, state: State) -> Tensor:
        """[N] float32, the factor on every token's advantage."""
        weights = torch.ones_like(batch.advantage)
        for sign, chosen in self._chosen(batch, statistics):
            factor = 1 + state["gate"] * (state["amplify" if sign > 0 else "attenuate"] - 1)
            weights = torch.where(chosen, factor.to(weights.dtype), weights)
        return weights

    def selected(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        """L+ and L-, also while the gate is closed and their weight is 1."""
        found = super().selected(batch, statistics)
        for sign, chosen in self._chosen(self.narrowed(batch, statistics).kept, statistics):
            found = torch.where(chosen, sign, found)
        return found

    def _chosen(self, batch: TokenBatch, statistics: Statistics) -> Iterator[tuple[int, Tensor]]:
        """The sign of every side's advantage, and [N] bool the tokens that are selected on it."""
        for side, sign in self.sides().items():
            candidates = batch.loss_mask & (sign * batch.advantage > 0)
            yield sign, threshold(statistics, side).select(batch.surprisal, batch.index, candidates)

    def policy_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        base = super().policy_loss(batch, statistics, state)
        return replace(base, loss=self.weights(batch, statistics, state) * base.loss)

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        logged = {
            **super().metrics(statistics, state),
            "stare/gate": state["gate"],
            "stare/amplify": state["amplify"],
            "stare/attenuate": state["attenuate"],
        }
        for side in self.sides():
            selected = threshold(statistics, side)
            logged[f"stare/selected_{side}"], logged[f"stare/threshold_{side}"] = selected.k, selected.value
        if self.entropy_target is not None:
            logged["entropy/target"] = self.entropy_target
        return logged
