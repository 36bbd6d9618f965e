"""How a policy-gradient step moves the entropy, to first order (STARE, arXiv 2606.19236, section 3
and appendix D).

Sampling token a with advantage A and moving the logits by eta A (one_hot(a) - p) changes the
entropy at that position at the rate dH/deta = -A Phi(a): Phi is how fast the entropy falls when the
sampled token is pushed up. With

    Phi(a) = p (ln p + H) - S2        S2 = sum_v p_v^2 (ln p_v + H) = sum p^2 ln p + H sum p^2 >= 0
    Phi(a) > 0  if and only if  s < s* = H - W0(S2 e^H)        (s = -ln p, Lambert W0)

so the entropy falls for common tokens (s < s*) of positive advantage, U+, and for rare ones of
negative advantage, L-; it rises on U- and on the rare tokens of positive advantage, L+. s* belongs
to a position: it needs the distribution. All functions are elementwise over [N] positions, without
host synchronisation.

At temperature T everything above is that of the distribution that is sampled from, softmax(z / T).
Both the push on the logits z and the slope of the entropy in them carry a factor 1 / T, so rates
per unit of step in z carry 1 / T^2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Count, Mean, Request, Statistics, Sum, scalar
from megatron_stare.records.metric import Metric

METRICS = (
    Metric(
        "forecast/entropy_change",
        "nats per unit step",
        "first-order change of the mean entropy under what the method makes of the advantages",
        "near 0 or steered by the gate; far below 0 for long: collapse",
    ),
    Metric(
        "forecast/plain_change",
        "nats per unit step",
        "the same under the advantages as they are",
        "below forecast/entropy_change where the method holds entropy up",
    ),
    Metric(
        "forecast/mass_common_plus",
        "nats per unit step",
        "part of forecast/plain_change that comes from U+: common tokens, A > 0",
        "the four add up to forecast/plain_change",
    ),
    Metric(
        "forecast/mass_rare_plus",
        "nats per unit step",
        "part of forecast/plain_change that comes from L+: rare tokens, A > 0",
        "the four add up to forecast/plain_change",
    ),
    Metric(
        "forecast/mass_common_minus",
        "nats per unit step",
        "part of forecast/plain_change that comes from U-: common tokens, A < 0",
        "the four add up to forecast/plain_change",
    ),
    Metric(
        "forecast/mass_rare_minus",
        "nats per unit step",
        "part of forecast/plain_change that comes from L-: rare tokens, A < 0",
        "the four add up to forecast/plain_change",
    ),
    Metric("forecast/share_common_plus", "share", "tokens in U+: common, A > 0", "no bound"),
    Metric("forecast/share_rare_plus", "share", "tokens in L+: rare, A > 0", "no bound"),
    Metric("forecast/share_common_minus", "share", "tokens in U-: common, A < 0", "no bound"),
    Metric("forecast/share_rare_minus", "share", "tokens in L-: rare, A < 0", "no bound"),
    Metric(
        "forecast/rare_share",
        "share",
        "tokens past their critical surprisal, whatever their advantage",
        "steady; falls towards 0 in a collapse",
    ),
    Metric(
        "forecast/critical_surprisal",
        "nats",
        "mean of s*, past which a token is rare",
        "of the size of stare/threshold_plus",
    ),
    Metric(
        "forecast/neutral_weight",
        "factor",
        "W*, the weight on L+ that would make forecast/plain_change 0",
        "above 1 entropy falls if nothing is done; NaN: no rewarded token is rare",
    ),
)


QUADRANTS = ("common_plus", "rare_plus", "common_minus", "rare_minus")  # U+, L+, U-, L-
# Float32 log-probs carry errors of some 1e-6. Where a token is all but certain, Phi is smaller than
# that, and its sign would be the rounding's. Tokens so near zero move nothing and count as common.
_NEUTRAL = 3e-6
_HALLEY_STEPS = 12  # converges cubically; double precision is reached in six from any x up to 1e12


def second_moment(sum_p2: Tensor, sum_p2_log_p: Tensor, entropy: Tensor) -> Tensor:
    """[N] S2, from the sums over the vocabulary of p^2 and p^2 ln p. It is never negative; rounding
    is cut off."""
    return (sum_p2_log_p + entropy * sum_p2).clamp_min(0)


def sensitivity(log_prob: Tensor, entropy: Tensor, s2: Tensor) -> Tensor:
    """[N] Phi of the sampled token: the entropy falls at this rate per unit of advantage and
    step."""
    return log_prob.exp() * (log_prob + entropy) - s2


def critical_surprisal(entropy: Tensor, s2: Tensor) -> Tensor:
    """[N] float64 s*, at most H, and H where the distribution is uniform on its support."""
    entropy = entropy.to(torch.float64)
    return entropy - lambert_w0(s2.to(torch.float64) * entropy.exp())


def lambert_w0(x: Tensor) -> Tensor:
    """The w >= -1 with w e^w = x, in float64, for x >= -1/e; NaN below. Halley's iteration from a
    bound near it."""
    x = x.to(torch.float64)
    # series about the branch point -1/e
    near_branch = -1 + (2 * (torch.e * x + 1).clamp_min(0)).sqrt()
    w = torch.where(
        x < -0.25, near_branch, torch.where(x > torch.e, x.clamp_min(2).log(), x / (1 + x))
    )
    for _ in range(_HALLEY_STEPS):
        gap = w - x * (-w).exp()  # f / e^w with f = w e^w - x, which does not overflow
        slope = w + 1
        step = gap / (slope - (w + 2) * gap / (2 * slope))
        # at the branch point the slope is 0 and w is already right
        w = torch.where(slope.abs() > 1e-12, (w - step).clamp_min(-1), w)
    return torch.where(x >= -1 / torch.e - 1e-15, w, float("nan"))


def is_rare(phi: Tensor) -> Tensor:
    """[N] bool: past the critical surprisal, s > s*, which is Phi < 0."""
    return phi < -_NEUTRAL


def quadrants(batch: TokenBatch, phi: Tensor) -> dict[str, Tensor]:
    """[N] bool each: the tokens of U+, L+, U-, L- among those that carry loss. Advantage 0 is in
    none."""
    rare = is_rare(phi)
    plus, minus = batch.loss_mask & (batch.advantage > 0), batch.loss_mask & (batch.advantage < 0)
    return dict(
        zip(QUADRANTS, (plus & ~rare, plus & rare, minus & ~rare, minus & rare), strict=True)
    )


def sensitivity_of(batch: TokenBatch) -> Tensor:
    """[N] Phi of the tokens of a batch. Raises ValueError without sum_p2 and sum_p2_log_p."""
    return sensitivity(batch.old_log_prob.detach(), batch.entropy, _second_moment_of(batch))


def _second_moment_of(batch: TokenBatch) -> Tensor:
    if batch.sum_p2 is None or batch.sum_p2_log_p is None:
        raise ValueError("the entropy sensitivity needs sum_p2 and sum_p2_log_p of every token")
    return second_moment(batch.sum_p2, batch.sum_p2_log_p, batch.entropy)


def sensitivity_requests(batch: TokenBatch, push: Tensor) -> Mapping[str, Request]:
    """Statistics of the whole batch that `EntropyForecast.of` reads.

    Args:
        batch: with sum_p2 and sum_p2_log_p.
        push: [N] slope of the objective (minus the loss) in every token's log-prob: what the method
            makes of the advantage, divided as its aggregation divides. A / N is the plain policy
            gradient.
    """
    s2, phi = _second_moment_of(batch), sensitivity_of(batch)
    plain = -batch.advantage * phi
    asked: dict[str, Request] = {
        "sensitivity/tokens": Count(batch.loss_mask),
        "sensitivity/change": Sum(-push * phi, batch.loss_mask),
        "sensitivity/plain": Sum(plain, batch.loss_mask),
        "sensitivity/rare": Count(batch.loss_mask & is_rare(phi)),
        "sensitivity/critical": Mean(critical_surprisal(batch.entropy, s2), batch.loss_mask),
    }
    for name, where in quadrants(batch, phi).items():
        asked[f"sensitivity/{name}"] = Sum(plain, where)
        asked[f"sensitivity/{name}_tokens"] = Count(where)
    return asked


@dataclass(frozen=True)
class EntropyForecast:
    """First-order forecast of one step, 0-dim tensors.

    Rates are per unit of a step that moves every token's logits by its advantage times (one_hot(a)
    - p), nats.

    change: rate of the mean entropy under what the method makes of the advantages.
    plain_change: the same under the advantages as they are; the sum of the masses.
    masses: by quadrant, its part of `plain_change`.
    shares: by quadrant, its share of the tokens.
    rare_share: share of tokens past their critical surprisal.
    critical_surprisal: mean of s*, nats.
    neutral_weight: W*, the weight on L+ for which `plain_change` would be zero.
    """

    change: Tensor
    plain_change: Tensor
    masses: dict[str, Tensor]
    shares: dict[str, Tensor]
    rare_share: Tensor
    critical_surprisal: Tensor
    neutral_weight: Tensor

    @classmethod
    def of(cls, statistics: Statistics, temperature: float = 1.0) -> EntropyForecast:
        """The forecast from the answers to `sensitivity_requests`; `temperature` divided the
        logits."""
        tokens = scalar(statistics, "sensitivity/tokens").clamp_min(1)
        per_token = tokens * temperature**2
        plain = scalar(statistics, "sensitivity/plain")
        rare_plus = scalar(statistics, "sensitivity/rare_plus")
        return cls(
            change=scalar(statistics, "sensitivity/change") / temperature**2,
            plain_change=plain / per_token,
            masses={
                name: scalar(statistics, f"sensitivity/{name}") / per_token for name in QUADRANTS
            },
            shares={
                name: scalar(statistics, f"sensitivity/{name}_tokens") / tokens
                for name in QUADRANTS
            },
            rare_share=scalar(statistics, "sensitivity/rare") / tokens,
            critical_surprisal=scalar(statistics, "sensitivity/critical"),
            neutral_weight=neutral_weight(-plain, rare_plus),
        )

    def metrics(self) -> dict[str, Tensor]:
        return {
            "forecast/entropy_change": self.change,
            "forecast/plain_change": self.plain_change,
            "forecast/rare_share": self.rare_share,
            "forecast/critical_surprisal": self.critical_surprisal,
            "forecast/neutral_weight": self.neutral_weight,
            **{f"forecast/mass_{name}": value for name, value in self.masses.items()},
            **{f"forecast/share_{name}": value for name, value in self.shares.items()},
        }


def neutral_weight(decrease: Tensor, increase: Tensor) -> Tensor:
    """W* = 1 + Lambda / Gamma; NaN where no token of L+ could raise the entropy.

    Args:
        decrease: Lambda, the sum of A Phi over the batch.
        increase: Gamma, minus the sum of A Phi over L+.
    """
    return torch.where(increase > 0, 1 + decrease / increase, float("nan"))
