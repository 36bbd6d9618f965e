"""How a policy-gradient step moves the entropy, to first order (STARE, arXiv 2606.19236, section 3 and appendix D).

Sampling token a with advantage A and moving the logits by eta A (one_hot(a) - p) changes the entropy at that position
at the rate dH/deta = -A Phi(a), with

    Phi(a) = p (ln p + H) - S2        S2 = sum_v p_v^2 (ln p_v + H) = sum p^2 ln p + H sum p^2 >= 0
    Phi(a) > 0  if and only if  s < s* = H - W0(S2 e^H)        (s = -ln p, Lambert W0)

so the entropy falls for common tokens (s < s*) of positive advantage, U+, and for rare ones of negative advantage, L-;
it rises on U- and on the rare tokens of positive advantage, L+. s* belongs to a position: it needs the distribution.
All functions are elementwise over [N] positions, without host synchronisation. At temperature T: divide by T^2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stare.batch import TokenBatch
from megatron_stare.statistics import Count, Request, Statistics, Sum, scalar

QUADRANTS = ("common_plus", "rare_plus", "common_minus", "rare_minus")  # U+, L+, U-, L-
_HALLEY_STEPS = 12  # converges cubically; double precision is reached in six from any x up to 1e12


def second_moment(sum_p2: Tensor, sum_p2_log_p: Tensor, entropy: Tensor) -> Tensor:
    """[N] S2, from the sums over the vocabulary of p^2 and p^2 ln p. It is never negative; rounding is cut off."""
    return (sum_p2_log_p + entropy * sum_p2).clamp_min(0)


def sensitivity(log_prob: Tensor, entropy: Tensor, s2: Tensor) -> Tensor:
    """[N] Phi of the sampled token: the entropy falls at this rate per unit of advantage and step."""
    return log_prob.exp() * (log_prob + entropy) - s2


def critical_surprisal(entropy: Tensor, s2: Tensor) -> Tensor:
    """[N] float64 s*, at most H, and H where the distribution is uniform on its support."""
    entropy = entropy.to(torch.float64)
    return entropy - lambert_w0(s2.to(torch.float64) * entropy.exp())


def lambert_w0(x: Tensor) -> Tensor:
    """The w >= -1 with w e^w = x, in float64, for x >= -1/e; NaN below. Halley's iteration from a bound near it."""
    x = x.to(torch.float64)
    near_branch = -1 + (2 * (torch.e * x + 1).clamp_min(0)).sqrt()  # series about the branch point -1/e
    w = torch.where(x < -0.25, near_branch, torch.where(x > torch.e, x.clamp_min(2).log(), x / (1 + x)))
    for _ in range(_HALLEY_STEPS):
        gap = w - x * (-w).exp()  # f / e^w with f = w e^w - x, which does not overflow
        slope = w + 1
        step = gap / (slope - (w + 2) * gap / (2 * slope))
        # at the branch point the slope is 0 and w is already right
        w = torch.where(slope.abs() > 1e-12, (w - step).clamp_min(-1), w)
    return torch.where(x >= -1 / torch.e - 1e-15, w, float("nan"))


def quadrants(batch: TokenBatch, phi: Tensor) -> dict[str, Tensor]:
    """[N] bool each: the tokens of U+, L+, U-, L- among those that carry loss. Advantage 0 is in none."""
    common = phi > 0
    plus, minus = batch.mask & (batch.advantage > 0), batch.mask & (batch.advantage < 0)
    return dict(zip(QUADRANTS, (plus & common, plus & ~common, minus & common, minus & ~common), strict=True))


def sensitivity_requests(batch: TokenBatch, weight: Tensor | None = None) -> Mapping[str, Request]:
    """What `EntropyForecast.of` needs of the whole batch.

    Args:
        batch: with sum_p2 and sum_p2_log_p.
        weight: [N] the method's factor on every token's advantage; None: 1.
    """
    if batch.sum_p2 is None or batch.sum_p2_log_p is None:
        raise ValueError("the entropy sensitivity needs sum_p2 and sum_p2_log_p of every token")
    log_prob = batch.old_log_prob.detach()
    s2 = second_moment(batch.sum_p2, batch.sum_p2_log_p, batch.entropy)
    phi = sensitivity(log_prob, batch.entropy, s2)
    advantage = batch.advantage if weight is None else batch.advantage * weight
    asked: dict[str, Request] = {
        "sensitivity/tokens": Count(batch.mask),
        "sensitivity/change": Sum(-advantage * phi, batch.mask),
        "sensitivity/unweighted": Sum(-batch.advantage * phi, batch.mask),
        "sensitivity/rare": Count(batch.mask & (-log_prob > critical_surprisal(batch.entropy, s2))),
    }
    for name, where in quadrants(batch, phi).items():
        asked[f"sensitivity/{name}"] = Sum(-batch.advantage * phi, where)
        asked[f"sensitivity/{name}_tokens"] = Count(where)
    return asked


@dataclass(frozen=True)
class EntropyForecast:
    """First-order forecast of one step, 0-dim tensors.

    change: d mean entropy / d eta of the weighted step, nats per unit of step in logit space.
    rare_share: share of tokens past their critical surprisal.
    masses: by quadrant, its part of the unweighted change.
    shares: by quadrant, its share of the tokens.
    neutral_weight: W*, the weight on L+ for which the unweighted change would be zero.
    """

    change: Tensor
    rare_share: Tensor
    masses: dict[str, Tensor]
    shares: dict[str, Tensor]
    neutral_weight: Tensor

    @classmethod
    def of(cls, statistics: Statistics) -> EntropyForecast:
        tokens = scalar(statistics, "sensitivity/tokens").clamp_min(1)
        masses = {name: scalar(statistics, f"sensitivity/{name}") / tokens for name in QUADRANTS}
        return cls(
            change=scalar(statistics, "sensitivity/change") / tokens,
            rare_share=scalar(statistics, "sensitivity/rare") / tokens,
            masses=masses,
            shares={name: scalar(statistics, f"sensitivity/{name}_tokens") / tokens for name in QUADRANTS},
            neutral_weight=neutral_weight(
                -scalar(statistics, "sensitivity/unweighted"), scalar(statistics, "sensitivity/rare_plus")
            ),
        )

    def metrics(self) -> dict[str, Tensor]:
        return {
            "forecast/entropy_change": self.change,
            "forecast/rare_share": self.rare_share,
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
