"""How far the log-probs of engine and trainer may lie apart, by what they compute in. Pure.

In float32 the token that differs most decides; in 16 bits the mean and high quantiles do, and how
the mean grows over a
run: observability/metrics/rules.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_stare.config.schema import Config
from megatron_stare.records.log_prob_difference import LogProbDifference, Sizes

# Nats, of the token that differs most; 16 bits have none, see BOUNDS.
LARGEST = {"float32": 1e-3}
# Nats. Limits under which a 16-bit run goes on; measured and argued in docs/diagnostics.md.
# float16's are an eighth of bfloat16's, whose rounding is eight times coarser.
BOUNDS = {
    "bfloat16": {"mean": 0.025, "p99": 0.2, "p999": 1.0},
    "float16": {"mean": 0.003, "p99": 0.025, "p999": 0.125},
}
WORDS = {"mean": "mean", "p99": "99 % quantile", "p999": "99.9 % quantile"}
# multiple of the mean's bound for a canary: the policy did not write it, and it has few tokens
CANARY_ROOM = 4.0
# likely tokens that a canary needs; with fewer their mean says little, and all tokens are judged
ENOUGH_LIKELY = 16
# share of the limit under which two log-probs count as the same, when blame is sought
_AGREES = 0.1


@dataclass(frozen=True)
class Limits:
    """Largest differences that a run goes on with, nats; None: any.

    largest: of a single token; judged in float32, where rounding alone is three orders of magnitude
        smaller than any fault. In 16 bits single tokens differ by tenths of a nat to several with
        nothing wrong.
    bounds: of the mean and high quantiles, by name; none in float32.
    trend: of the mean's growth over a run.
    """

    largest: float | None
    bounds: Mapping[str, float] = field(default_factory=dict)
    trend: float | None = None

    @classmethod
    def of(cls, config: Config) -> Limits:
        """Limits as configured, else those of the coarser dtype of trainer and engines."""
        asked, own = config.agreement, config.sglang.agreement_limit
        dtypes = {config.model.dtype, config.sglang.dtype or config.model.dtype}
        coarsest = next((dtype for dtype in BOUNDS if dtype in dtypes), None)
        if coarsest is None:
            return cls(LARGEST["float32"] if own is None else own)
        bounds = {name: getattr(asked, name) or bound for name, bound in BOUNDS[coarsest].items()}
        return cls(own, bounds, asked.trend)

    def lifted(self) -> Limits:
        """Returns limits that no difference passes but one that is no number; what is logged
        stays."""
        return Limits(math.inf, dict.fromkeys(self.bounds, math.inf))

    @property
    def in_16_bits(self) -> bool:
        return bool(self.bounds)

    def passed(self, difference: LogProbDifference) -> str:
        """Which limits the differences of sampled tokens pass, in words; "" if none."""
        found = {"mean": difference.everywhere.mean, **difference.quantiles}
        return self._words(difference.largest, {name: found[name] for name in self.bounds})

    def canary_passed(self, difference: LogProbDifference) -> str:
        """Likewise of a canary, whose tokens are too few for quantiles, and of which the likely
        ones are judged."""
        judged = (
            difference.likely
            if difference.likely.tokens >= ENOUGH_LIKELY
            else difference.everywhere
        )
        mean = math.nan if difference.everywhere.not_numbers else judged.mean
        return self._words(
            difference.largest, {"mean": mean} if self.in_16_bits else {}, CANARY_ROOM
        )

    def _words(self, largest: float, found: Mapping[str, float], room: float = 1.0) -> str:
        over = []
        if self.largest is not None and not largest <= self.largest:  # NaN too
            over.append(
                f"by up to {largest:.3g} nats between rollout engine and trainer, the limit is"
                f" {self.largest:g}"
            )
        for name, value in found.items():
            limit = room * self.bounds[name]
            if not value <= limit:
                over.append(f"by {value:.3g} nats in their {WORDS[name]}, the limit is {limit:g}")
        return " and ".join(over)

    def size(self, part: Sizes) -> float:
        """Difference in nats that part of the tokens is judged by: the mean in 16 bits, else the
        largest; no NaN."""
        return part.mean_number if self.in_16_bits else part.largest_number

    @property
    def same(self) -> float:
        """Up to which `size` counts as agreement, when blame is sought. In 16 bits rounding is a
        fair share of the limit itself."""
        return self.wrong if self.in_16_bits else _AGREES * self.wrong

    @property
    def rounding(self) -> float:
        """Difference that rounding alone stays within on a single token, but for one in a hundred;
        nats."""
        return self.bounds["p99"] if self.in_16_bits else self.same

    @property
    def wrong(self) -> float:
        """Past which `size` counts as none."""
        return self.bounds["mean"] if self.largest is None or self.in_16_bits else self.largest
