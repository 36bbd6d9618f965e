"""Writes the run report, one self-contained HTML file about the training of one or more runs.

Turns the files of one or more run directories (config.yaml, metrics.jsonl, eval.jsonl) into
report.html. The report loads no other file, so it can be mailed, archived and opened offline. This
module prepares the content. `page.html.jinja` arranges the content. The first screen of the page
shows the outcome of the runs. The sections below the first screen are folded, and a reader can
unfold each section. Without JavaScript, a browser shows everything except the token view.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_stare.errors import DataError
from megatron_stare.observability.metrics.conditions import BAND
from megatron_stare.observability.metrics.figures import Figure, outline, started, verdict
from megatron_stare.observability.metrics.planned import planned_and_measured
from megatron_stare.observability.metrics.scales import intervals_on, short
from megatron_stare.observability.report.charts import OWN_COLOUR, PALETTE, Chart, Line, draw
from megatron_stare.observability.report.comparison import (
    against,
    outcome,
    settings_that_tell,
)
from megatron_stare.observability.report.diagnostic_charts import (
    lines_of,
    parts,
    selection,
    token_norms,
)
from megatron_stare.observability.report.headline import alike, headline, problems
from megatron_stare.observability.report.token_view import view_of_run
from megatron_stare.run_dir.json_lines import Record
from megatron_stare.run_dir.liveness import how_it_stands
from megatron_stare.run_dir.run_files import RunRecord, evaluation_figures, read_runs, result_name

# If entropy starts above this multiple of the target, the band is hard to see: a second chart cuts
# off the top.
_ZOOM = 2.5
_CHARTS = (  # metric, title, unit
    ("response/length_mean", "Response length", "tokens, mean over the batch"),
    ("optimizer/grad_norm", "Gradient norm", "before clipping"),
    ("loss/clip_fraction", "Clip fraction", "share of tokens"),
    ("perf/tokens_per_s", "Throughput", "tokens a second"),
)
_EVALUATED = (
    ("full_solve", "share of problems with only right responses"),
    ("distinct_solutions", "distinct right responses a problem"),
    ("length_mean", "tokens a response"),
    ("reflection/backtracking", "words a response"),
)
_MORE = (  # only if a run recorded them
    ("response/reflections", "Reflection", "words a response, of observability.reflection_words"),
    ("group/degenerate", "Groups that teach nothing", "share whose rewards are all equal"),
    ("response/truncated", "Responses cut off", "share, at the length limit"),
    ("optimizer/lr", "Learning rate", "of the schedule"),
)
_ABOUT = {  # sentences about folded parts of the page
    "figures": "Steps, time, memory, and how far engine and trainer agree.",
    "curves": "Length, gradient norm, clipping and throughput of every step, and the tokens that"
    " the method selects.",
    "tokens": "Sampled responses with every token's surprisal, entropy, advantage and weight.",
}
_ABOUT_SUPERVISED = {
    "figures": "Entropy, steps, time and memory.",
    "curves": "Length, gradient norm and throughput of every step.",
    "tokens": "Rows of some steps, with every token's surprisal and entropy before the step.",
}
# phases in the order of a step
_ORDER = ("data", "rollout", "reward", "log_probs", "update", "sync")
_BESIDE = ("step", "eval", "checkpoint")  # the whole step, and phases between steps
REST = "the rest"
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":")}


def write_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Writes the report of one or several runs. The lines of several runs are overlaid in the same
    charts.

    Returns:
        `out`.

    Raises:
        DataError: `run_dirs` is empty, a directory contains no files of a run, `out` is the
            report.html of one of several runs, or `out` cannot be written.
    """
    if not run_dirs:
        raise DataError("no run directory given")
    own = [Path(run) / "report.html" for run in run_dirs]
    if len(run_dirs) > 1 and Path(out).resolve() in [path.resolve() for path in own]:
        raise DataError(
            "the comparison would overwrite this report of one of its runs",
            where=str(out),
            fix="name another file: --out FILE",
        )
    return write_page(_page(read_runs(run_dirs)), Path(out), "the report")


