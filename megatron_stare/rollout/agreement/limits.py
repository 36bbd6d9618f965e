"""Sets limits on the difference between the log-probs of engine and trainer, for each compute
dtype. Pure.

In float32, one limit applies to the log-prob difference of each token. In 16-bit dtypes, limits
apply to the mean difference, to high quantiles of the difference, and to the growth of the mean
difference over a run (observability/metrics/rules.py). The same kinds of limits apply if the
servers hold weights, keys or values in 8-bit dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_stare.config.schema import Config
from megatron_stare.records.log_prob_difference import LogProbDifference, Sizes

# Limit on the largest difference of a token, nats; 16-bit dtypes have BOUNDS instead.
LARGEST = {"float32": 1e-3}
# Nats. Limits of a run in 16 bits, or whose servers have 8-bit weights (fp8) or an 8-bit key/value
# cache (fp8_e4m3); measured and explained in docs/diagnostics.md. float16's are about an eighth of
# bfloat16's, whose rounding is eight times coarser.
BOUNDS = {
    "fp8": {"mean": 0.2, "p99": 1.6, "p999": 8.0},
    "fp8_e4m3": {"mean": 0.1, "p99": 0.8, "p999": 4.0},
    "bfloat16": {"mean": 0.025, "p99": 0.2, "p999": 1.0},
    "float16": {"mean": 0.003, "p99": 0.025, "p999": 0.125},
}
WORDS = {"mean": "mean", "p99": "99 % quantile", "p999": "99.9 % quantile"}
# multiplies the mean's bound for a canary, which the policy did not sample and which has few tokens
CANARY_ROOM = 4.0
# minimum of likely tokens in a canary; with fewer, their mean is unreliable and all tokens are
# judged
ENOUGH_LIKELY = 16
# share of the limit below which log-probs count as equal when the cause is inferred
_AGREES = 0.1


@dataclass(frozen=True)
class Limits:
    """Limits, in nats, on the log-prob differences between engine and trainer. None means
    unlimited.

    `largest`: limit on the log-prob difference of each token. In float32, `largest` has a default
        value. In 16-bit and 8-bit dtypes, the default is no limit. In float32, differences from
        rounding are three orders of magnitude smaller than differences from any fault. In 16-bit
        dtypes, even without a fault, the engine's log-prob of a token can differ from the trainer's
        log-prob of the same token by tenths of a nat, or by several nats.
    `bounds`: dict with the limits on the mean of the differences ("mean") and on two high quantiles
        ("p99" and "p999"). In float32, the dict is empty.
    `trend`: limit on the growth of the mean difference over a run.
    `cache`: dtype of the servers' key/value cache if this dtype has 8 bits, otherwise None. If the
        8-bit cache is a likely cause of a log-prob difference, the error names the dtype of the
        cache.
    """

    largest: float | None
    bounds: Mapping[str, float] = field(default_factory=dict)
    trend: float | None = None
    cache: str | None = None

    @classmethod
    def of(cls, config: Config) -> Limits:
        """Returns the configured limits. The default limits depend on the least precise of four
        dtypes: those of the trainer's computation, the engines' computation, the engines' weights
        and the engines' cache."""
        asked, own = config.agreement, config.sglang.agreement_limit
        if config.coarsest_dtype not in BOUNDS:
            return cls(LARGEST["float32"] if own is None else own)
        default = BOUNDS[config.coarsest_dtype]
        bounds = {name: getattr(asked, name) or bound for name, bound in default.items()}
        return cls(own, bounds, asked.trend, config.sglang.kv_cache_dtype)

    def lifted(self) -> Limits:
        """Returns limits that allow every number, but not NaN. The differences are still logged."""
        return Limits(math.inf, dict.fromkeys(self.bounds, math.inf))

    @property
    def coarse(self) -> bool:
        """Returns True if the limits apply to the mean and to quantiles, which is the case in
        16-bit and 8-bit dtypes."""
        return bool(self.bounds)

    def passed(self, difference: LogProbDifference) -> str:
        """Checks the log-prob differences between engine and trainer on sampled tokens. Returns a
        text that describes every exceeded limit. Returns "" if no limit is exceeded."""
        found = {"mean": difference.everywhere.mean, **difference.quantiles}
        return self._words(difference.largest, {name: found[name] for name in self.bounds})

    def canary_passed(self, difference: LogProbDifference) -> str:
        """Describes the limits that a canary's differences exceed. Returns "" if no limit is
        exceeded. A canary has too few tokens for quantiles, so the limits on quantiles do not
        apply. In 16-bit and 8-bit dtypes, the canary's mean difference has a limit of its own: the
        limit on the mean difference of sampled tokens, multiplied by `CANARY_ROOM`. The canary's
        mean difference covers only likely tokens, to which the trainer gives a probability of at
        least 1/1000. If the canary has fewer than `ENOUGH_LIKELY` likely tokens, the mean
        difference covers all tokens of the canary."""
        judged = (
            difference.likely
            if difference.likely.tokens >= ENOUGH_LIKELY
            else difference.everywhere
        )
        mean = math.nan if difference.everywhere.not_numbers else judged.mean
        return self._words(difference.largest, {"mean": mean} if self.coarse else {}, CANARY_ROOM)

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
        """Summarises the log-prob differences of a subset of tokens by one number, in nats. If the
        run computes in float32, the number is the largest difference. If the run uses 16-bit or
        8-bit dtypes, the number is the mean difference. NaN is ignored."""
        return part.mean_number if self.coarse else part.largest_number

    @property
    def same(self) -> float:
        """Threshold, in nats, for agreement on a subset of tokens. The method `size` computes the
        log-prob difference of a subset. If this difference is at most the threshold, engine and
        trainer are considered to agree on the subset. Only the search for the likely cause of a
        difference uses this threshold.

        In a float32 run, the threshold is a tenth of the limit on the log-prob difference of a
        single token. In a run with 16-bit or 8-bit dtypes, the threshold equals the whole limit on
        the mean difference. A tenth of this limit would be too low, because rounding alone can
        cause a larger mean difference."""
        return self.wrong if self.coarse else _AGREES * self.wrong

    @property
    def rounding(self) -> float:
        """Threshold, in nats, for differences that rounding alone can cause. If rounding is the
        only cause of differences, at least 99 % of the tokens have log-prob differences below this
        threshold."""
        return self.bounds["p99"] if self.coarse else self.same

    @property
    def wrong(self) -> float:
        """Limit, in nats, above which engine and trainer are considered to disagree on a subset of
        tokens. The limit applies to the number that the method `size` computes for the subset."""
        return self.bounds["mean"] if self.largest is None or self.coarse else self.largest
