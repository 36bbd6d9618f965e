"""The sets of tokens that STARE's operators act on (arXiv 2606.19236, section 3 and table 4).

    L+ rare tokens of positive advantage        U+ common tokens of positive advantage
    L- rare tokens of negative advantage        U- common tokens of negative advantage

    O1 amplifies L+    O2 attenuates U+    O3 amplifies U-    O4 attenuates L-
    C1 = O1 + O3       C2 = O1 + O4        C3 = O2 + O3       C4 = O2 + O4

To first order, every operator raises the entropy (sensitivity.py). Rare tokens are selected from
the whole batch, separately for positive and for negative advantages. Of n tokens with the same
advantage sign, the P * n tokens with the highest surprisal are called rare, where P is a fraction.
If a fixed probability bound is set, rare tokens are instead the tokens whose probability is below
the bound. The paper does not define the common tokens. The field `Selection.common` chooses between
two definitions of the common tokens. With 'complement', the common tokens are all tokens that are
not rare. With 'bottom', the common tokens are the P * n tokens with the lowest surprisal among n
tokens with the same advantage sign. The page docs/algorithms/stare.md gives the reasons for both
definitions of the common tokens.
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
    """One of the token sets L+, L-, U+ and U-.

    `name`: the name of the set in statistics and metrics.
    `sign`: the sign of the advantage of every token in the set.
    `rare`: True for a set of rare tokens, False for a set of common tokens.
    `weight`: the name of the state value that multiplies the set's advantages while the gate is
        open.
    `code`: the integer that stands for the set in the result of `Method.selected`.
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
    """Returns the token sets that a variant reweights. A variant reweights one or two token sets.
    If a variant reweights two token sets, one set contains tokens with positive advantage, and the
    other set contains tokens with negative advantage."""
    return tuple(_OPERATORS[operator] for operator in _COMPOSED.get(variant, (variant,)))


@dataclass(frozen=True)
class Selection:
    """Rule that separates rare tokens from common tokens.

    `share`: the share P. Of the n tokens whose advantage has the set's sign, a set of rare tokens
        contains P * n tokens, rounded up. If `common` is 'bottom', a set of common tokens contains
        as many tokens as the set of rare tokens with the same advantage sign.
    `rare_below`: the probability below which a token is rare. If `rare_below` is None, `share`
        decides which tokens are rare.
    """

    share: float
    common: Common
    rare_below: float | None

    def request(self, of: TokenSet, batch: TokenBatch) -> Request:
        """Returns a request for the set's threshold. If `rare_below` is set, the threshold is known
        in advance, so the method requests only the number of tokens in the set."""
        if self.rare_below is not None:
            return Count(self.members(of, batch, {}))
        # of equal surprisals, the first in canonical order are selected, at either end
        key = -batch.surprisal if self._from_below(of) else batch.surprisal
        return TopK(key, batch.index, _candidates(of, batch), self.share)

    def members(self, of: TokenSet, batch: TokenBatch, statistics: Statistics) -> Tensor:
        """Returns the mask of the set's tokens, [N] bool."""
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
        """Returns the number of tokens in the set, 0-dim."""
        if self.rare_below is not None:
            return scalar(statistics, of.name)
        found = threshold(statistics, of.name)
        return found.k if of.rare or self.common == "bottom" else found.n - found.k

    def bound(self, of: TokenSet, statistics: Statistics) -> Tensor | float:
        """Returns the surprisal, in nats, that separates the set from the other tokens with the
        same advantage sign. If `rare_below` is a probability, the bound of every set is the
        surprisal of a token with this probability. If `rare_below` is None, the bound depends on
        the kind of set. The bound of a set of rare tokens is the lowest surprisal in the set. With
        'bottom', the bound of a set of common tokens is the highest surprisal in the set. With
        'complement', the bound of a set of common tokens is the lowest surprisal of a rare
        token."""
        if self.rare_below is not None:
            return -math.log(self.rare_below)
        value = threshold(statistics, of.name).value
        return -value if self._from_below(of) else value

    def _from_below(self, of: TokenSet) -> bool:
        return not of.rare and self.common == "bottom"


def _candidates(of: TokenSet, batch: TokenBatch) -> Tensor:
    return batch.loss_mask & (of.sign * batch.advantage > 0)
