"""Draws small pictures with text characters: line charts with a target band, on/off strips, bars,
and trend arrows.

Turns series of metrics into plain strings for `live_panel.py`. The strings contain no colour,
because the pictures must be readable without colour.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_stare.observability.metrics.scales import nice_ticks

# Bits of a braille character's dots from top to bottom: left column, right column.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_EIGHTHS = " ▏▎▍▌▋▊▉█"
# heavy while the gate is on, light while it is off: [left half][right half]
_STRIP = (("─", "╼"), ("╾", "━"))

TREND_STEPS = 10  # compared with the same number before them
TREND_SHARE = 0.02  # share of the value below which a change is no trend, however steady


@dataclass(frozen=True)
class Scale:
    """Vertical axis of a chart. The axis begins at zero or a negative value, and ends at a round
    value.

    `low`: value at the chart's lower edge.
    `row`: height of one character row, in the unit of the values.
    `band_rows`: rows that the chart's band touches; empty if the chart has no band.
    `ticks`: dict that maps the index of a character row to the label of this row on the axis. Each
        label is a round number. Character row 0 is the lowest row of the chart.
    """

    low: float
    row: float
    rows: int
    band_rows: range
    ticks: Mapping[int, float] = field(default_factory=dict)

    @property
    def high(self) -> float:
        """The value at the chart's upper edge."""
        return self.low + self.rows * self.row


def scale_of(values: Sequence[float], band: tuple[float, float] | None, rows: int) -> Scale:
    """Returns an axis that includes zero, the values and the band. The axis includes zero even if
    there is no band. The charts of a run with a target and a run without a target can therefore be
    compared."""
    known = [v for v in values if math.isfinite(v)]
    high = max([*known, *(band or ())], default=0.0)
    low = min([0.0, *known])
    marks = nice_ticks(low, high if high > low else low + 1.0, max(2, min(5, rows)))
    low, row = marks[0], (marks[-1] - marks[0]) / rows
    # of two marks in a row, the higher
    ticks = {min(rows - 1, int((mark - low) / row + 1e-9)): mark for mark in marks}
    if band is None:
        return Scale(low, row, rows, range(0), ticks)
    first = int((band[0] - low) / row + 1e-9)
    return Scale(
        low, row, rows, range(first, max(first + 1, math.ceil((band[1] - low) / row - 1e-9))), ticks
    )


def line(values: Sequence[float], scale: Scale, width: int) -> list[str]:
    """Draws the newest values as a line, two values per character. Older values that do not fit are
    left out. Returns the rows from top to bottom, each `width` characters wide.

    Values that are not finite leave a gap. Values beyond the axis are drawn at the axis's edge.
    Each character that the line does not touch is a space.
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
    """Draws a 0/1 series as a strip. The strip's columns match the columns that `line` draws. The
    strip is heavy where the value is 1, light where the value is 0, and blank where the value is
    unknown."""
    columns = _columns(on, width)
    return "".join(
        " " if math.isnan(left) and math.isnan(right) else _STRIP[left >= 0.5][right >= 0.5]
        for left, right in zip(columns[::2], columns[1::2], strict=True)
    )


def bar(share: float, width: int) -> str:
    """Draws a horizontal bar that covers the fraction `share` of the text's width. The bar's length
    is rounded to an eighth of a character, and is at least one eighth. The returned text is `width`
    characters wide."""
    eighths = max(1, round(min(1.0, max(0.0, share)) * width * 8))
    full, rest = divmod(eighths, 8)
    return (_EIGHTHS[8] * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def progress_bar(share: float, width: int) -> tuple[str, str]:
    """Draws a progress bar. Returns two texts: a heavy line for the finished share, and a light
    line for the remaining share."""
    halves = round(min(1.0, max(0.0, share)) * width * 2)
    full, half = divmod(halves, 2)
    done = "━" * full + "╸" * half
    return done, "─" * (width - len(done))


def trend(values: Sequence[float]) -> str:
    """Returns an arrow that compares the mean of the last TREND_STEPS values with the mean of the
    TREND_STEPS values before them. Returns a space if too few values are known.

    The arrow points up or down only if the change exceeds two bounds: twice the standard error of
    the change, and TREND_SHARE times the earlier mean. For a smaller change, which may be noise,
    the arrow is horizontal.
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
