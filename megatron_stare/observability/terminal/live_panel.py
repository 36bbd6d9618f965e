"""Draws the panel of a run from a snapshot, for any width and height.

`live.py` collects the driver's reports in a `View`. The library rich shows the panel. The panel
depends only on the view, the width and the height.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from megatron_stare.observability.metrics.conditions import BAND
from megatron_stare.observability.metrics.rules import RULES
from megatron_stare.observability.metrics.scales import short
from megatron_stare.observability.sink import Alert
from megatron_stare.observability.terminal.live_chart import (
    Scale,
    bar,
    line,
    progress_bar,
    scale_of,
    strip,
    trend,
)
from megatron_stare.observability.terminal.progress import clock

MAX_WIDTH = 160  # of the panel, characters; wider lines are hard to read
PHASES = ("rollout", "reward", "log_probs", "update", "sync", "eval", "checkpoint")
SERIES = (
    "entropy/mean",
    "entropy/target",
    "stare/gate",
    "reward/mean",
    "loss/policy",
    "heldout/loss",
    "response/length_mean",
    "perf/tokens_per_s",
    "optimizer/grad_norm",
    "response/truncated",
    "group/degenerate",
)
_SIDE = 31  # characters of the column of phases
_AXIS = 7  # characters of the chart's labels
_CHART_ROWS = 4  # lowest height of a chart; below it the reward's chart is dropped
_MOST_ROWS = 16
_AIRY = 14  # free lines from which one more separates the parts
_ALERTS = 3
_LABEL, _VALUE, _GOOD, _WARN, _LIVE = "dim", "bold", "green", "yellow", "cyan"
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
# label, metric, unit after the value; entries that do not fit are dropped from the right
_NUMBERS = (
    ("reward", "reward/mean", ""),
    ("loss", "loss/policy", ""),
    ("held-out", "heldout/loss", ""),
    ("length", "response/length_mean", ""),
    ("", "perf/tokens_per_s", " tok/s"),
    ("grad norm", "optimizer/grad_norm", ""),
    ("cut off", "response/truncated", ""),
    ("equal groups", "group/degenerate", ""),
)


@dataclass(frozen=True)
class View:
    """State of a run at one moment, from which the live panel is drawn.

    `series`: the latest values of every metric in `SERIES`, oldest first; NaN if a step lacked the
        metric.
    `seconds`: the duration of each phase when it last ran, in seconds.
    `phase`, `phase_s`: the current phase, and the seconds spent in the phase. `phase` is "" between
        phases.
    `responses`: number of responses that the current phase has finished, and number of responses
        that it needs; None if the phase reports no responses.
    `left_s`: estimated seconds until the run's final step ends, or None if there is no estimate.
    `run_s`: seconds since the display started.
    `over`: alerts that ended, newest last.
    `evaluated`: the newest result of every task, as (name, value, step).
    `closed`: "" while the run continues, then a text that says how the run ended.
    """

    total: int
    step: int = 0
    run_dir: str = ""
    algorithm: str = ""
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    phase: str = ""
    phase_s: float = 0.0
    responses: tuple[int, int] | None = None
    left_s: float | None = None
    run_s: float = 0.0
    active: Sequence[Alert] = ()
    over: Sequence[Alert] = ()
    evaluated: Sequence[tuple[str, float, int]] = ()
    closed: str = ""
    shaded: bool = True  # the terminal has enough colours for a shaded band

    def values(self, key: str) -> Sequence[float]:
        """Returns the series of a metric, or an empty series if no step had a value."""
        values = self.series.get(key, ())
        return values if any(map(math.isfinite, values)) else ()


def build(view: View, width: int, height: int) -> RenderableType:
    """Builds the panel, at most `width` wide and `height` high. If space is short, the least
    important parts are left out."""
    width = min(width, MAX_WIDTH)
    inner = width - 4
    if height < 4 or inner < 36:  # no room for a frame: only the progress line
        return _fit(_progress(view, width), width)
    head = [_progress(view, inner), _now(view, inner)]
    numbers, alerts = _numbers(view, inner), _alerts(view)
    room = height - 2 - len(head)
    parts: list[list[Text]] = []
    # alerts matter most, then numbers, then charts
    if room >= 1 and alerts:
        shown = min(_ALERTS, len(alerts), max(1, room - 7))
        if len(view.active) > shown:
            alerts[shown - 1].append(f"  (and {len(view.active) - shown} more)", style=_LABEL)
        parts, room = [alerts[:shown]], room - shown
    if room >= 1:
        parts, room = [[numbers], *parts], room - 1
    if room >= 4 and (body := _body(view, inner, room - len(parts) - (room > _AIRY))):
        parts, room = [parts[0], body, *parts[1:]], room - len(body)
    lines = list(head)
    for part in parts:  # remaining lines separate the parts
        if room > 0:
            lines, room = [*lines, Text()], room - 1
        lines += part
    style = (
        _WARN
        if view.active
        else (_LIVE if not view.closed else _GOOD if view.step >= view.total else _LABEL)
    )
    return Panel(
        Group(*(_fit(text, inner) for text in lines)),
        box=ROUNDED,
        title=_title(view, inner),
        title_align="left",
        border_style=style,
        padding=(0, 1),
        width=width,
    )


def _title(view: View, width: int) -> Text:
    name, room = view.algorithm or "run", width - len(view.algorithm) - 6
    # the end of the path is most informative
    directory = view.run_dir if len(view.run_dir) <= room else "…" + view.run_dir[-max(1, room) :]
    return Text.assemble((name, _VALUE), (f"  {directory}" if directory else "", _LABEL))


def _progress(view: View, width: int) -> Text:
    count = f"step {str(view.step).rjust(len(str(view.total)))}/{view.total}"
    times = f"{view.step / max(1, view.total):4.0%}" + (
        f"  {clock(view.run_s)}" if width >= 60 else ""
    )
    left = "" if view.left_s is None or view.closed else f"  left {clock(view.left_s)}"
    done, rest = progress_bar(
        view.step / max(1, view.total), max(4, width - len(count) - len(times) - len(left) - 2)
    )
    return Text.assemble(
        (count, _VALUE), " ", (done, _GOOD), (rest, _LABEL), " ", (times, _LABEL), left
    )


def _now(view: View, width: int) -> Text:
    if view.closed:
        return Text(view.closed, style=_GOOD if view.step >= view.total else _WARN)
    if not view.phase:
        return Text("between phases", style=_LABEL)
    spinner = _SPINNER[int(view.phase_s * 4) % len(_SPINNER)]
    text = Text.assemble(
        (f"{spinner} {view.phase}", f"{_LIVE} bold"), f"  {_seconds(view.phase_s)}"
    )
    if view.responses and view.responses[1] > 0:
        count = f" {view.responses[0]:,}/{view.responses[1]:,} responses"
        done, rest = progress_bar(
            view.responses[0] / view.responses[1], min(40, width - len(text) - len(count) - 2)
        )
        text.append_text(Text.assemble("  ", (done, _LIVE), (rest, _LABEL), count))
    return text


def _numbers(view: View, width: int) -> Text:
    results = [
        Text.assemble((f"{name} ", _LABEL), (f"{value:.3f}", _VALUE), (f" (step {step})", _LABEL))
        for name, value, step in view.evaluated
    ]
    text = Text()
    for label, key, unit in _NUMBERS:
        values = view.values(key)
        if key == "loss/policy" and view.values("reward/mean"):
            continue  # only supervised fine-tuning shows its loss
        if key == "heldout/loss":  # not measured in every step
            values = [value for value in values if math.isfinite(value)]
        if not values:
            continue
        share = key in ("response/truncated", "group/degenerate")
        value = f"{values[-1]:.0%}" if share and math.isfinite(values[-1]) else short(values[-1])
        arrow = "" if share else f" {trend(values)}"
        good = key == "reward/mean" and arrow == " ↗"
        part = Text.assemble(
            (label + " " if label else "", _LABEL),
            (value, _VALUE),
            (unit, _LABEL),
            (arrow, _GOOD if good else _LIVE),
        )
        for each in (part, *(results if key == "reward/mean" else ())):
            if len(text) + len(each) + 3 <= width:
                text = Text.assemble(text, "   " if text else "", each)
    return text if text else Text("no step yet", style=_LABEL)


def _body(view: View, width: int, room: int) -> list[Text]:
    """Builds the charts and the list of phases, at most `room` lines high. A wide panel shows the
    phases beside the charts. A narrow panel shows only the charts. Without charts, only the phases
    are shown."""
    phases = _phases(view, _SIDE)[:room]
    wide = width >= 70 and bool(phases)
    chart = _charts(view, width - _SIDE - 3 if wide else width, room)
    if not chart or not wide:
        return chart or phases
    height = max(len(chart), len(phases))
    blank = [Text()] * height
    left, right = [*chart, *blank][:height], [*phases, *blank][:height]
    return [
        Text.assemble(_fit(a, width - _SIDE - 3, pad=True), (" │ ", _LABEL), b)
        for a, b in zip(left, right, strict=True)
    ]


def _charts(view: View, width: int, room: int) -> list[Text]:
    """Builds the entropy chart, and also the reward chart if there is room for both charts. The
    reward chart takes a third of the height."""
    reward, entropy = view.values("reward/mean"), view.values("entropy/mean")
    beside = 2 if view.values("stare/gate") else 1  # the heading and the gate's strip
    rows = min(_MOST_ROWS, (room - beside - 1) * 2 // 3)
    if not entropy or not reward or rows < _CHART_ROWS:
        return _entropy(view, width, min(_MOST_ROWS, room - beside))
    below = min(_MOST_ROWS // 2, room - beside - 1 - rows)
    return [*_entropy(view, width, rows), *_reward(view, width, below)]


def _entropy(view: View, width: int, rows: int) -> list[Text]:
    entropy, target, gate = (
        view.values("entropy/mean"),
        view.values("entropy/target"),
        view.values("stare/gate"),
    )
    if not entropy or rows < 1:
        return []
    aim = target[-1] if target and math.isfinite(target[-1]) and target[-1] > 0 else None
    columns = width - _AXIS
    inside = aim is not None and abs(entropy[-1] - aim) <= BAND * aim
    head = Text.assemble(
        ("entropy ", _LABEL),
        (short(entropy[-1]), _VALUE if aim is None else f"{_VALUE} {_GOOD if inside else _WARN}"),
        (f" {trend(entropy)}", _LIVE),
        (f"  target {short(aim)}" if aim else "", _LABEL),
        (f" ±{BAND:.0%}" if aim and width >= 60 else "", _LABEL),
    )
    if gate:
        known = [g >= 0.5 for g in gate[-2 * columns :] if math.isfinite(g)]
        on = gate[-1] >= 0.5
        head.append_text(
            Text.assemble(("  gate ", _LABEL), ("on" if on else "off", _GOOD if on else _LABEL))
        )
        if known and width >= 60:
            head.append(f", {sum(known) / len(known):.0%} of {len(known)} steps", style=_LABEL)
    band = (aim * (1 - BAND), aim * (1 + BAND)) if aim else None
    lines = [head, *_plot(entropy[-2 * columns :], band, columns, rows, view.shaded)]
    if gate:
        text = Text()
        for character in strip(gate, columns):
            text.append(character, style=_LABEL if character in " ─" else _GOOD)
        lines.append(Text.assemble(text, (" gate", _LABEL)))
    return lines


def _reward(view: View, width: int, rows: int) -> list[Text]:
    """Builds the reward chart. The reward chart's heading shows no value, because another line of
    the panel already shows the newest reward."""
    columns = width - _AXIS
    shown = view.values("reward/mean")[-2 * columns :]
    return (
        [Text("reward", style=_LABEL), *_plot(shown, None, columns, rows, view.shaded)]
        if rows > 0
        else []
    )


def _plot(
    values: Sequence[float], band: tuple[float, float] | None, width: int, rows: int, shaded: bool
) -> list[Text]:
    scale = scale_of(values, band, rows)
    return [
        _chart_row(characters, rows - 1 - i, scale, shaded)
        for i, characters in enumerate(line(values, scale, width))
    ]


def _chart_row(characters: str, row: int, scale: Scale, shaded: bool) -> Text:
    in_band = row in scale.band_rows
    text = Text(characters, style=_LIVE)
    if in_band and shaded:
        text.stylize("on #17402a")
    elif in_band:  # without colours, the band is marked where blank
        text = Text(characters.replace(" ", "░"), style=_GOOD)
    label = f"{scale.ticks[row]:.3g}" if row in scale.ticks else ""
    return Text.assemble(text, (f" {label}", _GOOD if in_band else _LABEL))


def _phases(view: View, width: int) -> list[Text]:
    names = [
        *(n for n in PHASES if n in view.seconds),
        *(n for n in view.seconds if n not in PHASES),
    ]
    longest = max(view.seconds.values(), default=0.0) or 1.0
    lines = []
    for name in names:
        seconds, current = view.seconds[name], name == view.phase
        lines.append(
            Text.assemble(
                (name[:10].ljust(11), _LIVE if current else _LABEL),
                (bar(seconds / longest, width - 11 - 8), _LIVE if current else "blue"),
                f"{_seconds(seconds):>8}",
            )
        )
    return lines


def _alerts(view: View) -> list[Text]:
    order = list(RULES)
    active = sorted(view.active, key=lambda a: order.index(a.name))
    lines = [Text.assemble(("▲ ", f"bold {_WARN}"), (a.announce(), _WARN)) for a in active]
    return lines + [Text(f"✓ {a.announce()}", style=_LABEL) for a in reversed(view.over)]


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return clock(seconds)
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def _fit(text: Text, width: int, pad: bool = False) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    text.truncate(width, overflow="ellipsis", pad=pad)
    return text
