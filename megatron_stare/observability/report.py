"""The run report: one self-contained HTML file that says how training went.

Comes from the files of one or more run directories (config.yaml, metrics.jsonl, eval.jsonl); goes to report.html. It
loads nothing from anywhere, so it can be mailed, archived and opened without a network.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from megatron_stare.errors import DataError
from megatron_stare.observability.charts import OWN_COLOUR, Chart, Line, render
from megatron_stare.observability.diagnostic_charts import Part, parts
from megatron_stare.observability.figures import settings, verdict
from megatron_stare.observability.paired import BAND
from megatron_stare.observability.report_style import CSS, PALETTE, SCRIPT
from megatron_stare.observability.run_files import RunRecord, read_runs, result_name
from megatron_stare.observability.scales import intervals_on, short

# The browser is told as well to fetch nothing, whatever a sample or a setting may hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_ZOOM = 2.5  # times the target; entropy that starts above it hides the band, so a second chart leaves its top out
_CHARTS = (  # metric, title, unit
    ("response/length_mean", "Response length", "tokens, mean over the batch"),
    ("optimizer/grad_norm", "Gradient norm", "before clipping"),
    ("loss/clip_fraction", "Clip fraction", "share of tokens"),
    ("perf/tokens_per_s", "Throughput", "tokens a second"),
)


def write_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Writes the report of one run, or of several overlaid in the same charts.

    Returns:
        `out`.

    Raises:
        DataError: no run directory given, one of them holds nothing a run writes, or `out` cannot be written.
    """
    if not run_dirs:
        raise DataError("no run directory given")
    page = _page(read_runs(run_dirs))
    out = Path(out)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, out)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise DataError(
            f"the report cannot be written ({error.strerror})", where=str(out), fix="name another file: --out FILE"
        ) from error
    return out


