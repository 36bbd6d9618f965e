"""Small pictures made of characters: a line chart over a band, a strip of on and off, bars, and
trend arrows.

Comes from series of metrics; goes to `live_panel.py`. Plain strings, no colour: what they show must
not depend on it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_stare.observability.metrics.scales import nice_ticks

# Bits of a braille character's dots from top to bottom: its left and its right column.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_EIGHTHS = " ▏▎▍▌▋▊▉█"
# Heavy where the gate is on, light where it is off: [left half][right half]
_STRIP = (("─", "╼"), ("╾", "━"))

TREND_STEPS = 10  # compared with as many before them
TREND_SHARE = 0.02  # of the value: less is no trend, however steady


@dataclass(frozen=True)
class Scale:
    """The vertical axis of a chart, from zero or below it to a round value.

    low: value at the lower edge.        row: value one character row covers.
    band_rows: rows that the band touches; empty without a band.
    ticks: the round values to be named, by the row that each stands in, counted from below.
    """

    low: float
    row: float
    rows: int
    band_rows: range
    ticks: Mapping[int, float] = field(default_factory=dict)

    @property
    def high(self) -> float:
        """Value at the upper edge."""
        return self.low + self.rows * self.row


def scale_of(values: Sequence[float], band: tuple[float, float] | None, rows: int) -> Scale:
    """An axis from zero that encloses values and band; the same for runs with a target and without,
    so that heights compare."""
    known = [v for v in values if math.isfinite(v)]
    high = max([*known, *(band or ())], default=0.0)
    low = min([0.0, *known])
    marks = nice_ticks(low, high if high > low else low + 1.0, max(2, min(5, rows)))
    low, row = marks[0], (marks[-1] - marks[0]) / rows
    # of two marks in a row the higher
    ticks = {min(rows - 1, int((mark - low) / row + 1e-9)): mark for mark in marks}
    if band is None:
        return Scale(low, row, rows, range(0), ticks)
    first = int((band[0] - low) / row + 1e-9)
    return Scale(
        low, row, rows, range(first, max(first + 1, math.ceil((band[1] - low) / row - 1e-9))), ticks
    )


def line(values: Sequence[float], scale: Scale, width: int) -> list[str]:
    """A continuous line, two values a character; rows from top to bottom, `width` wide. The newest
    values that fit.

    Values that are not finite leave a gap, values beyond the axis run along its edge. Untouched
    characters are spaces.
    """
    columns = _columns(values, width)
    cells = [[0] * width for _ in range(scale.rows)]
    top, before = 4 * scale.rows - 1, None
    for x, value in enumerate(columns):
        if not math.isfinite(value):
            before = None
            continue
        level = min(top, max(0, int((value - scale.low) / scale.row * 4)))
        start = (
            level if before is None or before == level else before + (1 if level > before else -1)
        )
        for y in range(min(start, level), max(start, level) + 1):
            cells[scale.rows - 1 - y // 4][x // 2] |= _DOTS[x % 2][3 - y % 4]
        before = level
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in cells]


def _columns(values: Sequence[float], width: int) -> list[float]:
    newest = list(values)[-2 * width :]
    return newest + [math.nan] * (2 * width - len(newest))


def strip(on: Sequence[float], width: int) -> str:
    """A 0/1 series as a line that is heavy where it is on, aligned with `line`; blank where it is
    not known."""
    columns = _columns(on, width)
    return "".join(
        " " if math.isnan(left) and math.isnan(right) else _STRIP[left >= 0.5][right >= 0.5]
        for left, right in zip(columns[::2], columns[1::2], strict=True)
    )


def bar(share: float, width: int) -> str:
    """A horizontal bar of `share` of `width`, to an eighth of a character, at least a sliver;
    `width` wide."""
    eighths = max(1, round(min(1.0, max(0.0, share)) * width * 8))
    full, rest = divmod(eighths, 8)
    return (_EIGHTHS[8] * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def progress_bar(share: float, width: int) -> tuple[str, str]:
    """The heavy part that is done and the light part that is left."""
    halves = round(min(1.0, max(0.0, share)) * width * 2)
    full, half = divmod(halves, 2)
    done = "━" * full + "╸" * half
    return done, "─" * (width - len(done))


def trend(values: Sequence[float]) -> str:
    """An arrow: the last TREND_STEPS values against those before; a space while too few are known.

    A change counts where it is twice its standard error and TREND_SHARE of the value: noise is no
    trend.
    """
    known = [v for v in values[-2 * TREND_STEPS :] if math.isfinite(v)]
    half = len(known) // 2
    if half < 2:
        return " "
    before, after = known[:half], known[-half:]
    change = statistics.fmean(after) - statistics.fmean(before)
    error = math.sqrt((statistics.variance(before) + statistics.variance(after)) / half)
    if abs(change) <= max(2 * error, TREND_SHARE * abs(statistics.fmean(before))):
        return "→"
    return "↗" if change > 0 else "↘"
