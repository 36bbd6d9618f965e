"""Figure of entropy and sampled accuracy, STARE against GRPO, from the committed results.

Comes from quickstart.json, longchain.json and the long runs of benchmarks/results; goes to
docs/pictures/entropy.svg, by pictures.py. Every word that judges is chosen by an interval: 95 %,
Student's, over seeds or over runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from megatron_stare.evaluation.estimates import student_quantile
from megatron_stare.observability.metrics.conditions import BAND

RESULTS = Path(__file__).parent / "results"
# long_run_again ended with the policy of long_run, bit for bit, and is not counted twice; some
# files hold another's GRPO run
LONG = ("long_run", "long_run_third", "long_run_fourth", "long_run_fifth", "long_run_sixth")
METHODS = ("stare", "grpo")
NAMES = {"stare": "STARE", "grpo": "GRPO"}
TARGET = 0.12  # nats, of configs/quickstart.yaml
EACH = 100  # steps of a mean in the long runs
WIDTH, HEIGHT = 960, 466
LEFT, MIDDLE, TOP, BOTTOM = 58, 470, 96, 352  # of the plots, px
SECOND, RIGHT = 560, 938
STYLE = """
.bg{fill:#fff;stroke:#e6e7e9}.ink{fill:#1d2126}.soft{fill:#5b636c}.grid{stroke:#e6e8ea}
.axis{stroke:#8a9199}.stare{--c:#2f66d0}.grpo{--c:#b0319a}.start{stroke:#5b636c}.target{--c:#0e8c84}
@media (prefers-color-scheme:dark){.bg{fill:#14161a;stroke:#2b3037}.ink{fill:#e7e9ec}
.soft{fill:#a9b0b9}.grid{stroke:#2b3138}.axis{stroke:#818993}.stare{--c:#77a5ff}
.grpo{--c:#f08ad8}.start{stroke:#a9b0b9}.target{--c:#45c4b8}}
text{font:14px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
.h{font-size:15.5px;font-weight:600}
.t{font-size:12.5px}.name{font-weight:600;fill:var(--c)}
path{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round}
.band{fill:var(--c);fill-opacity:.13;stroke:none}.dash{stroke-dasharray:6 5}
circle{fill:var(--c);fill-opacity:.75}.bar{stroke:var(--c);stroke-width:2.2}
"""


@dataclass(frozen=True)
class Setting:
    """Sampled results of the same training by both methods.

    after: by method, of every run. start: before training. paired: the runs of both have the same
    seeds, in the same order.
    """

    name: str
    runs: str
    start: float
    after: Mapping[str, Sequence[float]]
    paired: bool

    @property
    def difference(self) -> tuple[float, float, float]:
        """STARE less GRPO: mean and interval, paired by seed, or Welch's."""
        ours, theirs = self.after["stare"], self.after["grpo"]
        if self.paired:
            return mean_interval([a - b for a, b in zip(ours, theirs, strict=True)])
        parts = [stdev(each) ** 2 / len(each) for each in (ours, theirs)]
        freedom = sum(parts) ** 2 / sum(
            part**2 / (len(each) - 1) for part, each in zip(parts, (ours, theirs), strict=True)
        )
        half = student_quantile(0.95, freedom) * math.sqrt(sum(parts))
        mean = fmean(ours) - fmean(theirs)
        return mean, mean - half, mean + half

    @property
    def verdict(self) -> str:
        """The result in a word."""
        _, low, high = self.difference
        return "alike" if low <= 0 <= high else "STARE higher" if low > 0 else "GRPO higher"


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean with Student's 95 % interval."""
    mean = fmean(values)
    half = student_quantile(0.95, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def read(name: str) -> dict[str, Any]:
    """A file of the results."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def long_runs() -> dict[str, list[dict[str, Any]]]:
    """The long runs of each method, each once."""
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    for name in LONG:
        for method, run in read(name)["runs"].items():
            if all(run["entropy"] != other["entropy"] for other in found[method]):
                found[method].append(run)
    return found


def settings(long: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Setting]:
    """The three trainings of which both methods' results are committed."""
    quick, chains = read("quickstart")["runs"], read("longchain")["runs"]
    return [
        _of_seeds("quickstart, 300 steps", quick, "pass1"),
        Setting(
            "quickstart, 2,000 steps",
            f"{len(long['stare'])}, {len(long['grpo'])} runs, 1 seed",
            long["stare"][0]["pass1"]["0"],
            {method: [run["pass1"]["2000"] for run in long[method]] for method in METHODS},
            paired=False,
        ),
        _of_seeds("long chains, 100 steps", chains, "sampled"),
    ]


def _of_seeds(name: str, runs: Mapping[str, Any], key: str) -> Setting:
    after = {
        method: [runs[run][key][1] for run in sorted(runs) if run.startswith(method)]
        for method in METHODS
    }
    number = len(after["stare"])
    return Setting(name, f"{number} seeds each", runs["stare-1"][key][0], after, paired=True)


def entropy_title(long: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Title of the entropy panel, by the share of steps that each run was within the band."""

    def share(method: str) -> float:
        return min(run["entropy"]["held"] for run in long[method])

    held = "holds its target" if share("stare") >= 0.9 else "misses its target"
    ends = fmean(run["entropy"]["end"] for run in long["grpo"])
    how = "falls to" if share("grpo") < 0.1 and ends < TARGET else "ends at"
    return f"Entropy: STARE {held}, GRPO {how} {ends:.3f}"


def accuracy_title(found: Sequence[Setting]) -> str:
    """Title of the accuracy panel."""
    words = {each.verdict for each in found}
    if words == {"alike"}:
        return "Sampled pass@1: no significant difference"
    return f"Sampled pass@1: {'; '.join(f'{e.verdict} ({e.name})' for e in found)}"


def figure() -> str:
    """The picture as SVG, for light and dark."""
    long = long_runs()
    found = settings(long)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{escape(entropy_title(long))}. {escape(accuracy_title(found))}.">',
        f"<style>{STYLE}</style>",
        f'<rect class="bg" x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>',
        _text(20, 32, entropy_title(long), "ink h"),
        _text(20, 54, "quickstart's task, the sum of three numbers, 2,000 steps;", "soft t"),
        _text(20, 71, f"nats, means of {EACH} steps, {_counts(long)}", "soft t"),
        _text(SECOND - 38, 32, accuracy_title(found), "ink h"),
        _text(SECOND - 38, 54, "held-out problems (1,000) after training; dots: runs,", "soft t"),
        _text(SECOND - 38, 71, "bars: mean with 95 % interval; dashes: before training", "soft t"),
        *_entropy(long),
        *_accuracy(found),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _counts(long: Mapping[str, Sequence[Any]]) -> str:
    return " and ".join(f"{len(long[m])} runs of {NAMES[m]}" for m in METHODS) + ", one seed"


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _scale(value: float, low: float, high: float) -> float:
    return BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP)


def _grid(ticks: Sequence[float], left: int, right: int, label: str) -> list[str]:
    out = []
    for tick in ticks:
        y = _scale(tick, ticks[0], ticks[-1])
        kind = "axis" if tick == ticks[0] else "grid"
        out.append(f'<line class="{kind}" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(_text(left - 8, y + 4.5, label.format(tick), "soft t", "end"))
    return out


def _entropy(long: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    ticks = [0, 0.05, 0.1, 0.15]
    out = _grid(ticks, LEFT, MIDDLE, "{:.2f}")
    steps = EACH * len(long["stare"][0]["entropy"]["each_100"])

    def x(step: float) -> float:
        return LEFT + step / steps * (MIDDLE - LEFT)

    def y(value: float) -> float:
        return _scale(value, ticks[0], ticks[-1])

    high, low = y(TARGET * (1 + BAND)), y(TARGET * (1 - BAND))
    out.append(
        f'<path class="band target" d="M{LEFT} {high:.1f}H{MIDDLE}V{low:.1f}H{LEFT}Z"/>'
        f'<path class="dash target" d="M{LEFT} {y(TARGET):.1f}H{MIDDLE}"/>'
    )
    for method in METHODS:
        for run in long[method]:
            points = (
                f"{x(EACH * (i + 0.5)):.1f} {y(value):.1f}"
                for i, value in enumerate(run["entropy"]["each_100"])
            )
            out.append(f'<path class="{method}" d="M{"L".join(points)}"/>')
    for step in range(0, steps + 1, 500):
        out.append(_text(x(step), BOTTOM + 20, f"{step:,}", "soft t", "middle"))
    out.append(_text((LEFT + MIDDLE) / 2, BOTTOM + 42, "training step", "soft t", "middle"))
    # names where the lines are far apart
    out.append(_text(x(1990), low + 18, "STARE", "stare name", "end"))
    out.append(_text(x(1990), y(0.034), "GRPO", "grpo name", "end"))
    out.append(_text(x(1990), high - 7, f"target {TARGET:g} nats ± {BAND:.0%}", "soft t", "end"))
    return out


def _accuracy(found: Sequence[Setting]) -> list[str]:
    ticks = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    out = _grid(ticks, SECOND, RIGHT, "{:.1f}")
    room = (RIGHT - SECOND) / len(found)

    def y(value: float) -> float:
        return _scale(value, ticks[0], ticks[-1])

    for number, each in enumerate(found):
        middle = SECOND + room * (number + 0.5)
        out.append(
            f'<line class="start dash" x1="{middle - 48:g}" x2="{middle + 48:g}"'
            f' y1="{y(each.start):.1f}" y2="{y(each.start):.1f}"/>'
        )
        for side, method in ((-1, "stare"), (1, "grpo")):
            at = middle + 24 * side
            mean, low, high = mean_interval(each.after[method])
            bar = f"M{at:g} {y(min(high, 1)):.1f}V{y(low):.1f}M{at - 8:g} {y(mean):.1f}h16"
            out.append(f'<g class="{method}"><path class="bar" d="{bar}"/>')
            out += [
                f'<circle cx="{at + 13 * side:g}" cy="{y(value):.1f}" r="3.4"/>'
                for value in each.after[method]
            ]
            out.append("</g>")
            if number == 0:
                out.append(
                    _text(at + 3 * side, y(low) + 19, NAMES[method], f"{method} name t", "middle")
                )
        mean, low, high = each.difference
        interval = f"[{low:+.3f}, {high:+.3f}]".replace("-", "−")
        lines = (*each.name.split(", ", 1), each.runs, f"{mean:+.3f}".replace("-", "−"), interval)
        for line, text in enumerate(lines):
            kind = "ink t" if line == 0 else "soft t"
            y_of = BOTTOM + 20 + 17 * line + (8 if line > 2 else 0)
            out.append(_text(middle, y_of, text, kind, "middle"))
    out.append(_text(SECOND - 4, BOTTOM + 79, "STARE", "soft t", "end"))
    out.append(_text(SECOND - 4, BOTTOM + 96, "less GRPO", "soft t", "end"))
    return out
