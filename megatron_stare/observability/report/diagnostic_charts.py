"""Builds the report's charts about the entropy forecast and about signs of reward hacking.
docs/diagnostics.md explains these charts.

Turns metric series of one or more runs into charts for `page.py`. Skips metrics that no run
recorded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from megatron_stare.observability.metrics.paired import forecast_fit
from megatron_stare.observability.metrics.reward_hacking import FEW_TOKENS, NGRAM
from megatron_stare.observability.metrics.scales import short, smooth
from megatron_stare.observability.report.charts import SMOOTH_FROM, Chart, Line
from megatron_stare.run_dir.run_files import RunRecord

FORECAST, MEASURED = "forecast/entropy_change", "forecast/measured_change"
_DOTS = 80  # number of measurements up to which each is a dot
_QUADRANTS = (  # metric, label, class: the colours of L+ and L- in the token view
    ("forecast/mass_common_plus", "U+ common, rewarded", "plus common"),
    ("forecast/mass_rare_plus", "L+ rare, rewarded", "plus"),
    ("forecast/mass_common_minus", "U− common, punished", "minus common"),
    ("forecast/mass_rare_minus", "L− rare, punished", "minus"),
)
_SETS = (  # of STARE's selection: end of the metric's name, label, class
    ("plus", "L+", "plus"),
    ("minus", "L−", "minus"),
    ("common_plus", "U+", "plus common"),
    ("common_minus", "U−", "minus common"),
)
# lower ends of the cells of gradient/token_norm_<n>, except the first; the same as in
# algorithms/gradient_norm.py
PROBABILITIES, ENTROPIES = (0.002, 0.05, 0.5, 0.9), (0.1, 0.5, 1.5)
_SIGNALS = (  # metric, title, unit, caption
    (
        "signal/length_reward",
        "Length and reward",
        "correlation over the batch",
        "Above 0: longer responses earn more; below: shorter ones.",
    ),
    (
        "signal/repetition",
        "Repetition",
        f"share of {NGRAM}-grams that occurred before",
        "Rising: responses repeat themselves.",
    ),
    (
        "signal/format",
        "Answers in the right format",
        "share",
        "Verified responses in which the verifier finds an answer.",
    ),
    (
        "signal/no_reasoning",
        "Answers without reasoning",
        "share of right answers",
        f"Right answers with fewer than {FEW_TOKENS} tokens before them.",
    ),
)


@dataclass(frozen=True)
class Part:
    """A part of the report, with a heading, a sentence about the part's content, and charts."""

    heading: str
    about: str
    charts: Sequence[Chart]


def parts(runs: Sequence[RunRecord]) -> list[Part]:
    """Returns the parts of the report for which the runs have data."""
    found = [
        Part(
            "Entropy forecast",
            "First-order forecast of how a step changes the entropy of its tokens, and the"
            " measured change.",
            _recorded(
                [
                    _change(runs),
                    *_quadrants(runs),
                    _neutral_weight(runs),
                    _rare(runs),
                    *_proxy(runs),
                    _gradient(runs),
                ]
            ),
        ),
        Part(
            "Signs of reward hacking",
            "No sign proves anything alone. If one turns while the reward rises, read some"
            " responses.",
            _recorded([_lengths(runs), *_signals(runs)]),
        ),
    ]
    return [part for part in found if part.charts]


def _change(runs: Sequence[RunRecord]) -> Chart:
    measured, forecasts, notes = [], [], []
    for run, line, rate in zip(
        runs, lines_of(runs, MEASURED), lines_of(runs, FORECAST), strict=True
    ):
        _, lr = run.series("optimizer/lr")
        # a step's length is proportional to its learning rate
        rates = [f * factor for f, factor in zip(rate.values, lr, strict=False)]
        pairs = [
            (s, f, m)
            for s, f, m in zip(line.steps, rates, line.values, strict=False)
            if math.isfinite(f + m)
        ]
        steps, rates, changes = ([pair[i] for pair in pairs] for i in range(3))
        measured.append(replace(line, steps=steps, values=changes))
        fit = forecast_fit(rates, changes)
        if fit is None:
            continue
        forecasts.append(
            replace(
                rate, label="forecast, scaled", steps=steps, values=[fit.scale * x for x in rates]
            )
        )
        whose = f"{run.name}: " if len(runs) > 1 else ""
        together = f"correlation {fit.correlation:.2f}, " if math.isfinite(fit.correlation) else ""
        notes.append(
            f"{whose}{together}same sign in {fit.same_sign:.0%} of {fit.points} steps, scale"
            f" {short(fit.scale)}"
        )
    about = (
        "Solid: measured on the step's own tokens. Dashed: forecast × learning rate × one scale"
        " fitted to the run; "
    )
    return Chart(
        "Change of entropy in a step",
        "nats, mean",
        measured,
        forecasts,
        caption=f"{about}{'; '.join(notes)}." if notes else "",
        raw=max((len(line.values) for line in measured), default=0) <= _DOTS,
    )


