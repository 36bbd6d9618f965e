"""Draws line charts over training steps as inline SVG.

Turns metric series of one or more runs into pictures for `page.html.jinja`. The SVG names each
colour by a CSS class (c0, c1, ...). For each class, the page's style sheet has one colour for light
mode and one for dark mode. Each chart contains, as JSON, the numbers that the page shows at the
mouse pointer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_stare.observability.metrics.scales import (
    Points,
    nice_ticks,
    short,
    smooth,
    thin,
    tick_label,
)

WIDTH, HEIGHT = 560, 262
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 12, 40
LANE = 7  # height of one run's gate lane, if several runs share a chart
SMOOTH_FROM = 12  # points; shorter series are not smoothed
PALETTE = 6  # colours c0..c5; a seventh run starts again at c0, dashed
OWN_COLOUR = -1  # for lines that belong to no run: a target that all runs share
MOST_SAID = 2  # lines of which each is said how far it lies beyond the edge
HOVER_POINTS = 400  # positions at which the pointer can stop


@dataclass(frozen=True)
class Line:
    """One line of a chart, usually the series of one run. `colour` is the index of the run's
    colour. If a line belongs to no run, `kind` is the line's CSS class."""

    label: str
    colour: int
    steps: Sequence[float]
    values: Sequence[float]
    kind: str = ""

    @property
    def css(self) -> str:
        """The CSS class that determines the line's colour."""
        again = " again" if self.colour >= PALETTE else ""  # dashed
        of_run = f"c{self.colour % PALETTE}{again}"
        return self.kind or ("own" if self.colour == OWN_COLOUR else of_run)

    @property
    def points(self) -> Points:
        return list(zip(self.steps, self.values, strict=True))


@dataclass(frozen=True)
class Chart:
    """A chart to draw. The lines in `targets` are dashed. If `band` is not 0, the chart shades a
    range around each target: from (1 - `band`) times the target's value to (1 + `band`) times the
    target's value."""

    title: str
    unit: str
    lines: Sequence[Line]
    targets: Sequence[Line] = ()
    band: float = 0.0
    # spans of steps in which a run's gate is on
    gates: Sequence[tuple[Line, Sequence[tuple[float, float]]]] = ()
    caption: str = ""
    raw: bool = False  # few separate measurements: dots, no smoothing
    joined: bool = False  # measured in some steps only: the line goes on over those without a value
    y_limit: float | None = None  # top of the plot; values above are cut off
    y_floor: float | None = None  # bottom of the plot, if values are below it
    exact: bool = False  # a schedule or a count: no smoothing
    key: bool = False  # label the lines in the chart: they are not one per run

    @property
    def flat(self) -> str | None:
        """The value that all points of the chart have in common, as text. The property `flat` is
        None if the points have different values, if the chart has fewer than two values, or if the
        chart marks the steps in which a gate is on."""
        values = [
            v for line in (*self.lines, *self.targets) for v in line.values if math.isfinite(v)
        ]
        if (
            self.gates
            or len(values) < 2
            or max(values) - min(values) > 1e-9 * max(map(abs, values))
        ):
            return None
        return short(values[0])


@dataclass
class _Frame:
    """Maps steps and values to pixels."""

    x_low: float
    x_high: float
    y_ticks: list[float]
    bottom: float
    parts: list[str] = field(default_factory=list)

    def x(self, step: float) -> float:
        share = (step - self.x_low) / (self.x_high - self.x_low)
        return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return self.bottom - (value - low) / (high - low) * (self.bottom - TOP)


@dataclass(frozen=True)
class Drawing:
    """A chart's picture, the `lines` in the picture, and the numbers that the page shows at the
    mouse pointer."""

    width: int
    height: int
    svg: str  # only our numbers and names: no external text
    lines: Sequence[Line]
    hover: dict[str, Any]
    beyond: str  # describes values cut off at the edges; "" if there are none


