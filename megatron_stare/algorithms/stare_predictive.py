"""A variant of STARE with a controller that steers the mean entropy to a target. The controller
forecasts how each step changes the entropy. The controller learns from measured changes how to
correct its forecasts, and chooses W and M so that the entropy moves to the target. The method was
developed in this project.

To first order, a step changes the mean entropy by kappa u + d, where u is the forecast and the
controller learns kappa and d. The forecast u is computed from Phi (sensitivity.py):

    u = P + (W - 1) G+ + (M - 1) G-         P = -sum c A Phi over all tokens
    G+ = -sum c A Phi over L+, and G- over L-, without tokens whose Phi is not negative

Here c is a token's coefficient in the loss. Tokens whose Phi is not negative keep the weight 1.

After the update the trainer measures y, the change in the mean entropy of the same tokens. The
controller fits the line y = kappa u + d to the forecasts u and the measured changes y. The fit uses
recursive least squares with a forgetting factor (Ljung, System Identification, 1999, section 11.2).
The mean entropy of other tokens, such as the tokens of the next batch, changes by y + b instead of
y. A state estimator tracks the number b and the policy's mean entropy h. The inputs of the
estimator are the mean entropy of every batch and the measured changes y. Before the next update:

    r = min(approach (target - h), largest target) + next target - target
    e = (r - d - b) / kappa - P             D = G+^2 + G-^2 + (floor mean G+)^2
    W = 1 + G+ e / D, M = 1 + G- e / D

Both factors are then limited to their bounds. If a bound limits one factor, the forecast changes
less than planned. The controller then makes up for the difference with the other factor, within the
bounds of the other factor.

The controller does not choose W and M if fewer than five changes have been measured, if kappa is at
most twice its standard error, or if G+ is at most `floor` times the running mean of G+. The step
then uses STARE's gate and STARE's fixed weights `amplify` and `attenuate`. Two predictors of the
next step's entropy change were compared in eight runs of the quickstart. The first predictor was
the line y = kappa u + d, and the second predictor was a running mean of the earlier changes. The
mean squared error of the fitted line's predictions was 0.62 times the mean squared error of the
running mean's predictions (benchmarks/forecast_value.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_stare.algorithms.method import State
from megatron_stare.algorithms.sensitivity import is_rare, sensitivity_of
from megatron_stare.algorithms.stare import Stare
from megatron_stare.algorithms.token_sets import Variant
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Mean, Request, Statistics, Sum, scalar
from megatron_stare.records.metric import Metric

METRICS = (
    Metric(
        "predictive/active",
        "0 or 1",
        "1: W and M are chosen by the forecast; 0: they are STARE's, behind its gate",
        "1 after some steps; 0 for long: the forecast does not predict the measured change",
    ),
    Metric(
        "predictive/kappa",
        "factor",
        "measured change of the entropy over its forecast, fitted",
        "above 0; follows optimizer/lr and drifts slowly",
    ),
    Metric(
        "predictive/drift",
        "nats",
        "part of a step's change that the forecast does not explain, fitted",
        "small beside forecast/measured_change",
    ),
    Metric(
        "predictive/level",
        "nats",
        "entropy that the controller compares with the target: filtered over batches",
        "near entropy/mean, but smoother",
    ),
    Metric(
        "predictive/wanted",
        "nats",
        "change of the entropy that this step is to make",
        "near 0 at the target",
    ),
)

ENOUGH = 5  # measurements before the line is trusted
_CLIP = 3.0  # standard deviations by which a measurement may miss its prediction in the fit
_SPREAD = 1e10  # of an unknown kappa and d; large beside 1 / u^2
_ZEROS = (  # state before the first step; `pending` is the change expected since `level`
    *("active", "steps", "begun", "level", "bias", "pending", "held", "wanted", "forecast"),
    "usable",  # whether `forecast` is that of this step
    *("kappa", "drift", "cross", "square", "measured"),
)


@dataclass(frozen=True, kw_only=True)
class StarePredictive(Stare):
    """Settings of STARE with predictive control.

    `entropy_target`: the target entropy, nats; required.
    `target_end`: the target after the ramp, nats. If `target_end` is null, the target is constant.
    `ramp_start`: the number of steps before the target begins to move.
    `ramp_steps`: the number of steps in which the target moves linearly to `target_end`.
    `approach`: the fraction of the gap that the controller tries to close in one step. The gap is
        the target minus the controller's estimate of the mean entropy.
    `trust`: the weight of a batch's mean entropy in the controller's estimate of the mean entropy.
    `forget`: the forgetting factor of the fit. Every new measurement multiplies the weights of all
        earlier measurements in the fit by `forget`.
    `largest`: a limit on the planned rise of the entropy in one step, as a fraction of the target.
        In each step, the controller plans a change of the entropy. The planned change is the sum of
        two parts. The first part is `approach` times the gap. The second part is the target of the
        next step minus the target of this step. `largest` limits only the first part: the first
        part is at most `largest` times the target.
    `floor`: the controller chooses W and M only if G+ is above `floor` times the running mean of
        G+.
    `measure_every`: the number of steps between measurements. A measurement takes one forward pass.
    """

    variant: Variant = "C2"
    amplify_max: float = 3.0
    attenuate_min: float = 0.3
    target_end: float | None = None
    ramp_start: int = 0
    ramp_steps: int = 0
    approach: float = 0.2
    trust: float = 0.15
    forget: float = 0.99
    largest: float = 0.033
    floor: float = 0.15
    measure_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.entropy_target is None:
            raise ValueError("predictive control needs an entropy_target, which is null")
        if self.adaptive or self.gate != "batch" or self.gate_entropy != "response":
            raise ValueError(
                "predictive control chooses the weights by the entropy of all response tokens:"
                " adaptive=false, gate=batch, gate_entropy=response"
            )
        if self.aggregation == "micro_batch_mean":
            raise ValueError("predictive control does not forecast with micro_batch_mean")
        if self.variant not in ("O1", "C2"):
            raise ValueError("predictive control knows the variants O1 and C2")
        if not 1 <= self.amplify <= self.amplify_max:
            raise ValueError("amplify must lie in [1, amplify_max]")
        if not 0 < self.attenuate_min <= self.attenuate:
            raise ValueError("attenuate_min must lie in (0, attenuate]")
        for name in ("approach", "trust", "forget"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1]")
        if self.largest <= 0 or self.floor < 0 or self.measure_every < 1:
            raise ValueError("largest must be above 0, floor at least 0, measure_every at least 1")
        if (self.target_end is None) != (self.ramp_steps == 0) or min(
            self.ramp_start, self.ramp_steps
        ) < 0:
            raise ValueError("target_end needs ramp_steps of at least 1, and ramp_steps target_end")
        if self.target_end is not None and not self.target_end > 0:
            raise ValueError("target_end must be above 0 nats")

    @property
    def needs_second_moment(self) -> bool:
        return True

    @property
    def reads_log_prob_pass(self) -> str | None:
        return "predictive control forecasts from the log-prob pass"

    @property
    def measures_every(self) -> int:
        return self.measure_every

    def initial_state(self) -> dict[str, float]:
        return {
            **super().initial_state(),
            **dict.fromkeys(_ZEROS, 0.0),
            "spread": _SPREAD,  # of kappa, with `cross` and `spread_drift` the fit's matrix
            "spread_drift": _SPREAD,
        }

    def target(self, step: Tensor) -> Tensor:
        """Returns the target entropy of a step as a 0-dim float64 tensor. Steps count from 0."""
        assert self.entropy_target is not None
        begins = torch.full_like(step, self.entropy_target)
        if self.target_end is None:
            return begins
        share = ((step - self.ramp_start) / self.ramp_steps).clamp(0, 1)
        return begins + share * (self.target_end - self.entropy_target)

    def asks(self, batch: TokenBatch, kept: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        asked = dict(super().asks(batch, kept, known))
        if isinstance(entropy := asked["entropy"], Mean):
            asked["entropy"] = replace(entropy, exact=True)
        if "tokens" not in known or any(each.name not in known for each in self.selects):
            return asked
        change = -self.coefficients(batch, known) * kept.advantage * sensitivity_of(kept)
        if self.correction is not None:
            if any(name not in known for name in self.correction.final_requests(kept, known)):
                return asked
            change = change * self.correction.weights(batch, known)
        asked["predictive/plain"] = Sum(change, kept.loss_mask, exact=True)
        for each in self.selects:
            chosen = self.selection.members(each, kept, known) & self._sure(kept)
            asked[f"predictive/{each.name}"] = Sum(change, chosen, exact=True)
        return asked

    def control(self, state: State, statistics: Statistics) -> State:
        """Chooses this step's factors W (for L+) and M (for L-). If an input statistic is NaN or
        infinite, only the state's entries `steps` and `usable` change."""
        state = super(Stare, self).control(state, statistics)
        entropy = scalar(statistics, "entropy").to(torch.float64)
        plain, plus, minus = (
            scalar(statistics, f"predictive/{name}").to(torch.float64)
            if f"predictive/{name}" in statistics
            else torch.zeros_like(entropy)
            for name in ("plain", "plus", "minus")
        )
        steps = state["steps"]
        target, following = self.target(steps), self.target(steps + 1)
        first = state["begun"] == 0
        before = torch.where(first, entropy, state["level"] + state["pending"] + state["bias"])
        level = before + self.trust * (entropy - before)
        bias = state["bias"] + self.trust**2 / 4 * (entropy - before)  # slower than the level
        held = torch.where(first, plus, 0.9 * state["held"] + 0.1 * plus)
        kappa, drift = state["kappa"], state["drift"]
        error = (state["square"] * state["spread"]).clamp_min(0).sqrt()
        fitted = (state["measured"] >= ENOUGH) & (kappa > 2 * error)

        most = self.largest * target
        # an entropy above the target may fall as fast as it does
        wanted = torch.minimum(self.approach * (target - level), most) + following - target
        lacks = (wanted - drift - bias) / kappa - plain
        floor = self.floor * held
        size = plus**2 + minus**2 + floor**2
        free_w, free_m = 1 + plus * lacks / size, 1 + minus * lacks / size
        amplify = free_w.clamp(1, self.amplify_max)
        attenuate = free_m.clamp(self.attenuate_min, 1)
        cut_w, cut_m = (free_w - amplify) * plus, (free_m - attenuate) * minus
        amplify = (amplify + cut_m / plus).clamp(1, self.amplify_max)
        attenuate = torch.where(minus < 0, attenuate + cut_w / minus, attenuate)
        attenuate = attenuate.clamp(self.attenuate_min, 1)

        active = fitted & (plus > floor) & amplify.isfinite() & attenuate.isfinite()
        below = (entropy < target).to(torch.float64)
        gate = torch.where(active, torch.ones_like(below), below)
        amplify = torch.where(active, amplify, self.amplify)
        attenuate = torch.where(active, attenuate, self.attenuate)
        forecast = plain + gate * ((amplify - 1) * plus + (attenuate - 1) * minus)
        new = {
            "active": active.to(torch.float64),
            "gate": gate,
            "amplify": amplify,
            "attenuate": attenuate,
            "begun": torch.ones_like(level),
            "level": level,
            "bias": bias,
            "held": held,
            "wanted": wanted,
            "forecast": forecast,
            "pending": torch.where(fitted, kappa * forecast + drift, 0.0),
        }
        finite = entropy.isfinite() & plain.isfinite() & plus.isfinite() & minus.isfinite()
        return state | {
            "steps": steps + 1,
            "usable": finite.to(torch.float64),
            **{name: torch.where(finite, value, state[name]) for name, value in new.items()},
        }

    def observe(self, state: State, change: Tensor | None) -> State:
        """Updates kappa and d with one more measured change of the mean entropy. If the optimizer
        step was not taken, the entropy has not changed, so kappa and d stay the same."""
        if change is None:
            return state | {"pending": torch.zeros_like(state["pending"])}
        u, change = state["forecast"], change.to(torch.float64)
        missed = change - state["kappa"] * u - state["drift"]
        # misses of exactly 0 say nothing about the next one
        clips = (state["measured"] >= ENOUGH) & (state["square"] > 0)
        most = torch.where(clips, _CLIP * state["square"].sqrt(), torch.inf)
        missed = torch.minimum(torch.maximum(missed, -most), most)
        slope = state["spread"] * u + state["cross"]
        offset = state["cross"] * u + state["spread_drift"]
        whole = self.forget + u * slope + offset
        spread = (state["spread"] - slope**2 / whole) / self.forget
        other = (state["spread_drift"] - offset**2 / whole) / self.forget
        # forgetting without new information would let the spread grow without end
        kept = (_SPREAD / torch.maximum(spread, other)).clamp_max(1)
        measured = state["measured"] + 1
        share = 1 / measured.clamp_max(max(1.0, 1 / max(1e-3, 1 - self.forget)))
        new = {
            "kappa": state["kappa"] + slope / whole * missed,
            "drift": state["drift"] + offset / whole * missed,
            "spread": kept * spread,
            "spread_drift": kept * other,
            "cross": kept * (state["cross"] - slope * offset / whole) / self.forget,
            "square": state["square"] + share * (missed**2 - state["square"]),
            "measured": measured,
            "level": state["level"] + change,
            "pending": torch.zeros_like(change),
        }
        finite = change.isfinite() & (state["usable"] > 0)
        return state | {name: torch.where(finite, new[name], state[name]) for name in new}

    def weights(self, batch: TokenBatch, statistics: Statistics, state: State) -> Tensor:
        """Returns a tensor [N] float32 with one factor for each token. The factor multiplies the
        token's advantage. The factor is 1 for every token whose Phi is not negative, even in L+ and
        L-."""
        return torch.where(self._sure(batch), super().weights(batch, statistics, state), 1.0)

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        return {
            **super().metrics(statistics, state),
            "entropy/target": self.target(state["steps"] - 1),
            **{
                f"predictive/{name}": state[name]
                for name in ("active", "kappa", "drift", "level", "wanted")
            },
        }

    @staticmethod
    def _sure(batch: TokenBatch) -> Tensor:
        """Returns a mask [N] bool that is True for each token whose Phi is negative beyond rounding
        errors. STARE assumes that all tokens of L+ and L- have a negative Phi."""
        return is_rare(sensitivity_of(batch))
