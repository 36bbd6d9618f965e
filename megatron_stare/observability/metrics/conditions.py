"""Defines the conditions that rules test on the metrics of a step. A condition can compare a step
with a window of earlier steps. The code here is pure.

Each kind of condition is a class. The table `RULES` in rules.py contains the conditions, and the
consequence of each condition, such as an alert or the end of the run.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

Row = Mapping[str, float]

BAND = 0.25  # entropy within this share of its target is on target
# section of the configuration with the settings of rules that have a `guard`
GUARDS = "faults.guards"

# Single batches leave the band by chance; ten in a row do not, and a working controller returns
# sooner.
OFF_TARGET_STEPS = 10
# Without a target: entropy that halves in fewer steps collapses, as in published collapses of plain
# GRPO. A slower fall is the normal sharpening of a learning policy.
HALVING_STEPS = 40
# Steps over which the fall is measured, between the means of its halves: one odd batch is no fall.
FALL_WINDOW = 20
# Share of the initial entropy above which the fast first steps of a base model are no collapse.
FALLEN_SHARE = 0.5
START_STEPS = 5  # averaged for the run's initial value
# In 16 bits: growth of the mean difference since the run's first steps. By chance windows differ by
# a tenth or two. Means up to TREND_MEAN are rounding, whatever their initial value.
TREND = 2.0
TREND_MEAN = 5e-3  # nats
# Growth stops the run only above this share of `agreement.mean`, however small the mean was before.
TREND_FLOOR = 0.2
GRAD_SPIKE = 10.0  # times the median; batches of one run differ two- or threefold
# steps of the median: long enough to be steady, short enough to follow training
GRAD_WINDOW = 50
GRAD_KNOWN = 10  # steps needed for a meaningful median
NORMAL = 1.4826  # standard deviation of normal values / their median absolute deviation
# Smallest spread, as a share of the median: values that hardly change are not judged by rounding.
LEAST_SHARE = 0.05


class Window:
    """Keeps the first and the latest values of a metric, and computes statistics of these values.
    Pure.

    Args:
        steps: number of latest values to keep.
        known: number of finite latest values that a comparison requires.
        first: number of the run's first values to keep.
        gaps: whether the latest values include values that are not finite. If False, values that
            are not finite are skipped.
    """

    def __init__(self, steps: int, known: int = 1, *, first: int = 0, gaps: bool = False) -> None:
        self.first: list[float] = []
        self.latest: deque[float] = deque(maxlen=steps)
        self._count, self._steps, self._starts = 0, steps, first
        self._known, self._gaps = known, gaps

    def add(self, value: float) -> None:
        """Adds a step's value to the window."""
        if math.isfinite(value):
            self._count += 1
            if len(self.first) < self._starts:
                self.first.append(value)
        if math.isfinite(value) or self._gaps:
            self.latest.append(value)

    def median(self) -> float | None:
        """Returns the median of the latest values, or None if there are too few finite values."""
        known = [value for value in self.latest if math.isfinite(value)]
        return statistics.median(known) if len(known) >= self._known else None

    def growth(self) -> float | None:
        """Returns the median of the latest values divided by the median of the first values.
        Returns None until the window has received `first` + `steps` finite values. With fewer than
        `first` + `steps` finite values, the first values and the latest values would overlap. Also
        returns None if the median of the first values is not above 0."""
        if self._count < self._starts + self._steps:
            return None
        before = statistics.median(self.first)
        return statistics.median(self.latest) / before if before > 0 else None

    def scale(self) -> tuple[float, float] | None:
        """Returns the median and the spread of the latest values. Returns None if there are too few
        finite values or all values are 0."""
        if (middle := self.median()) is None:
            return None
        deviation = statistics.median(
            abs(value - middle) for value in self.latest if math.isfinite(value)
        )
        spread = max(NORMAL * deviation, LEAST_SHARE * abs(middle))
        return (middle, spread) if spread > 0 else None


class Found(NamedTuple):
    """Result of a condition for a step: whether the condition holds, and values that explain the
    result.

    `measured`: the values that explain the result, by name. The mapping is empty if the condition
        reports no values.
    """

    holds: bool
    measured: Mapping[str, float | str] = {}


NOTHING = Found(False)


@dataclass(frozen=True)
class Condition(ABC):
    """Base class of all conditions. Each subclass is one kind of condition. `str()` describes the
    condition for docs/guards.md.

    `metrics`: metric names in order of preference. Most conditions read only the first metric in
        `metrics` that the step contains, but `Above` reads all metrics in `metrics`.
    """

    metrics: tuple[str, ...]

    def window(self) -> Window:
        """Returns an empty window, which collects the earlier values that this condition needs."""
        return Window(0)

    def figure(self, row: Row) -> float:
        """Returns the value of the metric in a step, or NaN if the step lacks the metric. Every
        comparison with NaN is false."""
        return next((row[name] for name in self.metrics if name in row), math.nan)

    @abstractmethod
    def judge(self, row: Row, before: Window) -> Found:
        """Tests this condition on a step's metrics, given the values of earlier steps."""