def draw(chart: Chart) -> Drawing | None:
    """Draws a chart. Returns None if no run has the chart's metric."""
    lines = [line for line in chart.lines if any(math.isfinite(v) for v in line.values)]
    if not lines:
        return None
    frame = _frame(chart, lines)
    _gates(frame, chart)
    _grid(frame)
    frame.parts.append(_clip(chart, frame))
    for target in chart.targets:
        _target(frame, target, chart.band)
    for line in lines:
        _line(frame, line, chart)
    frame.parts.append("</g>")
    beyond = _beyond(frame, [*lines, *chart.targets])
    frame.parts.append(f'<line class="cursor" y1="{TOP}" y2="{frame.bottom:g}" hidden></line>')
    return Drawing(WIDTH, HEIGHT, "".join(frame.parts), lines, _hover(frame, chart, lines), beyond)


def _frame(chart: Chart, lines: Sequence[Line]) -> _Frame:
    steps = [step for line in lines for step in line.steps]
    values = [v for line in lines for v in line.values if math.isfinite(v)]
    values += [
        v * (1 + chart.band) for target in chart.targets for v in target.values if math.isfinite(v)
    ]
    low, high = min(values), max(values)
    # axes include 0, so that heights compare and small changes do not look large
    low, high = min(low, 0.0), max(high, 0.0)
    low = low if chart.y_floor is None else max(low, chart.y_floor)
    high = high if chart.y_limit is None else chart.y_limit
    x_low, x_high = min(steps), max(steps)
    if x_low < 0.05 * x_high:
        x_low = 0  # steps count from 1, but the axis starts at 0
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    lanes = LANE * len(chart.gates) if len(chart.gates) > 1 else 0
    return _Frame(
        x_low, x_high, nice_ticks(low, high if high > low else low + 1), HEIGHT - BOTTOM - lanes
    )


def _beyond(frame: _Frame, lines: Sequence[Line]) -> str:
    """Marks the steps at which a line's value is above or below the plot, and returns a text about
    these values."""
    low, high = frame.y_ticks[0], frame.y_ticks[-1]
    said, number, furthest = [], 0, (0.0, "", 0.0)
    for line in lines:
        finite = [(x, y) for x, y in line.points if math.isfinite(y)]
        outside = [(x, y) for x, y in finite if not low <= y <= high]
        if not outside:
            continue
        for step, value in thin(outside, 60):
            y, tip = (TOP, -6) if value > high else (frame.bottom, 6)
            x = frame.x(step)
            frame.parts.append(
                f'<path class="beyond {line.css}" d="M{x - 4:.1f} {y}h8l-4 {tip}z"/>'
            )
        step, far = max(outside, key=lambda point: abs(point[1]))
        whose = f" of {line.label}" if len(lines) > 1 else ""
        many = f"{len(outside):,} of {len(finite):,} values{whose}"
        outer = "is" if len(outside) == 1 else "are"
        said.append(f"{many} {outer} off the chart, the farthest {short(far)} (step {step:g})")
        number += len(outside)
        furthest = max(furthest, (abs(far), f"{short(far)} ({line.label}", step))
    if len(said) > MOST_SAID:
        _, far_of, step = furthest
        return (
            f"{number:,} values of {len(said)} lines are off the chart, the farthest {far_of}, step"
            f" {step:g})"
        )
    return "; ".join(said)


def _clip(chart: Chart, frame: _Frame) -> str:
    name = "clip-" + "".join(c if c.isalnum() else "-" for c in chart.title.lower())
    # the margin shows lines along an edge at their full width
    area = (
        f'x="{LEFT - 4}" y="{TOP - 4}" width="{WIDTH - LEFT - RIGHT + 8}"'
        f' height="{frame.bottom - TOP + 8:g}"'
    )
    return f'<clipPath id="{name}"><rect {area}/></clipPath><g clip-path="url(#{name})">'


