"""Conditions on the metrics of a run's steps, and the windows of earlier steps that they look back
on. Pure.

Each kind of condition is a class; which of them a run is held to, and what follows, is the table in
rules.py.
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

BAND = 0.25  # entropy within this share of its target counts as on target
# the section of the configuration that rules with a `guard` have settings in
GUARDS = "faults.guards"

# Single batches leave the band by chance; ten in a row do not, and a controller that works is back
# sooner.
OFF_TARGET_STEPS = 10
# Without a target: entropy halves in fewer steps than this, as in the published collapses of plain
# GRPO. Slower is the normal sharpening of a policy that learns.
HALVING_STEPS = 40
# Steps that the speed is measured over, between the means of its halves: one odd batch is no fall.
FALL_WINDOW = 20
# Share of the entropy at the start: above it, the fast first steps of a base model are no collapse.
FALLEN_SHARE = 0.5
START_STEPS = 5  # averaged to say what the run started with
# In 16 bits: growth of the mean difference since the run's first steps. By chance windows differ by
# a tenth or two. Means up to TREND_MEAN are rounding, whatever they grew from.
TREND = 2.0
TREND_MEAN = 5e-3  # nats
# Growth stops the run only above this share of `agreement.mean`, however small the mean was before.
TREND_FLOOR = 0.2
GRAD_SPIKE = 10.0  # times the median; batches of one run differ by factors of two or three
# steps the median is over: long enough to be steady, short enough to follow training
GRAD_WINDOW = 50
GRAD_KNOWN = 10  # steps before there is a median worth the name
NORMAL = 1.4826  # median absolute deviations to a standard deviation, of normal figures
# Share of the median that a spread is at least: figures that hardly move are not judged by their
# rounding.
LEAST_SHARE = 0.05


class Window:
    """The first and the latest values of a figure, and what they measure. Pure.

    Args:
        steps: of the latest that are held.
        known: finite values among them without which there is nothing to compare with.
        first: of the run's first values that are held.
        gaps: a step whose figure is not finite takes a place among the latest too; else it is
            passed over.
    """

    def __init__(self, steps: int, known: int = 1, *, first: int = 0, gaps: bool = False) -> None:
        self.first: list[float] = []
        self.latest: deque[float] = deque(maxlen=steps)
        self._count, self._steps, self._starts = 0, steps, first
        self._known, self._gaps = known, gaps

    def add(self, value: float) -> None:
        """Takes the figure of a step."""
        if math.isfinite(value):
            self._count += 1
            if len(self.first) < self._starts:
                self.first.append(value)
        if math.isfinite(value) or self._gaps:
            self.latest.append(value)

    def median(self) -> float | None:
        """Median of the latest figures; None where there are too few."""
        known = [value for value in self.latest if math.isfinite(value)]
        return statistics.median(known) if len(known) >= self._known else None

    def growth(self) -> float | None:
        """Median of the latest figures over that of the first ones. None until the latest are all
        after the first, and where the first are not above 0."""
        if self._count < self._starts + self._steps:
            return None
        before = statistics.median(self.first)
        return statistics.median(self.latest) / before if before > 0 else None

    def scale(self) -> tuple[float, float] | None:
        """Median and spread of the latest figures; None where there are too few, or all are 0."""
        if (middle := self.median()) is None:
            return None
        deviation = statistics.median(
            abs(value - middle) for value in self.latest if math.isfinite(value)
        )
        spread = max(NORMAL * deviation, LEAST_SHARE * abs(middle))
        return (middle, spread) if spread > 0 else None


class Found(NamedTuple):
    """The answer of a condition about a step: it holds or not, and what was measured, by name.

    measured: empty where there was nothing to measure, or nothing to compare with.
    """

    holds: bool
    measured: Mapping[str, float | str] = {}


NOTHING = Found(False)


@dataclass(frozen=True)
class Condition(ABC):
    """A kind of condition. `str()` says it in words, for docs/guards.md.

    metrics: the figure that is judged; of several, the first that a step has.
    """

    metrics: tuple[str, ...]

    def window(self) -> Window:
        """An empty window of what this looks back on."""
        return Window(0)

    def figure(self, row: Row) -> float:
        """The figure of a step; NaN where it has none, and NaN fails every comparison."""
        return next((row[name] for name in self.metrics if name in row), math.nan)

    @abstractmethod
    def judge(self, row: Row, before: Window) -> Found:
        """Judges a step's metrics beside the figures of the steps before it."""


@dataclass(frozen=True)
class Above(Condition):
    """Any of the metrics is above a bound."""

    bound: float = 0.0

    def __str__(self) -> str:
        return f"above {self.bound:g}"

    def judge(self, row: Row, before: Window) -> Found:
        return Found(any(row.get(name, math.nan) > self.bound for name in self.metrics))


@dataclass(frozen=True)
class Equal(Condition):
    """The figure is one number: a flag."""

    number: float = 0.0

    def __str__(self) -> str:
        return f"{self.number:g}"

    def judge(self, row: Row, before: Window) -> Found:
        return Found(self.figure(row) == self.number)


@dataclass(frozen=True)
class Risen(Condition):
    """A count is above that of the step before, where that had one."""

    def __str__(self) -> str:
        return "above the step before"

    def window(self) -> Window:
        return Window(1, gaps=True)

    def judge(self, row: Row, before: Window) -> Found:
        last = before.latest[-1] if before.latest and math.isfinite(before.latest[-1]) else 0.0
        return Found(self.figure(row) > last)


@dataclass(frozen=True)
class TimesMedian(Condition):
    """The figure is many times the median of the steps before. What is not finite is another
    rule's."""

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
    """Without a target, entropy is already low against the start of the run, and still halves
    fast."""

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
        # the centres of the halves are `half` steps apart
        halving = half * math.log(2) / math.log(early / late)
        return Found(halving < HALVING_STEPS, {"late": late, "start": start, "halving": halving})


class _Sides(Window):
    """Sides of the band that entropy was on, step by step: 1 above, -1 below, 0 within, NaN without
    a target.

    The step that comes over the band counts as within, for the target has been reached."""

    reached = False

    def add(self, value: float) -> None:
        crossed = bool(self.latest) and self.latest[-1] * value < 0
        if not self.reached and (value == 0 or crossed):
            self.reached, value = True, 0.0
        super().add(value)


@dataclass(frozen=True)
class OffTarget(Condition):
    """Entropy is outside the band around its target for long, after it was reached: the way there
    is no alert."""

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
    """Engine's and trainer's mean difference has grown over the run, and is more than nearly
    nothing, which may grow.

    setting: that says `times` and `least` in a run; "": the table's hold.
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
    """The figure is many spreads away from the median of the steps before.

    both_ways: it can be too small as well.
    spreads, steps, known: a run's settings; see config/guards_section.py.
    least: a figure up to this is no spike.
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
        """The largest figure that is no spike; inf where there is nothing to compare with."""
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
    """The figure is outside a band, which is a run's setting."""

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
    """Judges the steps of a run by some rules, and holds what they look back on.

    Args:
        conditions: by any name.
    """

    def __init__(self, conditions: Mapping[str, Condition]) -> None:
        self._conditions = conditions
        self.windows = {name: when.window() for name, when in conditions.items()}

    def judge(self, name: str, row: Row) -> Found:
        """Judges a step's metrics beside the steps before it."""
        return self._conditions[name].judge(row, self.windows[name])

    def remember(self, row: Row) -> None:
        """Takes a step among those that the next ones are judged beside."""
        for name, when in self._conditions.items():
            self.windows[name].add(when.figure(row))
