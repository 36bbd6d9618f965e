"""Suggests the entropy target and the weights W and M of STARE from the first steps of a run. The
module does not need torch.

L+ and L- are the sets of tokens that STARE selects. W is the weight of the tokens in L+, and M is
the weight of the tokens in L-. P is the change of the entropy per unit step in the logits if W = 1
and M = 1. The module algorithms/sensitivity.py computes P to first order in the step size. The
tokens of L+ contribute G+ to the entropy change P, and the tokens of L- contribute G- to P. With
other weights, the entropy change is P + (W - 1) G+ + (M - 1) G-. The suggested weights satisfy the
following equation and are as near to 1 as possible:

    P + (W - 1) G+ + (M - 1) G- = -MARGIN P.

W must be in [1, AMPLIFY_MAX], and M must be in [ATTENUATE_MIN, 1]. If no allowed W and M satisfy
the equation, the module suggests the allowed W and M that bring the two sides of the equation
closest together. The module suggests `AMPLIFY_MAX` for W if two conditions both hold: the entropy
is predicted to fall for every allowed pair of W and M, and the measured G+ is 0 or slightly
negative. Even if the measured G+ is slightly negative, the true G+ may be positive. If the true G+
is positive, a large W raises the entropy. The script benchmarks/laboratory/held_out.py compares the
suggested settings with a sweep over weights and targets.
"""

from __future__ import annotations

from dataclasses import dataclass

AMPLIFY_MAX, ATTENUATE_MIN = 3.0, 0.1
MARGIN = 1.0  # how fast the entropy rises while the gate is open, relative to its fall without
TARGET_SHARE = 0.6  # of the entropy at the start
NEAR_ZERO = 0.05  # of P: a G+ above minus this share counts as 0


@dataclass(frozen=True)
class Facts:
    """Mean values over the first steps of a run.

    `entropy`: mean entropy over the run's first 5 steps, in nats.
    `entropy_now`: mean entropy over the newest 5 steps that `megatron-stare suggest` has read, in
        nats.
    `plain`: P, the change of the entropy in nats for a step of size 1 in the logits, if both
        weights are 1.
    `plus`, `minus`: the contributions G+ and G- to the entropy change P, in nats per unit step in
        the logits.
    """

    entropy: float
    entropy_now: float
    plain: float
    plus: float
    minus: float


@dataclass(frozen=True)
class Suggestion:
    """Suggested settings of STARE's variant C2, and the reasons for the settings, one sentence
    each.

    `holds`: True if the forecast for the suggested weights says that the entropy does not fall.
    """

    entropy_target: float
    amplify: float
    attenuate: float
    reasons: tuple[str, ...]
    holds: bool


def suggest(facts: Facts) -> Suggestion:
    """Suggests an entropy target and weights, based on the means over a run's first steps."""
    target = TARGET_SHARE * facts.entropy
    reasons = [
        f"the target is {TARGET_SHARE:.0%} of the entropy at the start, {facts.entropy:.3g} nats:"
        " the policy can become more certain, but keeps alternatives"
    ]
    if facts.plain >= 0:
        reasons.append(
            f"without reweighting, the entropy does not fall (forecast {facts.plain:+.2g} nats a"
            " unit step): the paper's weights suffice"
        )
        return Suggestion(target, 1.1, 0.9, tuple(reasons), True)
    demand = -(1 + MARGIN) * facts.plain
    plus, minus = max(facts.plus, 0.0), min(facts.minus, 0.0)
    amplify, attenuate = _nearest(plus, minus, demand)
    reached = (amplify - 1) * plus + (attenuate - 1) * minus
    holds = reached >= -facts.plain
    doubtful = not holds and NEAR_ZERO * facts.plain < facts.plus <= 0
    if doubtful:
        amplify = AMPLIFY_MAX
    reasons.append(
        f"without reweighting, a unit step lowers the entropy by {-facts.plain:.2g} nats;"
        f" W = {amplify:.2f} raises it by {(amplify - 1) * plus:.2g} and M = {attenuate:.2f} by"
        f" {(attenuate - 1) * minus:.2g}"
    )
    if doubtful:
        reasons.append(
            f"the tokens of L+ change the entropy by {facts.plus:+.1g} nats, too little to tell the"
            " sign: amplifying them may help"
        )
    elif facts.plus <= 0:
        reasons.append(
            "the tokens of L+ do not raise the entropy on average: amplifying them does not help"
        )
    if facts.minus >= 0:
        reasons.append(
            "the tokens of L- do not lower the entropy on average: attenuating them does not help"
        )
    if not holds:
        reasons.append(
            "no weights within the bounds stop the fall of entropy; a larger algorithm.share, or"
            " algorithm.entropy_bonus with a target instead of entropy_target, may stop it"
        )
    return Suggestion(target, amplify, attenuate, tuple(reasons), holds)


def _nearest(plus: float, minus: float, demand: float) -> tuple[float, float]:
    """Returns the W and M nearest to 1 for which the sum (W - 1) G+ + (M - 1) G- equals `demand`.
    If the sum is below `demand` for all W and M within their bounds, returns the W and M that give
    the largest sum.

    Args:
        plus: G+, at least 0.
        minus: G-, at most 0.
    """
    size = plus**2 + minus**2
    if size == 0:
        return 1.0, 1.0
    amplify, attenuate = 1 + plus * demand / size, 1 + minus * demand / size
    if amplify > AMPLIFY_MAX:
        amplify = AMPLIFY_MAX
        if minus:
            attenuate = 1 + (demand - (amplify - 1) * plus) / minus
    if attenuate < ATTENUATE_MIN:
        attenuate = ATTENUATE_MIN
        if plus:
            amplify = 1 + (demand - (attenuate - 1) * minus) / plus
    return min(max(amplify, 1.0), AMPLIFY_MAX), min(max(attenuate, ATTENUATE_MIN), 1.0)