def _grid(frame: _Frame) -> None:
    out = frame.parts
    ticks = frame.y_ticks
    for value in ticks:
        y = frame.y(value)
        kind = "axis" if value in (0, ticks[0]) else "grid"
        out.append(
            f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        label = tick_label(value, ticks[1] - ticks[0])
        out.append(
            f'<text class="tick" text-anchor="end" x="{LEFT - 8}" y="{y + 4:.1f}">{label}</text>'
        )
    steps = nice_ticks(frame.x_low, frame.x_high, 6, integer=True)
    for step in steps:
        if frame.x_low <= step <= frame.x_high:
            x, label = frame.x(step), tick_label(step, steps[1] - steps[0])
            out.append(
                f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM}"'
                f' y2="{HEIGHT - BOTTOM + 4}"/>'
            )
            out.append(
                f'<text class="tick" text-anchor="middle" x="{x:.1f}"'
                f' y="{HEIGHT - BOTTOM + 17}">{label}</text>'
            )
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(
        f'<text class="tick name" text-anchor="middle" x="{middle}" y="{HEIGHT - 5}">training'
        " step</text>"
    )


def _gates(frame: _Frame, chart: Chart) -> None:
    # One run: strips behind its line. Several runs: strips would mix, so each run has a lane in its
    # colour below the plot.
    for number, (line, spans) in enumerate(chart.gates):
        alone = len(chart.gates) == 1
        y = TOP if alone else frame.bottom + LANE * number + 2
        height = frame.bottom - TOP if alone else LANE - 3
        kind = "gate" if alone else f"lane {line.css}"
        for low, high in spans:
            x, x_end = frame.x(low), frame.x(high)
            frame.parts.append(
                f'<rect class="{kind}" x="{x:.1f}" width="{x_end - x:.1f}" y="{y:.1f}"'
                f' height="{height:.1f}"/>'
            )


def _target(frame: _Frame, target: Line, band: float) -> None:
    colour = target.css
    for run in _unbroken(thin(target.points)):
        if band:
            edge = [(x, y * (1 + band)) for x, y in run] + [
                (x, y * (1 - band)) for x, y in reversed(run)
            ]
            frame.parts.append(f'<path class="band {colour}" d="{_path(frame, edge)}Z"/>')
        frame.parts.append(f'<path class="target {colour}" d="{_path(frame, run)}"/>')


def _line(frame: _Frame, line: Line, chart: Chart) -> None:
    raw, smoothed = chart.raw, not chart.raw and not chart.exact and len(line.values) >= SMOOTH_FROM
    colour, points = line.css, line.points
    if chart.joined:
        points = [point for point in points if math.isfinite(point[1])]
    for run in _unbroken(thin(points)):
        if len(run) == 1 or raw:  # a lone point between gaps has no line
            frame.parts += [
                f'<circle class="{colour}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3"/>'
                for x, y in run
            ]
        if len(run) > 1:
            frame.parts.append(
                f'<path class="{"raw" if smoothed else "line"} {colour}" d="{_path(frame, run)}"/>'
            )
    if smoothed:
        for run in _unbroken(thin(list(zip(line.steps, smooth(line.values), strict=True)))):
            if len(run) > 1:
                frame.parts.append(f'<path class="line {colour}" d="{_path(frame, run)}"/>')


def _unbroken(points: Points) -> list[Points]:
    """Splits a series of points at its gaps."""
    runs: list[Points] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _path(frame: _Frame, points: Points) -> str:
    return "M" + "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points)


def _hover(frame: _Frame, chart: Chart, lines: Sequence[Line]) -> dict[str, Any]:
    share = HOVER_POINTS // len(lines)  # extremes of every line, as drawn
    stops = sorted({step for line in lines for step, _ in thin(line.points, share)})

    def column(line: Line) -> list[str]:
        known = dict(line.points)
        return [short(known.get(step)) for step in stops]

    rows: list[dict[str, Any]] = [
        {"name": x.label, "css": x.css, "values": column(x)} for x in lines
    ]
    if len(lines) == 1:
        rows += [
            {"name": target.label, "css": "", "values": column(target)} for target in chart.targets
        ]
        for _, spans in chart.gates:
            on = [
                "on" if any(low <= step <= high for low, high in spans) else "off" for step in stops
            ]
            rows.append({"name": "gate", "css": "", "values": on})
    return {"steps": stops, "x": [round(frame.x(step), 1) for step in stops], "rows": rows}
