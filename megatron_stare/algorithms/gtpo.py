"""GTPO (arXiv 2508.04349) gives each token a reward that grows with the token's share of the
entropy. The GTPO of arXiv 2508.03772 is another method.

Consider a token at position t of a response. Among all responses to the same prompt, d_t correct
responses and h_t wrong responses have a token at position t. Let H be the entropy of the old policy
at a token. A token of a correct response is called a correct token, and a token of a wrong response
is called a wrong token. The reward r and the advantage A of a token are:

    correct   r = alpha1 + alpha2 d_t H / sum H
    wrong     r = -alpha1 - alpha2 h_t (1 / H) / sum (1 / H)
    A = (r - mean) / std over the tokens,        J = (1 / N) sum_{i,t} min(rho A, clip(rho) A)

The setting `normalise: separate` follows eq. 6 literally: correct tokens and wrong tokens each have
their own mean and std. With 'separate', the mean advantage over the correct tokens is exactly 0,
and so is the mean advantage over the wrong tokens. With 'separate', correct tokens therefore have
no higher mean advantage than wrong tokens, and the policy learns only from the entropy. The
default, 'joint', takes mean and std over all tokens. With 'joint', the mean advantage is positive
over a prompt's correct tokens and negative over the prompt's wrong tokens. Still, 'joint' can give
a token an advantage of the wrong sign. If almost all tokens are correct, the overall mean reward is
close to the mean reward of the correct tokens. A correct token of low entropy can then have a
reward below the overall mean, and thus a negative advantage. If almost all tokens are wrong, the
overall mean reward is close to the mean reward of the wrong tokens. A wrong token of high entropy
can then have a reward above the overall mean, and thus a positive advantage.

Tokens that are normalised together get advantage 0 if their rewards differ only by rounding errors.
Otherwise, division by a tiny std would turn the rounding errors into advantages of several units.
For example, suppose that a prompt has only one correct response. Each token of this response is
then the only correct token at its position, so H / sum H is 1. With 'separate', the rewards of the
tokens of this response therefore differ only by rounding errors. This file takes the paper's words
"Entropy clipped at 0.2 and 0.28" to mean DAPO's clip bounds of the ratio. In a literal reading of
these words, the entropy itself is clipped. The setting `entropy_clamp` clamps the entropy itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_stare.algorithms.advantage import all_equal
from megatron_stare.algorithms.clipped import Clipped
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Request, SegmentSum, Statistics, tensor

# rewards whose spread is below this share of their size differ only by float32 rounding of
# entropies
ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Gtpo(Clipped):
    """Settings of GTPO, with the paper's defaults.

    `alpha1`, `alpha2`: the weights of the outcome and of the entropy in the reward.
    `normalise`: 'joint' takes mean and std over all tokens. 'separate' takes one mean and std over
        correct tokens, and another mean and std over wrong tokens (eq. 6 read literally).
    `scope`: the tokens that are compared with each other. 'group' compares the tokens of one
        prompt, as in the paper's formulas. 'batch' compares all tokens of the batch, as in the
        paper's discussion.
    `entropy_clamp`: bounds (low, high) of the entropy, in nats. The rewards use entropies that are
        clamped to the bounds of `entropy_clamp`. If `entropy_clamp` is null, entropies are not
        clamped.
    `correct_from`: the lowest reward with which a response counts as correct.
    `eps`: a number that is added to every entropy and to the standard deviation, so that no divisor
        is 0 (remark 2.1). The paper adds eps to the sum of the entropies, not to every entropy. If
        eps were added to the sum, a token that is alone in its sum would get a share below 1
        instead of exactly 1.
    """

    clip_high: float = 0.28
    alpha1: float = 1.0
    alpha2: float = 0.1
    normalise: Literal["joint", "separate"] = "joint"
    scope: Literal["group", "batch"] = "group"
    entropy_clamp: tuple[float, float] | None = None
    correct_from: float = 0.5
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha1 < 0 or self.alpha2 < 0 or self.alpha1 + self.alpha2 == 0 or self.eps < 0:
            raise ValueError("alpha1, alpha2 and eps must be at least 0, and one alpha above")
        if (
            self.entropy_clamp is not None
            and not 0 <= self.entropy_clamp[0] < self.entropy_clamp[1]
        ):
            raise ValueError("entropy_clamp must be [low, high] with 0 <= low < high")

    @property
    def reads_log_prob_pass(self) -> str | None:
        return "GTPO shapes rewards by the entropies of the log-prob pass"

    def asks(self, batch: TokenBatch, kept: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        correct, entropy = self._correct(kept)[kept.sequence], self._entropy(kept)
        among = kept.in_baseline
        right, wrong = among & correct, among & ~correct
        cell, cells = self._cells(kept)
        ones = torch.ones_like(entropy)
        asked: dict[str, Request] = {
            "gtpo/d": SegmentSum(ones, cell, cells, right),
            "gtpo/h": SegmentSum(ones, cell, cells, wrong),
            "gtpo/entropy": SegmentSum(entropy, cell, cells, right),
            "gtpo/inverse": SegmentSum(1 / entropy, cell, cells, wrong),
            "gtpo/length": SegmentSum(ones, kept.sequence, len(_whole(kept.rewards)), among),
        }
        if "gtpo/d" in known:
            side, sides = self._sides(kept)
            shaped = self.shaped(kept, known)
            asked["gtpo/number"] = SegmentSum(ones, side, sides, among)
            asked["gtpo/sum"] = SegmentSum(shaped, side, sides, among)
            if "gtpo/sum" in known:  # squares about the mean: stable even if the spread is small
                asked["gtpo/squares"] = SegmentSum(
                    (shaped - self._mean(kept, known)) ** 2, side, sides, among
                )
        return asked

    def shaped(self, batch: TokenBatch, known: Statistics) -> Tensor:
        """Returns the rewards of eqs. 3 and 4, plus the length penalty of the response, [N]
        float64."""
        cell, _ = self._cells(batch)
        entropy = self._entropy(batch)
        number = {
            name: tensor(known, f"gtpo/{name}")[cell] for name in ("d", "h", "entropy", "inverse")
        }
        right = self.alpha1 + self.alpha2 * number["d"] * (entropy / number["entropy"])
        wrong = self.alpha1 + self.alpha2 * number["h"] * (1 / entropy / number["inverse"])
        reward = torch.where(self._correct(batch)[batch.sequence], right, -wrong)
        return reward if batch.penalties is None else reward + batch.penalties[batch.sequence]

    def normalised(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        """Returns the advantage (r - mean) / (std + eps) of each token, [N] float64, where r is the
        token's reward. The divisor of the variance is the number n of tokens, not n - 1. If the
        standard deviation std is so small that rounding errors alone could cause it, the advantage
        is 0."""
        side, _ = self._sides(batch)
        number = tensor(statistics, "gtpo/number").clamp_min(1)
        variance = tensor(statistics, "gtpo/squares") / number
        spread = variance.sqrt()[side]
        advantage = (self.shaped(batch, statistics) - self._mean(batch, statistics)) / (
            spread + self.eps
        )
        return torch.where(spread > ROUNDING * (self.alpha1 + self.alpha2), advantage, 0.0)

    def token_advantages(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        advantage = self.normalised(batch, statistics)
        # A prompt that all or none of the remaining responses solve could only teach entropy, so it
        # gets no loss, as in every method.
        flags = self._correct(batch).to(torch.float64)
        counted = tensor(statistics, "gtpo/length") > 0
        groups = _whole(batch.groups)
        same = all_equal(flags, groups, counted, batch.num_groups)[groups]
        return torch.where(batch.loss_mask & ~same[batch.sequence], advantage, 0.0).to(
            batch.advantage.dtype
        )

    def _correct(self, batch: TokenBatch) -> Tensor:
        """Returns the mask of the correct responses, [B] bool."""
        return _whole(batch.rewards) >= self.correct_from

    def _entropy(self, batch: TokenBatch) -> Tensor:
        """Returns the entropy of every token, [N] float64. Every entropy is first clamped and then
        increased by eps, so that the result is above 0."""
        entropy = batch.entropy.detach().to(torch.float64)
        return (
            entropy.clamp_min(0)
            if self.entropy_clamp is None
            else entropy.clamp(*self.entropy_clamp)
        ) + self.eps

    def _scope(self, batch: TokenBatch) -> tuple[Tensor, int]:
        """Returns a tensor [N] with the index of each token's comparison set, and the number of
        comparison sets. A token is compared with the tokens of its comparison set, which is a
        prompt group or the whole batch."""
        group = _whole(batch.groups)[batch.sequence]
        return (group, batch.num_groups) if self.scope == "group" else (torch.zeros_like(group), 1)

    def _cells(self, batch: TokenBatch) -> tuple[Tensor, int]:
        scope, number = self._scope(batch)
        return scope * batch.max_length + batch.position, number * batch.max_length

    def _sides(self, batch: TokenBatch) -> tuple[Tensor, int]:
        scope, number = self._scope(batch)
        if self.normalise == "joint":
            return scope, number
        return 2 * scope + self._correct(batch)[batch.sequence].to(torch.int64), 2 * number

    def _mean(self, batch: TokenBatch, known: Statistics) -> Tensor:
        side, _ = self._sides(batch)
        return (tensor(known, "gtpo/sum") / tensor(known, "gtpo/number").clamp_min(1))[side]


def _whole(value: Tensor | None) -> Tensor:
    if value is None:
        raise ValueError(
            "GTPO needs the groups, rewards and lengths of the whole batch, and the trainer gave"
            " none"
        )
    return value