def _page(runs: Sequence[RunRecord]) -> str:
    by_run = [{figure.label: figure for figure in verdict(run)} for run in runs]
    labels = dict.fromkeys(
        label for figures in sorted(by_run, key=len, reverse=True) for label in figures
    )
    compared = [(f"{run.name} − {runs[0].name}", against(runs[0], run)) for run in runs[1:]]
    headlines = [headline(run) for run in runs]
    said_twice = [
        remark
        for remark, times in Counter(r for h in headlines for r in h.remarks).items()
        if times > 1
    ]
    told, about_settings = settings_that_tell(runs)
    first = {figure.label for figures in by_run for figure in figures.values() if figure.first}
    stated = [
        (
            label,
            [figures.get(label) for figures in by_run]
            + [column.get(label) for _, column in compared],
        )
        for label in labels
    ]
    charts, more = _charts(runs)
    supervised = all(run.supervised for run in runs)
    return TEMPLATES.get_template("page.html.jinja").render(
        runs=runs,
        palette=PALETTE,
        draw=draw,
        short=short,
        heading=runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
        outlines=[outline(run) for run in runs],
        started=[started(run) for run in runs],
        standing=[how_it_stands(run) for run in runs],
        headlines=headlines,
        outcomes=[said for run in runs[1:] if (said := outcome(runs[0], run))],
        remarks=[*said_twice, *alike(runs)],
        compared=[name for name, _ in compared],
        figures=[row for row in stated if row[0] in first and _told(row[1])],
        more_figures=[row for row in stated if row[0] not in first or not _told(row[1])],
        problems=[problems(run) for run in runs],
        by_token=f"{'Rows' if supervised else 'Responses'} by token",
        about=_ABOUT | (_ABOUT_SUPERVISED if supervised else {}),
        charts=charts,
        more_charts=more,
        parts=parts(runs),
        times=times(runs),
        planned=[(run.name, found) for run in runs if (found := planned_and_measured(run.metrics))],
        norms=[(run.name, table) for run in runs if (table := token_norms(run))],
        views=[(run.name, view) for run in runs if (view := view_of_run(run.directory))],
        samples=[
            (run.name, task, rows)
            for run in runs
            for task in run.tasks
            if (rows := _samples(run.on_task(task)))
        ],
        settings=told,
        about_settings=about_settings,
    )


def _told(row: Sequence[Figure | None]) -> bool:
    """Returns True if at least one column of a table row has a value."""
    return any(figure and figure.value != "–" for figure in row)


def _charts(runs: Sequence[RunRecord]) -> tuple[list[Chart], list[Chart]]:
    """Returns two lists: the charts of the report's first screen, and all other charts."""
    entropy, *near = _entropy(runs)
    first = [entropy, Chart("Reward", "mean over the batch", lines_of(runs, "reward/mean")), *near]
    charts = [Chart(title, unit, lines_of(runs, key)) for key, title, unit in _CHARTS]
    if all(run.supervised for run in runs):
        first = [Chart("Loss", "nats a token", lines_of(runs, "loss/policy")), entropy]
        held_out = lines_of(runs, "heldout/loss")
        if any(line.values for line in held_out):
            first.insert(1, Chart("Held-out loss", "nats a token", held_out, raw=True, joined=True))
        charts = [chart for chart in charts if any(line.values for line in chart.lines)]
    charts += selection(runs)
    more = [
        Chart(title, unit, lines_of(runs, key), exact=key == "optimizer/lr")
        for key, title, unit in _MORE
    ]
    charts += [chart for chart in more if any(line.values for line in chart.lines)]
    for task in dict.fromkeys(task for run in runs for task in run.tasks):
        evals = [(run.name, i, run.on_task(task).evals) for i, run in enumerate(runs)]
        # before and after are among the figures already
        if all(len(records) <= 2 for _, _, records in evals):
            continue
        lines = [
            Line(
                name,
                colour,
                [e["step"] for e in records],
                [e.get("pass1", math.nan) for e in records],
            )
            for name, colour, records in evals
        ]
        title = f"Evaluation, {task}" if task else "Evaluation"
        unit = " or ".join(
            dict.fromkeys(result_name(e) for _, _, records in evals for e in records)
        )
        # with several tasks, the first screen shows the task of its headline
        (first if task == runs[0].tasks[0] else charts).append(
            Chart(title, f"{unit}, sampled", lines, raw=True)
        )
        charts += _more_of(title, evals)
    return first, charts


def _more_of(title: str, evals: Sequence[tuple[str, int, Sequence[Record]]]) -> list[Chart]:
    """Returns additional charts of an evaluation task, such as charts of pass@k and maj@k. The
    chart of the mean result is not among these charts. Returns no charts if every problem is
    answered only once."""
    found = [[evaluation_figures(record) for record in records] for _, _, records in evals]
    named = list(dict.fromkeys(name for figures in found for each in figures for name in each))
    largest = {
        name.partition("@")[0]: name for name in named if "@" in name and not name.endswith("@1")
    }
    wanted = [(largest[kind], "share of problems") for kind in ("pass", "maj") if kind in largest]
    charts = []
    for name, unit in [*wanted, *_EVALUATED] if wanted else []:
        lines = [
            Line(
                run,
                colour,
                [record["step"] for record in records],
                [each.get(name, math.nan) for each in figures],
            )
            for (run, colour, records), figures in zip(evals, found, strict=True)
        ]
        charts.append(Chart(f"{title}: {name.replace('_', ' ')}", unit, lines, raw=True))
    return charts