def _page(runs: Sequence[RunRecord]) -> str:
    many = " many" if len(runs) > 1 else ""
    title = " · ".join(run.name for run in runs)
    body = "\n".join(
        [
            _header(runs),
            _figures(runs),
            "<h2>Training</h2>",
            _legend(runs),
            _drawn(_charts(runs), many),
            *[_part(part, many) for part in parts(runs)],
            *[_samples(run, task, several=len(runs) > 1) for run in runs for task in run.tasks],
            "<h2>Settings</h2>",
            _table(runs, [settings(run) for run in runs]),
            *[_config(run) for run in runs if run.config_text],
            f"<footer>{escape(', '.join(str(run.directory) for run in runs))}</footer>",
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _header(runs: Sequence[RunRecord]) -> str:
    if len(runs) > 1:
        heading, line = f"{len(runs)} runs compared", ", ".join(run.name for run in runs)
    else:
        facts = dict(settings(runs[0]))
        heading = runs[0].name
        line = " · ".join(facts[key] for key in ("Algorithm", "Model", "Batch") if key in facts)
    return (
        f'<header><p class="eyebrow">megatron_stare · run report</p><h1>{escape(heading)}</h1>'
        f"<p>{escape(line)}</p></header>"
    )


def _figures(runs: Sequence[RunRecord]) -> str:
    if len(runs) == 1:
        cards = [
            f'<div class="card {f.tone}"><div class="label">{escape(f.label)}</div>'
            f'<div class="value">{escape(f.value)}</div><div class="note">{escape(f.note)}</div></div>'
            for f in verdict(runs[0])
        ]
        return f'<div class="cards">{"".join(cards)}</div>'
    by_run = [{f.label: f for f in verdict(run)} for run in runs]
    labels = dict.fromkeys(label for figures in sorted(by_run, key=len, reverse=True) for label in figures)
    rows = []
    for label in labels:
        cells = "".join(
            f'<td class="{f.tone}"><b>{escape(f.value)}</b><span class="note">{escape(f.note)}</span></td>'
            if (f := figures.get(label))
            else "<td>–</td>"
            for figures in by_run
        )
        rows.append(f"<tr><th>{escape(label)}</th>{cells}</tr>")
    return _wrap(_names(runs), rows)


def _table(runs: Sequence[RunRecord], columns: Sequence[Sequence[tuple[str, str]]]) -> str:
    values = [dict(column) for column in columns]
    labels = list(dict.fromkeys(label for column in columns for label, _ in column))

    def cells(label: str) -> str:
        return "".join(f"<td>{escape(v.get(label, '–'))}</td>" for v in values)

    rows = [f"<tr><th>{escape(label)}</th>{cells(label)}</tr>" for label in labels]
    return _wrap(_names(runs) if len(runs) > 1 else "", rows) if rows else ""


def _names(runs: Sequence[RunRecord]) -> str:
    cells = "".join(f"<th>{_dot(i)}{escape(run.name)}</th>" for i, run in enumerate(runs))
    return f"<thead><tr><th></th>{cells}</tr></thead>"


def _wrap(head: str, rows: Sequence[str], kind: str = "") -> str:
    return f'<div class="scroll"><table class="{kind}">{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _legend(runs: Sequence[RunRecord]) -> str:
    names = [f"<li>{_dot(i)}{escape(run.name)}</li>" for i, run in enumerate(runs)] if len(runs) > 1 else []
    key = '<li class="note">thin: every step · thick: centred average</li>'
    return f'<ul class="legend">{"".join(names)}{key}</ul>'


def _dot(number: int) -> str:
    return f'<span class="dot c{number % PALETTE}"></span>'


def _part(part: Part, many: str) -> str:
    return f'<h2>{escape(part.heading)}</h2><p class="about">{escape(part.about)}</p>{_drawn(part.charts, many)}'


def _drawn(charts: Sequence[Chart], many: str) -> str:
    return f'<div class="charts{many}">{"".join(render(chart) for chart in charts)}</div>'


def _charts(runs: Sequence[RunRecord]) -> list[Chart]:
    charts = [Chart("Reward", "mean over the batch", _lines(runs, "reward/mean")), *_entropy(runs)]
    charts += [Chart(title, unit, _lines(runs, key)) for key, title, unit in _CHARTS]
    for task in dict.fromkeys(task for run in runs for task in run.tasks):
        evals = [(run.name, i % PALETTE, run.on_task(task).evals) for i, run in enumerate(runs)]
        if all(len(records) <= 2 for _, _, records in evals):  # before and after alone are in the figures already
            continue
        lines = [
            Line(name, colour, [e["step"] for e in records], [e.get("pass1", math.nan) for e in records])
            for name, colour, records in evals
        ]
        title = f"Evaluation, {task}" if task else "Evaluation"
        unit = " or ".join(dict.fromkeys(result_name(e) for _, _, records in evals for e in records))
        charts.append(Chart(title, f"{unit}, sampled", lines, raw=True))
    return charts


def _lines(runs: Sequence[RunRecord], key: str) -> list[Line]:
    return [Line(run.name, i % PALETTE, *run.series(key)) for i, run in enumerate(runs)]


def _entropy(runs: Sequence[RunRecord]) -> list[Chart]:
    targets = {
        (min(known), max(known)): line  # runs with the same target share one band, as long as the longest
        for line in sorted(_lines(runs, "entropy/target"), key=lambda line: len(line.values))
        if (known := [value for value in line.values if math.isfinite(value)])
    }
    gates = [(g, intervals_on(g.steps, g.values)) for g in _lines(runs, "stare/gate") if g.values]
    drawn = [
        replace(line, label="target", colour=OWN_COLOUR if len(targets) == 1 else line.colour)
        for line in targets.values()
    ]
    parts = [f"Dashed: target with ±{BAND:.0%}."] if targets else []
    if gates:
        parts.append("Shaded strips: gate on." if len(gates) == 1 else "Strips below: gate on, one lane a run.")
    chart = Chart(
        "Entropy", "nats, mean over the batch", _lines(runs, "entropy/mean"), drawn, BAND, gates, " ".join(parts)
    )
    ceiling = _ZOOM * max((high for _, high in targets), default=math.inf)
    if not any(value > ceiling for line in chart.lines for value in line.values):
        return [chart]
    return [chart, replace(chart, title="Entropy near the target", y_limit=ceiling)]


def _samples(run: RunRecord, task: str | None, several: bool) -> str:
    run = run.on_task(task)
    before = {s.get("prompt"): s for s in (run.before or {}).get("samples") or []}
    after = {s.get("prompt"): s for s in (run.after or {}).get("samples") or []}
    if not before and not after:
        return ""
    rows = []
    for prompt in dict.fromkeys([*after, *before]):
        answer = (after.get(prompt) or before[prompt]).get("answer")
        rows.append(
            f'<tr><td><div class="text">{escape(str(prompt))}</div></td><td>{escape(str(answer))}</td>'
            f"<td>{_reply(before.get(prompt))}</td><td>{_reply(after.get(prompt))}</td></tr>"
        )
    head = (
        '<thead><tr><th class="problem">Problem</th><th class="answer">Answer</th>'
        "<th>Before training</th><th>After training</th></tr></thead>"
    )
    title = f"Responses, {escape(run.name)}" if several else "Responses before and after"
    title += f", {escape(task)}" if task else ""
    return f"<h2>{title}</h2>{_wrap(head, rows, 'samples')}"


def _reply(sample: dict[str, Any] | None) -> str:
    if sample is None:
        return "–"
    reward = sample.get("reward")
    tone = "good" if reward is not None and reward > 0 else ""
    mark = "not verified" if reward is None else f"reward {short(reward)}"
    return f'<div class="text reply">{escape(str(sample.get("response")))}</div><div class="mark {tone}">{mark}</div>'


def _config(run: RunRecord) -> str:
    return f"<details><summary>config.yaml, {escape(run.name)}</summary><pre>{escape(run.config_text)}</pre></details>"
