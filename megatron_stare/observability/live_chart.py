"""Small pictures made of characters: a line chart over a band, a strip of on and off, bars, and trend arrows.

Comes from series of metrics; goes to `live_panel.py`. Plain strings, no colour: what they show must not depend on it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Bits of a braille character's dots from top to bottom: its left and its right column.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_EIGHTHS = " ▏▎▍▌▋▊▉█"
# Heavy where the gate is on, light where it is off: [left half][right half]
_STRIP = (("─", "╼"), ("╾", "━"))

TREND_STEPS = 10  # compared with as many before them
TREND_SHARE = 0.02  # of the value: less is no trend, however steady


@dataclass(frozen=True)
class Scale:
    """The vertical axis of a chart.

    low: value at the lower edge.        row: value one character row covers.
    band_rows: rows that the band covers, from the lower edge; empty without a band.
    """

    low: float
    row: float
    rows: int
    band_rows: range

    @property
    def high(self) -> float:
        """Value at the upper edge."""
        return self.low + self.rows * self.row


def band_scale(values: Sequence[float], band: tuple[float, float] | None, rows: int) -> Scale:
    """An axis that encloses the values.

    While the values are near the band its edges fall on the edges of rows, so that the shaded rows are exactly the
    band. Far from it, and without a band, the axis starts at zero, for how far away zero is is what matters then.
    """
    known = [v for v in values if math.isfinite(v)]
    if band is None:
        high = max(known, default=0.0) or 1.0
        return Scale(0.0, high / rows, rows, range(0))
    low, high = band
    for of_band in (2, 1):  # rows that the band takes
        row, below = (high - low) / of_band, (rows - of_band) // 2
        scale = Scale(low - below * row, row, rows, range(below, below + of_band))
        if rows >= of_band and all(scale.low <= v <= scale.high for v in known):
            return scale
    row = max([high, *known]) / rows
    return Scale(0.0, row, rows, range(int(low / row), min(rows, math.ceil(high / row - 1e-9))))


def line(values: Sequence[float], scale: Scale, width: int) -> list[str]:
    """A continuous line, two values a character; rows from top to bottom, `width` wide. The newest values that fit.

    Values that are not finite leave a gap, values beyond the axis run along its edge. Untouched characters are spaces.
    """
    columns = _columns(values, width)
    cells = [[0] * width for _ in range(scale.rows)]
    top, before = 4 * scale.rows - 1, None
    for x, value in enumerate(columns):
        if not math.isfinite(value):
            before = None
            continue
        level = min(top, max(0, int((value - scale.low) / scale.row * 4)))
        start = level if before is None or before == level else before + (1 if level > before else -1)
        for y in range(min(start, level), max(start, level) + 1):
            cells[scale.rows - 1 - y // 4][x // 2] |= _DOTS[x % 2][3 - y % 4]
        before = level
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in cells]


def _columns(values: Sequence[float], width: int) -> list[float]:
    newest = list(values)[-2 * width :]
    return newest + [math.nan] * (2 * width - len(newest))


def strip(on: Sequence[float], width: int) -> str:
    """A 0/1 series as a line that is heavy where it is on, aligned with `line`; blank where it is not known."""
    columns = _columns(on, width)
    return "".join(
        " " if math.isnan(left) and math.isnan(right) else _STRIP[left >= 0.5][right >= 0.5]
        for left, right in zip(columns[::2], columns[1::2], strict=True)
    )


def bar(share: float, width: int) -> str:
    """A horizontal bar of `share` of `width`, to an eighth of a character, at least a sliver; `width` wide."""
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

    A change counts where it is twice its standard error and TREND_SHARE of the value: noise is no trend.
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