def _entropy(runs: Sequence[RunRecord]) -> list[Chart]:
    targets = {
        # runs with the same target share one band, as long as the longest run
        (min(known), max(known)): line
        for line in sorted(lines_of(runs, "entropy/target"), key=lambda line: len(line.values))
        if (known := [value for value in line.values if math.isfinite(value)])
    }
    gates = [(g, intervals_on(g.steps, g.values)) for g in lines_of(runs, "stare/gate") if g.values]
    drawn = [
        replace(line, label="target", colour=OWN_COLOUR if len(targets) == 1 else line.colour)
        for line in targets.values()
    ]
    whose = "target" if len(targets) == 1 else "each run's target"
    parts = [f"Dashed: {whose} with ±{BAND:.0%}."] if targets else []
    if gates and not any(spans for _, spans in gates):
        parts.append("The gate never opened.")
    elif gates:
        parts.append(
            "Shaded: steps with the gate open."
            if len(gates) == 1
            else "Strips below, one per run: steps with the gate open."
        )
    chart = Chart(
        "Entropy",
        "nats, mean over the batch",
        lines_of(runs, "entropy/mean"),
        drawn,
        BAND,
        gates,
        " ".join(parts),
    )
    ceiling = _ZOOM * max((high for _, high in targets), default=math.inf)
    if not any(value > ceiling for line in chart.lines for value in line.values):
        return [chart]
    return [chart, replace(chart, title="Entropy near the target", y_limit=ceiling)]


def _samples(run: RunRecord) -> list[tuple[object, object, Record | None, Record | None]]:
    """Returns one tuple per prompt: the prompt, its reference answer, the sample before training,
    and the sample after training."""
    before = {s.get("prompt"): s for s in (run.before or {}).get("samples") or []}
    after = {s.get("prompt"): s for s in (run.after or {}).get("samples") or []}
    return [
        (
            prompt,
            (after.get(prompt) or before[prompt]).get("answer"),
            before.get(prompt),
            after.get(prompt),
        )
        for prompt in dict.fromkeys([*after, *before])
    ]


@dataclass(frozen=True)
class Part:
    """Mean seconds of one phase per step, and the phase's share of the step time."""

    seconds: float
    share: float


def times(runs: Sequence[RunRecord]) -> list[tuple[str, list[Part | None]]]:
    """Returns one row per phase, in the order in which a step goes through the phases. A row
    contains the phase's name, and one entry per run: a `Part`, or None if the run lacks the phase.
    Returns [] if no run has timings."""
    columns = [_phases(run) for run in runs]
    names = dict.fromkeys(name for name in _ORDER if any(name in column for column in columns))
    names |= dict.fromkeys(name for column in columns for name in column if name != REST)
    if any(REST in column for column in columns):
        names[REST] = None
    return [(name, [column.get(name) for column in columns]) for name in names]


def _phases(run: RunRecord) -> dict[str, Part]:
    """Returns the `Part` of every phase of a run. The averages leave out the first step, because
    the first step includes warm-up. The averages include the first step only if the run has no
    other step."""
    rows = run.metrics[1:] or run.metrics
    sums: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("time/") and math.isfinite(value):
                name = key.removeprefix("time/").removesuffix("_s")
                sums[name] = sums.get(name, 0.0) + value
    whole = sums.get("step", 0.0)
    parts = {name: value for name, value in sums.items() if name not in _BESIDE}
    if not parts or not whole:
        return {}
    parts[REST] = max(0.0, whole - sum(parts.values()))
    return {name: Part(value / len(rows), value / whole) for name, value in parts.items()}


def write_page(page: str, out: Path, what: str) -> Path:
    """Writes a page atomically and returns `out`. A reader of the file sees either the whole old
    page or the whole new page.

    Args:
        what: name of the page in an error.

    Raises:
        DataError: the page cannot be written.
    """
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # an answer may hold half of a surrogate pair
        temporary.write_text(page, encoding="utf-8", errors="replace")
        os.replace(temporary, out)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise DataError(
            f"{what} cannot be written ({error.strerror})",
            where=str(out),
            fix="name another file: --out FILE",
        ) from error
    return out
