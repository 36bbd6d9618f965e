"""The sets of tokens that STARE's operators act on (arXiv 2606.19236, section 3 and table 4).

    L+ rare tokens of positive advantage        U+ its common ones
    L- rare tokens of negative advantage        U- its common ones

    O1 amplifies L+    O2 attenuates U+    O3 amplifies U-    O4 attenuates L-
    C1 = O1 + O3       C2 = O1 + O4        C3 = O2 + O3       C4 = O2 + O4

To first order every operator raises the entropy (sensitivity.py). Rare is the share P of highest
surprisal among the tokens of the sign, over the whole batch, or p below a fixed bound. Which tokens
are common the paper's text at hand does not say: all others ('complement'), or the share P of
lowest surprisal ('bottom'); docs/algorithms/stare.md argues.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import (
    Count,
    Request,
    Statistics,
    TopK,
    scalar,
    threshold,
)

Variant = Literal["O1", "O2", "O3", "O4", "C1", "C2", "C3", "C4"]
Common = Literal["complement", "bottom"]


@dataclass(frozen=True)
class TokenSet:
    """One of L+, L-, U+ and U-.

    name: in statistics and metrics.        sign: of its tokens' advantage.
    rare: the surprising end of them, or the other.
    weight: the state that multiplies their advantage while the gate is open.
    code: in `Method.selected`.
    """

    name: str
    sign: int
    rare: bool
    weight: Literal["amplify", "attenuate"]

    @property
    def code(self) -> int:
        return self.sign if self.rare else 2 * self.sign


_OPERATORS = {
    "O1": TokenSet("plus", 1, rare=True, weight="amplify"),
    "O2": TokenSet("common_plus", 1, rare=False, weight="attenuate"),
    "O3": TokenSet("common_minus", -1, rare=False, weight="amplify"),
    "O4": TokenSet("minus", -1, rare=True, weight="attenuate"),
}
_COMPOSED = {"C1": ("O1", "O3"), "C2": ("O1", "O4"), "C3": ("O2", "O3"), "C4": ("O2", "O4")}


def token_sets(variant: Variant) -> tuple[TokenSet, ...]:
    """The sets that a variant reweights, of each sign at most one."""
    return tuple(_OPERATORS[operator] for operator in _COMPOSED.get(variant, (variant,)))


@dataclass(frozen=True)
class Selection:
    """Which tokens are rare and which common.

    share: P.        rare_below: the probability below which a token is rare; None: by share.
    """

    share: float
    common: Common
    rare_below: float | None

    def request(self, of: TokenSet, batch: TokenBatch) -> Request:
        """The statistic that tells the set's tokens from the others of its sign."""
        if self.rare_below is not None:
            return Count(self.members(of, batch, {}))
        # of equal surprisals the first count as rare, and at the other end as common
        key = -batch.surprisal if self._from_below(of) else batch.surprisal
        return TopK(key, batch.index, _candidates(of, batch), self.share)

    def members(self, of: TokenSet, batch: TokenBatch, statistics: Statistics) -> Tensor:
        """[N] bool."""
        candidates = _candidates(of, batch)
        if self.rare_below is not None:
            rare = (-batch.surprisal).exp() < self.rare_below
            return candidates & (rare if of.rare else ~rare)
        found = threshold(statistics, of.name)
        if self._from_below(of):
            return found.select(-batch.surprisal, batch.index, candidates)
        rare = found.select(batch.surprisal, batch.index, candidates)
        return rare if of.rare else candidates & ~rare

    def number(self, of: TokenSet, statistics: Statistics) -> Tensor:
        """0-dim, how many tokens the set has."""
        if self.rare_below is not None:
            return scalar(statistics, of.name)
        found = threshold(statistics, of.name)
        return found.k if of.rare or self.common == "bottom" else found.n - found.k

    def bound(self, of: TokenSet, statistics: Statistics) -> Tensor | float:
        """Nats: the surprisal that parts the set from the other tokens of its sign; with shares it
        is a token's own, the least surprising one that is rare, or the most surprising one at the
        bottom."""
        if self.rare_below is not None:
            return -math.log(self.rare_below)
        value = threshold(statistics, of.name).value
        return -value if self._from_below(of) else value

    def _from_below(self, of: TokenSet) -> bool:
        return not of.rare and self.common == "bottom"


def _candidates(of: TokenSet, batch: TokenBatch) -> Tensor:
    return batch.loss_mask & (of.sign * batch.advantage > 0)
