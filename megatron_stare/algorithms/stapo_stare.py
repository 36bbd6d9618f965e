"""Applies STAPO's mask first, and then STARE's quantile to the tokens that the mask keeps.

STAPO and STARE treat improbable tokens of correct answers differently. STAPO silences the
improbable tokens of low entropy, and STARE amplifies all improbable tokens. Here the mask comes
first. A token that STAPO's mask removes has no loss and is not one of STARE's candidates. Among the
improbable tokens of correct answers, STARE therefore amplifies only tokens of high entropy. With
the setting `spurious.denominator: all`, the divisor of the loss also counts the tokens that STAPO's
mask removes. With the setting `spurious.denominator: kept`, the divisor leaves out the tokens that
STAPO's mask removes. By default, STARE's gate uses the mean entropy of all response tokens,
including the tokens that STAPO's mask removes. No paper proposes or tests the combination of STAPO
and STARE.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from megatron_stare.algorithms.filters import Filter
from megatron_stare.algorithms.stapo import SpuriousTokens
from megatron_stare.algorithms.stare import Stare
from megatron_stare.records.batch_statistics import Statistics, scalar


@dataclass(frozen=True, kw_only=True)
class StapoStare(Stare):
    """Settings of STARE. The additional setting `spurious` contains STAPO's settings tau_p,
    version, quantile, interpolation and denominator."""

    spurious: SpuriousTokens = field(default_factory=SpuriousTokens)

    @property
    def reads_log_prob_pass(self) -> str | None:
        return "STAPO's mask reads the entropies of the log-prob pass"

    def filters(self) -> tuple[Filter, ...]:
        return (*super().filters(), self.spurious)

    def metrics(
        self, statistics: Statistics, state: dict[str, Tensor]
    ) -> dict[str, Tensor | float]:
        return {
            **super().metrics(statistics, state),
            "stapo/entropy_threshold": scalar(statistics, "stapo/entropy"),
        }