def _quadrants(runs: Sequence[RunRecord]) -> list[Chart]:
    charts = []
    for run in runs:
        lines = [Line(label, 0, *run.series(key), kind) for key, label, kind in _QUADRANTS]
        title = f"Pull on the entropy, {run.name}" if len(runs) > 1 else "Pull on the entropy"
        caption = (
            "Above 0: the tokens raise the entropy; below 0: they lower it. The sum of the lines"
            " is the forecast without the method's weights. Solid: rare tokens. Dotted: common"
            " tokens."
        )
        charts.append(
            Chart(title, "nats a unit step, by quadrant", lines, caption=caption, key=True)
        )
    return charts


def _neutral_weight(runs: Sequence[RunRecord]) -> Chart:
    lines = lines_of(runs, "forecast/neutral_weight")
    sizes = sorted(abs(value) for line in lines for value in line.values if math.isfinite(value))
    # cut at the 95th percentile: a batch without L+ is an outlier
    limit = max(2.0, 1.2 * sizes[int(0.95 * (len(sizes) - 1))]) if sizes else 2.0
    used = []
    for i, run in enumerate(runs):
        steps, gate = run.series("stare/gate")
        _, weight = run.series("stare/amplify")
        values = [1 + g * (w - 1) for g, w in zip(gate, weight, strict=False)]
        used.append(_dashed(Line("weight used", i, steps, values)))
    dashed = " Dashed: the weight that STARE used." if any(line.values for line in used) else ""
    return Chart(
        "W*",
        "weight on L+ that would hold the entropy",
        lines,
        [line for line in used if line.values],
        caption=f"Above 1: the entropy falls without reweighting.{dashed}",
        y_limit=limit,
        y_floor=-limit,
    )


def selection(runs: Sequence[RunRecord]) -> list[Chart]:
    """Returns two charts for each run that selects tokens: the thresholds of STARE's selection, and
    the number of selected tokens."""
    charts = []
    for run in runs:
        whose = f", {run.name}" if len(runs) > 1 else ""
        for what, title, unit, caption in (
            (
                "threshold",
                "Threshold of surprisal",
                "nats",
                "L+ and L− lie at or above their threshold, U+ and U− at or below it.",
            ),
            (
                "selected",
                "Tokens selected",
                "a step",
                "The size of each set.",
            ),
        ):
            lines = _of_sets(run, f"stare/{what}")
            charts.append(
                Chart(
                    f"{title}{whose}",
                    unit,
                    lines,
                    caption=caption,
                    key=True,
                    exact=what == "selected",
                )
            )
    return _recorded(charts)


def _proxy(runs: Sequence[RunRecord]) -> list[Chart]:
    """Returns two charts for each run that selects tokens. The first chart shows the precision of
    each set of selected tokens. For a set of high-surprisal tokens (L+ and L−), precision is the
    share of the set's tokens whose surprisal is above the critical surprisal of the token's
    position. For a set of low-surprisal tokens (U+ and U−), precision is the share of the set's
    tokens whose surprisal is not above the critical surprisal of the token's position. The second
    chart shows the effect of the selected tokens on the entropy, summed over the steps so far."""
    charts = []
    for run in runs:
        whose = f", {run.name}" if len(runs) > 1 else ""
        about = (
            "L+ and L−: share of the set above the critical surprisal of its position. U+ and U−:"
            " share at or below it."
        )
        precision = _of_sets(run, "forecast/precision")
        charts.append(Chart(f"Proxy precision{whose}", "share", precision, caption=about, key=True))
        about = (
            "Sum over the steps so far. Falling: the set's tokens raise the entropy; rising: they"
            " lower it."
        )
        sums = [
            replace(line, values=_running_sum(line.values))
            for line in _of_sets(run, "forecast/a_phi")
        ]
        charts.append(
            Chart(f"Cumulative ΣÂΦ{whose}", "nats a unit step", sums, caption=about, key=True)
        )
    return charts


