"""Watches a step's figures for what is out of the ordinary, and says what the run is to do about it.

A spike is a figure far from the median of the steps before, in units of their spread, so that neither a run's scale nor
single odd steps move the bound. What is compared with comes from the metrics of the run, so a resume goes on with it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megatron_stare.config.fault_sections import GuardsConfig
from megatron_stare.errors import GuardError, RollBack
from megatron_stare.records.metric import Metric

METRICS = (
    *(
        metric
        for name, what, key in (
            ("loss", "loss/policy", "loss"),
            ("grad_norm", "the largest gradient norm of the step's updates", "grad_norm"),
            ("agreement", "the mean difference of engine and trainer", "agreement"),
        )
        for metric in (
            Metric(
                f"guard/{name}",
                "spreads",
                f"of {what}, its distance from the median of the faults.guards.window steps before it",
                f"below faults.guards.{key}.spreads",
            ),
            Metric(
                f"guard/{name}_spike",
                "0 or 1",
                f"1: {what} is faults.guards.{key}.spreads or more away from that median",
                f"0; 1 is an alert, or what faults.guards.{key}.action says",
            ),
        )
    ),
    Metric(
        "guard/entropy_outside",
        "0 or 1",
        "1: entropy/mean is below faults.guards.entropy.low or above faults.guards.entropy.high",
        "0; 1 is an alert, or what faults.guards.entropy.action says",
    ),
    Metric(
        "guard/rollbacks",
        "rollbacks",
        "of the run so far; missing before the first",
        "few; faults.guards.rollbacks more than that stop the run",
    ),
    Metric("guard/left_out", "prompts", "that rollbacks left out of the data so far", "a few steps' batches"),
    Metric(
        "update/held",
        "updates",
        "not taken because their gradient norm was a spike, with faults.guards.grad_norm.action: stop or rollback",
        "0",
    ),
)

NORMAL = 1.4826  # median absolute deviations to a standard deviation, of normal figures
# Share of the median that a spread is at least: figures that hardly move are not judged by their rounding.
LEAST_SHARE = 0.05
# Nats below which engine and trainer agree, however much less they differed before (observability/metrics/alerts.py)
LEAST_AGREEMENT = {"float32": 1e-3, "bfloat16": 5e-3, "float16": 1e-3}
ENDS = ("stop", "rollback")


@dataclass(frozen=True)
class Fired:
    """A guard whose figure is out of bounds at a step, and what is to be done. text: what was measured."""

    step: int
    guard: str
    action: str
    text: str
    prompts: tuple[int, ...]  # cursors of the step's prompts


class Baseline:
    """A figure of the last steps, and how far the next one lies from them. Pure.

    Args:
        window: steps.
        known: steps without which nothing is said.
        both_ways: whether a figure can be too small as well.
        least: a figure up to this is never far.
    """

    def __init__(self, window: int, known: int, *, both_ways: bool = False, least: float = -math.inf) -> None:
        self._values: deque[float] = deque(maxlen=window)
        self._known, self._both_ways, self._least = known, both_ways, least

    def add(self, value: float) -> None:
        """Takes the figure of a step; what is not finite is passed over."""
        if math.isfinite(value):
            self._values.append(value)

    def scale(self) -> tuple[float, float] | None:
        """Median and spread of the figures; None where there are too few, or all are 0."""
        if len(self._values) < self._known:
            return None
        middle = median(self._values)
        spread = max(NORMAL * median(abs(value - middle) for value in self._values), LEAST_SHARE * abs(middle))
        return (middle, spread) if spread > 0 else None

    def distance(self, value: float) -> float | None:
        """Spreads between the figure and the median, at least 0; None where there is nothing to compare with."""
        if (scale := self.scale()) is None or not math.isfinite(value):
            return None
        middle, spread = scale
        if value <= self._least:
            return 0.0
        away = (value - middle) / spread
        return abs(away) if self._both_ways else max(away, 0.0)

    def limit(self, spreads: float) -> float:
        """The largest figure that is no spike; inf where there is nothing to compare with."""
        if (scale := self.scale()) is None:
            return math.inf
        return max(scale[0] + spreads * scale[1], self._least)

    def is_spike(self, value: float, spreads: float) -> bool:
        """Whether the figure is above `limit`, or as far below the median where it can be too small."""
        if (scale := self.scale()) is None or not math.isfinite(value):
            return False
        return value > self.limit(spreads) or (self._both_ways and value < scale[0] - spreads * scale[1])


class Guards:
    """The guards of a run.

    Args:
        dtype: of the model in training.
    """

    def __init__(self, config: GuardsConfig, dtype: str) -> None:
        self._config = config
        self._settings = {"loss": config.loss, "grad_norm": config.grad_norm, "agreement": config.agreement}
        sizes = config.window, config.known
        self._baselines = {
            "loss": Baseline(*sizes, both_ways=True),
            "grad_norm": Baseline(*sizes),
            "agreement": Baseline(*sizes, least=LEAST_AGREEMENT[dtype]),
        }
        self.fired: list[Fired] = []  # of the last step

    def restore(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Takes the metrics of a resumed run's steps, oldest first: figures are compared with those of the whole
        run."""
        for row in rows:
            self._remember(row)

    def norm_limit(self, agreement: Mapping[str, float]) -> float:
        """The gradient norm above which an update is not to be taken; inf: none is.

        Args:
            agreement: metrics of the step's log-prob pass, as far as engine and trainer were compared there. Where
                they are a spike that ends the run, no update is to be taken: the limit is 0.
        """
        if self._settings["agreement"].action in ENDS and self._is_spike("agreement", _figure("agreement", agreement)):
            return 0.0
        guard = self._settings["grad_norm"]
        return self._baselines["grad_norm"].limit(guard.spreads) if guard.action in ENDS else math.inf

    def judge(self, step: int, metrics: Mapping[str, float], prompts: Sequence[int]) -> dict[str, float]:
        """The guards' metrics of a step, from the trainer's; `fired` is what they say is to be done.

        Args:
            prompts: cursors of the step's prompts.
        """
        found: dict[str, float] = {}
        self.fired = []
        for name, guard in self._settings.items():
            value, baseline = _figure(name, metrics), self._baselines[name]
            away = baseline.distance(value)
            if guard.action == "off" or away is None:
                continue
            spike = self._is_spike(name, value)
            found |= {f"guard/{name}": away, f"guard/{name}_spike": float(spike)}
            if spike:
                scale = baseline.scale()
                assert scale is not None
                text = f"{WORDS[name]} {value:.3g} is {away:.3g} spreads from the median {scale[0]:.3g} before it"
                self.fired.append(Fired(step, name, guard.action, text, tuple(prompts)))
        found |= self._judge_entropy(step, metrics, prompts)
        self._remember(metrics)
        return found

    @property
    def ends(self) -> bool:
        """Whether the last step is to end the run, or to send it back, so that its state is not to be kept."""
        return any(each.action in ENDS for each in self.fired)

    def heed(self, rollbacks: int) -> None:
        """Ends the run where the last step's figures say so, after they were logged and before the step is saved.

        Args:
            rollbacks: made so far.

        Raises:
            RollBack: the run is to go back and leave the step's prompts out.
            GuardError: it is to stop, or too often went back.
        """
        ending = sorted((each for each in self.fired if each.action in ENDS), key=lambda each: ENDS.index(each.action))
        if not ending:
            return
        first = ending[0]
        where, text = f"step {first.step}", "; ".join(each.text for each in ending)
        fix = f"look at the step's batch in the folder guards/, or change faults.guards.{first.guard}"
        if first.action == "stop":
            raise GuardError(text, where=where, fix=fix)
        if rollbacks >= self._config.rollbacks:
            raise GuardError(
                f"{text}; the run has gone back {rollbacks} times already",
                where=where,
                fix=f"{fix}, or faults.guards.rollbacks",
            )
        raise RollBack(first.step, text, first.prompts)

    def _judge_entropy(self, step: int, metrics: Mapping[str, float], prompts: Sequence[int]) -> dict[str, float]:
        band, entropy = self._config.entropy, metrics.get("entropy/mean", math.nan)
        if band.action == "off" or (band.low is None and band.high is None) or not math.isfinite(entropy):
            return {}
        low, high = -math.inf if band.low is None else band.low, math.inf if band.high is None else band.high
        outside = not low <= entropy <= high
        if outside:
            text = f"entropy {entropy:.3g} is outside faults.guards.entropy, {low:g} to {high:g} nats"
            self.fired.append(Fired(step, "entropy", band.action, text, tuple(prompts)))
        return {"guard/entropy_outside": float(outside)}

    def _is_spike(self, name: str, value: float) -> bool:
        return self._baselines[name].is_spike(value, self._settings[name].spreads)

    def _remember(self, row: Mapping[str, float]) -> None:
        for name, baseline in self._baselines.items():
            baseline.add(_figure(name, row))


WORDS = {
    "loss": "the loss",
    "grad_norm": "the gradient norm",
    "agreement": "the difference of engine and trainer",
}

# a figure's metrics: the first that a step has
FIGURES = {
    "loss": ("loss/policy",),
    "grad_norm": ("optimizer/grad_norm_max", "optimizer/grad_norm"),  # the first, where a step has several updates
    "agreement": ("agreement/mean", "rollout/logprob_diff_mean"),  # the second, of an engine in process in float32
}


def _figure(name: str, row: Mapping[str, float]) -> float:
    return next((row[key] for key in FIGURES[name] if key in row), math.nan)