@dataclass(frozen=True)
class Above(Condition):
    """Tests whether any of the metrics is above the value of the field `bound`."""

    bound: float = 0.0

    def __str__(self) -> str:
        return f"above {self.bound:g}"

    def judge(self, row: Row, before: Window) -> Found:
        return Found(any(row.get(name, math.nan) > self.bound for name in self.metrics))


@dataclass(frozen=True)
class Equal(Condition):
    """Tests whether the metric equals the value of the field `number`. `Equal` is meant for metrics
    that are either 0 or 1."""

    number: float = 0.0

    def __str__(self) -> str:
        return f"{self.number:g}"

    def judge(self, row: Row, before: Window) -> Found:
        return Found(self.figure(row) == self.number)


@dataclass(frozen=True)
class Risen(Condition):
    """Tests whether the metric is above its value in the previous step. If the previous step has no
    value, 0 is used instead."""

    def __str__(self) -> str:
        return "above the step before"

    def window(self) -> Window:
        return Window(1, gaps=True)

    def judge(self, row: Row, before: Window) -> Found:
        last = before.latest[-1] if before.latest and math.isfinite(before.latest[-1]) else 0.0
        return Found(self.figure(row) > last)


@dataclass(frozen=True)
class TimesMedian(Condition):
    """Tests whether the metric is above a limit. The limit is the median of earlier steps,
    multiplied by the factor `times`. If the metric is NaN or infinite, the condition does not hold,
    because another rule covers such values."""

    times: float = GRAD_SPIKE
    steps: int = GRAD_WINDOW
    known: int = GRAD_KNOWN

    def __str__(self) -> str:
        return f"above {self.times:g} times the median of the last {self.steps} steps"

    def window(self) -> Window:
        return Window(self.steps, self.known, gaps=True)

    def judge(self, row: Row, before: Window) -> Found:
        figure, median = self.figure(row), before.median() or 0.0
        if not (median > 0 and self.times * median < figure < math.inf):
            return NOTHING
        return Found(True, {"median": median, "times": figure / median})


@dataclass(frozen=True)
class Collapse(Condition):
    """Tests whether entropy has collapsed in a run without an entropy target. Entropy counts as
    collapsed if two criteria are met. First, the recent mean of the entropy is at most
    `FALLEN_SHARE` times the mean over the run's first `START_STEPS` steps. Second, at the recent
    rate of decrease, the entropy halves in fewer than `HALVING_STEPS` steps."""

    def __str__(self) -> str:
        return (
            f"no target, below {FALLEN_SHARE:g} of the first {START_STEPS} steps' mean, and halves"
            f" in under {HALVING_STEPS} steps, by the last {FALL_WINDOW}"
        )

    def window(self) -> Window:
        return Window(FALL_WINDOW - 1, first=START_STEPS, gaps=True)

    def judge(self, row: Row, before: Window) -> Found:
        values = [*before.latest, self.figure(row)]
        if "entropy/target" in row or len(values) < FALL_WINDOW:
            return NOTHING
        if not all(math.isfinite(value) and value > 0 for value in values):
            return NOTHING
        half, start = FALL_WINDOW // 2, statistics.fmean(before.first)
        early, late = statistics.fmean(values[:half]), statistics.fmean(values[half:])
        if late >= early or late > FALLEN_SHARE * start:
            return NOTHING
        # the halves' centres are `half` steps apart
        halving = half * math.log(2) / math.log(early / late)
        return Found(halving < HALVING_STEPS, {"late": late, "start": start, "halving": halving})


class _Sides(Window):
    """Records for each step whether entropy was above the target's band (1), below the band (-1) or
    inside the band (0). Records NaN for a step without an entropy target.

    Entropy can jump over the whole band from one step to the next. If no earlier step was inside
    the band, a jump over the whole band counts as reaching the target. For the first step after
    such a jump, `_Sides` therefore records 0, as if the step were inside the band.
    """

    reached = False

    def add(self, value: float) -> None:
        crossed = bool(self.latest) and self.latest[-1] * value < 0
        if not self.reached and (value == 0 or crossed):
            self.reached, value = True, 0.0
        super().add(value)


