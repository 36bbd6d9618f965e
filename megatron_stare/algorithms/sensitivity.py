"""Computes to first order how a policy-gradient step changes the entropy (STARE, arXiv 2606.19236,
section 3 and appendix D).

Let A be the advantage of a sampled token, let one_hot(a) be the one-hot vector of the sampled
token, and let p be the vector of all token probabilities at the position of the sampled token.
Suppose that a step of size eta adds the vector eta A (one_hot(a) - p) to the logits at this
position. The entropy H at the token's position then changes at the rate dH/deta = -A Phi(a). Phi(a)
is the rate at which H falls if the advantage is 1. In the formulas below, the number p is the
probability of the sampled token, and p_v is the probability of vocabulary entry v.

    Phi(a) = p (ln p + H) - S2
    S2 = sum_v p_v^2 (ln p_v + H) = sum_v p_v^2 ln p_v + H sum_v p_v^2 >= 0
    Phi(a) > 0  if and only if  s < s* = H - W0(S2 e^H)        (s = -ln p, Lambert W0)

A token is common if its surprisal s is below the critical surprisal s*, and rare if s is above s*.
U+ contains the common tokens with positive advantage, and U- contains the common tokens with
negative advantage. L+ contains the rare tokens with positive advantage, and L- contains the rare
tokens with negative advantage. A step lowers the entropy at the tokens of U+ and L-, and raises the
entropy at the tokens of U- and L+. The critical surprisal s* depends on the whole distribution at a
position. All functions work elementwise on [N] positions, without host synchronisation.

If the sampling temperature is T, the values p, H, S2, Phi and s* describe the sampling distribution
softmax(z / T), where z are the logits. The gradients of ln p and of H with respect to z each have a
factor 1 / T. The change of H per unit step in z therefore has a factor 1 / T^2.
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
        "first-order change of the mean entropy under the method's own loss",
        "near 0 or steered by the gate; far below 0 for long: collapse",
    ),
    Metric(
        "forecast/plain_change",
        "nats per unit step",
        "forecast/entropy_change under the plain advantages",
        "below forecast/entropy_change if the method raises entropy",
    ),
    Metric(
        "forecast/mass_common_plus",
        "nats per unit step",
        "part of forecast/plain_change that comes from U+: common tokens, A > 0",
        "the four masses add up to forecast/plain_change",
    ),
    Metric(
        "forecast/mass_rare_plus",
        "nats per unit step",
        "part of forecast/plain_change that comes from L+: rare tokens, A > 0",
        "the four masses add up to forecast/plain_change",
    ),
    Metric(
        "forecast/mass_common_minus",
        "nats per unit step",
        "part of forecast/plain_change that comes from U-: common tokens, A < 0",
        "the four masses add up to forecast/plain_change",
    ),
    Metric(
        "forecast/mass_rare_minus",
        "nats per unit step",
        "part of forecast/plain_change that comes from L-: rare tokens, A < 0",
        "the four masses add up to forecast/plain_change",
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
        "mean of s*, the surprisal past which a token is rare",
        "similar to stare/threshold_plus",
    ),
    Metric(
        "forecast/neutral_weight",
        "factor",
        "W*, the weight on L+ that would make forecast/plain_change 0",
        "above 1: without reweighting, entropy falls; NaN: L+ is empty",
    ),
)


QUADRANTS = ("common_plus", "rare_plus", "common_minus", "rare_minus")  # U+, L+, U-, L-
# Float32 log-probs carry errors near 1e-6. For a nearly certain token Phi is smaller, so rounding
# would decide its sign. Such tokens hardly move the entropy and count as common.
_NEUTRAL = 3e-6
_HALLEY_STEPS = 12  # converges cubically; six steps reach double precision for any x up to 1e12


def second_moment(sum_p2: Tensor, sum_p2_log_p: Tensor, entropy: Tensor) -> Tensor:
    """Returns S2, [N], which is the sum of p^2 (ln p + H) over the vocabulary. The arguments are
    the sums of p^2 and of p^2 ln p over the vocabulary, and the entropy H. Without rounding errors,
    S2 is never negative. If rounding makes the computed S2 negative, the function returns 0."""
    return (sum_p2_log_p + entropy * sum_p2).clamp_min(0)


def sensitivity(log_prob: Tensor, entropy: Tensor, s2: Tensor) -> Tensor:
    """Returns the entropy sensitivity Phi of the sampled tokens, [N]. For advantage 1, Phi is the
    rate at which the entropy falls per unit step."""
    return log_prob.exp() * (log_prob + entropy) - s2


def critical_surprisal(entropy: Tensor, s2: Tensor) -> Tensor:
    """Returns the critical surprisal s*, [N] float64. The critical surprisal is at most the entropy
    H, and equals H if the distribution is uniform on its support."""
    entropy = entropy.to(torch.float64)
    return entropy - lambert_w0(s2.to(torch.float64) * entropy.exp())


def lambert_w0(x: Tensor) -> Tensor:
    """Solves w e^w = x for w >= -1 in float64, by Halley's iteration. The result is NaN for x <
    -1/e."""
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
    """Returns the mask of the rare tokens, [N] bool. A token is rare if its surprisal is above the
    critical surprisal s*. Phi is then negative. If Phi is so close to 0 that the sign may be a
    rounding error, the token does not count as rare."""
    return phi < -_NEUTRAL


def quadrants(batch: TokenBatch, phi: Tensor) -> dict[str, Tensor]:
    """Returns four masks, [N] bool, one for each of the sets U+, L+, U- and L-. A token that has
    advantage 0 or is outside the loss mask is in none of the four sets."""
    rare = is_rare(phi)
    plus, minus = batch.loss_mask & (batch.advantage > 0), batch.loss_mask & (batch.advantage < 0)
    return dict(
        zip(QUADRANTS, (plus & ~rare, plus & rare, minus & ~rare, minus & rare), strict=True)
    )


def sensitivity_of(batch: TokenBatch) -> Tensor:
    """Returns the entropy sensitivity Phi of a batch's tokens, [N]. Raises ValueError if the batch
    lacks sum_p2 or sum_p2_log_p."""
    return sensitivity(batch.old_log_prob.detach(), batch.entropy, _second_moment_of(batch))


def _second_moment_of(batch: TokenBatch) -> Tensor:
    if batch.sum_p2 is None or batch.sum_p2_log_p is None:
        raise ValueError("the entropy sensitivity needs sum_p2 and sum_p2_log_p of every token")
    return second_moment(batch.sum_p2, batch.sum_p2_log_p, batch.entropy)


def sensitivity_requests(batch: TokenBatch, push: Tensor) -> Mapping[str, Request]:
    """Returns requests for the whole-batch statistics that `EntropyForecast.of` reads.

    Args:
        batch: the tokens, with their `sum_p2` and `sum_p2_log_p`.
        push: [N] derivative of the method's objective (minus the loss) with respect to every
            token's log-prob. The derivative includes the method's reweighting and divisor. For the
            plain policy gradient, the derivative is A / N.
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
    """First-order forecast of how one step changes the entropy, as 0-dim tensors.

    Rates are in nats per unit step. A unit step moves every token's logits by the token's advantage
    times (one_hot(a) - p).

    `change`: the rate at which the mean entropy changes under the method's own loss.
    `plain_change`: the rate at which the mean entropy changes under the plain advantages.
        `plain_change` is the sum of `masses`.
    `masses`: for each of the sets U+, L+, U- and L-, the part of `plain_change` that comes from the
        set's tokens.
    `shares`: for each of the sets U+, L+, U- and L-, the number of tokens in the set divided by the
        number of all tokens.
    `rare_share`: the share of all tokens whose surprisal is above the critical surprisal s*.
    `critical_surprisal`: the mean of the critical surprisal s*, nats.
    `neutral_weight`: W*, the weight on L+ for which `plain_change` would be zero.
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
        """Builds the forecast from the statistics of `sensitivity_requests`. `temperature` is the
        divisor of the logits."""
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
    """Returns the weight W* = 1 + Lambda / Gamma. If the advantages of the tokens in L+ were
    multiplied by W*, a step would not change the entropy. Returns NaN if the tokens of L+ do not
    raise the entropy.

    Args:
        decrease: Lambda, the sum of A Phi over the batch.
        increase: Gamma, the negated sum of A Phi over L+.
    """
    return torch.where(increase > 0, 1 + decrease / increase, float("nan"))