def _of_sets(run: RunRecord, metric: str) -> list[Line]:
    """Returns the chart lines of a metric, with one line for each set of selected tokens,
    such as L+. Sets of tokens for which the run did not log the metric have no line."""
    lines = [Line(label, 0, *run.series(f"{metric}_{end}"), kind) for end, label, kind in _SETS]
    return [line for line in lines if line.values]


def _running_sum(values: Sequence[float]) -> list[float]:
    return list(accumulate(value if math.isfinite(value) else 0.0 for value in values))


def _gradient(runs: Sequence[RunRecord]) -> Chart:
    bounds = [
        _dashed(replace(line, label=name))
        for end, name in (("low", "lower bound"), ("high", "upper bound"))
        for line in lines_of(runs, f"gradient/logit_norm_{end}")
    ]
    return Chart(
        "Gradient in the logits",
        "norm",
        lines_of(runs, "gradient/logit_norm"),
        [line for line in bounds if line.values],
        caption=(
            "Gradient of a step's loss. Dashed: STAPO's bounds, computed from probabilities and"
            " entropies alone."
        ),
    )


def _rare(runs: Sequence[RunRecord]) -> Chart:
    caption = (
        "Tokens whose surprisal is above the critical surprisal of their position: a positive"
        " advantage on them raises the entropy."
    )
    return Chart(
        "Rare tokens",
        "share past the critical surprisal",
        lines_of(runs, "forecast/rare_share"),
        caption=caption,
    )


def _lengths(runs: Sequence[RunRecord]) -> Chart:
    wrong = [
        _dashed(replace(line, label="wrong")) for line in lines_of(runs, "signal/length_wrong")
    ]
    return Chart(
        "Length of right and wrong responses",
        "tokens, mean",
        lines_of(runs, "signal/length_right"),
        [line for line in wrong if line.values],
        caption="Solid: right. Dashed: wrong.",
    )


def _signals(runs: Sequence[RunRecord]) -> list[Chart]:
    return [
        Chart(title, unit, lines_of(runs, key), caption=caption)
        for key, title, unit, caption in _SIGNALS
    ]


def lines_of(runs: Sequence[RunRecord], key: str) -> list[Line]:
    """Returns a line for each run, with the run's values of one metric."""
    return [Line(run.name, i, *run.series(key)) for i, run in enumerate(runs)]


def _dashed(line: Line) -> Line:
    """Smooths a dashed line, because a dashed line shows a trend and not the value of each step."""
    return replace(line, values=smooth(line.values)) if len(line.values) >= SMOOTH_FROM else line


def _recorded(charts: Sequence[Chart]) -> list[Chart]:
    return [
        c for c in charts if any(math.isfinite(value) for line in c.lines for value in line.values)
    ]


@dataclass(frozen=True)
class TokenNorms:
    """Table of the mean gradient norms of tokens, with all cells formatted as text. The table's
    rows are ranges of a token's probability, and its columns are ranges of a token's entropy.

    `columns`: ranges of entropy.
    `rows`: one row per range of probability. A row contains its range of probability, an upper
        bound of the gradient norm, and one cell per range of entropy. The upper bound of the
        gradient norm is sqrt(2 - 2 p), where p is the lowest probability in the row's range. A cell
        contains the mean gradient norm of the cell's tokens, and the cell's share of all tokens. A
        cell without tokens is None.
    """

    step: int
    columns: Sequence[str]
    rows: Sequence[tuple[str, str, Sequence[tuple[str, str] | None]]]


def token_norms(run: RunRecord) -> TokenNorms | None:
    """Returns the token norms of the newest step that measured token norms, or None if no step
    measured them."""
    row = next((row for row in reversed(run.metrics) if "gradient/token_share_0" in row), None)
    if row is None:
        return None
    wide = len(ENTROPIES) + 1

    def cell(n: int) -> tuple[str, str] | None:
        norm = row.get(f"gradient/token_norm_{n}", math.nan)
        share = row[f"gradient/token_share_{n}"]
        return (short(norm), f"{share:.2%}") if share > 0 else None

    rows = [
        (label, short(math.sqrt(2 - 2 * low)), [cell(wide * number + n) for n in range(wide)])
        for number, (low, label) in enumerate(
            zip((0.0, *PROBABILITIES), _ranges(PROBABILITIES), strict=True)
        )
    ]
    return TokenNorms(int(row["step"]), _ranges(ENTROPIES), rows)


def _ranges(ends: Sequence[float]) -> list[str]:
    between = [f"{low:g} to {high:g}" for low, high in pairwise(ends)]
    return [f"below {ends[0]:g}", *between, f"{ends[-1]:g} and above"]