@dataclass(frozen=True)
class OffTarget(Condition):
    """Tests whether entropy has left its target again: after it reached the target, it lies outside
    the target's band for `OFF_TARGET_STEPS` steps in a row. Until entropy reaches its target for
    the first time, the condition does not hold."""

    def __str__(self) -> str:
        return (
            f"once reached, {OFF_TARGET_STEPS} steps in a row outside {BAND:g} of `entropy/target`"
        )

    def window(self) -> Window:
        return _Sides(OFF_TARGET_STEPS - 1, gaps=True)

    def figure(self, row: Row) -> float:
        entropy, target = row.get("entropy/mean", math.nan), row.get("entropy/target", math.nan)
        if not math.isfinite(entropy + target):
            return math.nan
        return (
            0.0 if abs(entropy - target) <= BAND * target else math.copysign(1.0, entropy - target)
        )

    def judge(self, row: Row, before: Window) -> Found:
        assert isinstance(before, _Sides)
        sides = [*before.latest, self.figure(row)]
        if (
            not before.reached
            or len(sides) < OFF_TARGET_STEPS
            or not all(abs(side) == 1 for side in sides)
        ):
            return NOTHING
        target = row["entropy/target"]
        side = "below" if sides[-1] < 0 else "above"
        return Found(True, {"side": side, "low": target * (1 - BAND), "high": target * (1 + BAND)})


@dataclass(frozen=True)
class Grown(Condition):
    """Tests whether the log-prob difference between engine and trainer has grown by more than the
    factor `times` since the start of the run. Also requires that the step's mean log-prob
    difference (`agreement/mean`) is above `least`.

    `setting`: name of a run setting, or "". If `setting` is the name of a run setting, the value of
        this run setting is used instead of the default value of `times`. In this case, the product
        of `TREND_FLOOR` and the run setting `agreement.mean` is used instead of the default value
        of `least`.
    """

    times: float = TREND
    least: float = TREND_MEAN
    setting: str = ""

    def __str__(self) -> str:
        times = f"`{self.setting}`" if self.setting else f"{self.times:g}"
        least = f"{TREND_FLOOR:g} of `agreement.mean`" if self.setting else f"{self.least:g}"
        return f"above {times}, and `agreement/mean` above {least}"

    def judge(self, row: Row, before: Window) -> Found:
        holds = self.figure(row) > self.times and row.get("agreement/mean", math.nan) > self.least
        return Found(holds, {"limit": self.times})


@dataclass(frozen=True)
class Spike(Condition):
    """Tests whether the value of the metric is far above the values in earlier steps. The limit is
    the median of the earlier values plus a margin. The margin is the spread of the earlier values,
    multiplied by the factor `spreads`.

    `both_ways`: whether a value far below the median also counts as a spike.
    `spreads`, `steps`, `known`: values from the run's settings, which config/fault_sections.py
        describes.
    `least`: a value above the median counts as a spike only if it is also above `least`.
    """

    both_ways: bool = False
    spreads: float = math.inf
    steps: int = 0
    known: int = 1
    least: float = -math.inf

    def __str__(self) -> str:
        way = "above or below" if self.both_ways else "above"
        return f"more than `spreads` {way} the median of the last `{GUARDS}.window` steps"

    def window(self) -> Window:
        return Window(self.steps, self.known)

    def limit(self, before: Window) -> float:
        """Returns the bound above which a value is a spike, or inf if there are too few earlier
        values for a comparison."""
        if (scale := before.scale()) is None:
            return math.inf
        return max(scale[0] + self.spreads * scale[1], self.least)

    def judge(self, row: Row, before: Window) -> Found:
        figure, scale = self.figure(row), before.scale()
        if scale is None or not math.isfinite(figure):
            return NOTHING
        median, spread = scale
        away = (figure - median) / spread if figure > self.least else 0.0
        away = abs(away) if self.both_ways else max(away, 0.0)
        too_small = self.both_ways and figure < median - self.spreads * spread
        return Found(
            too_small or figure > self.limit(before),
            {"figure": figure, "away": away, "median": median},
        )


@dataclass(frozen=True)
class Outside(Condition):
    """Tests whether the metric is below `low` or above `high`. The run's settings define `low` and
    `high`."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        return "below `low` or above `high`"

    def judge(self, row: Row, before: Window) -> Found:
        figure = self.figure(row)
        if not math.isfinite(figure) or (math.isinf(self.low) and math.isinf(self.high)):
            return NOTHING
        return Found(not self.low <= figure <= self.high, {"low": self.low, "high": self.high})


class Judge:
    """Tests several conditions on each step of a run, and keeps the earlier values that the
    conditions need.

    Args:
        conditions: conditions by any name.
    """

    def __init__(self, conditions: Mapping[str, Condition]) -> None:
        self._conditions = conditions
        self.windows = {name: when.window() for name, when in conditions.items()}

    def judge(self, name: str, row: Row) -> Found:
        """Tests the condition `name` on a step's metrics, given the values of earlier steps."""
        return self._conditions[name].judge(row, self.windows[name])

    def remember(self, row: Row) -> None:
        """Adds the metrics of a step to the windows of the conditions. `judge` compares the metrics
        of later steps with the values in these windows."""
        for name, when in self._conditions.items():
            self.windows[name].add(when.figure(row))
