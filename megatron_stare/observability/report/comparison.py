"""Compares the first run of a report with each of the report's other runs, by paired tests, and
lists the settings in which the runs differ.

Reads `RunRecord`s, and fills the report's columns of differences and its table of settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_stare.observability.metrics.figures import NOT_OPTIMISED, Figure, Tone, labels_of
from megatron_stare.observability.metrics.paired import RECENT, compared, paired_interval
from megatron_stare.observability.metrics.scales import short
from megatron_stare.run_dir.run_files import RunRecord

LAST = 1 / 3  # share of the runs' common steps over which they are compared
_NO_DIFFERENCE = "; no significant difference"
_NOT_SIGNIFICANT = "not significantly different"
_BY_STEP = (
    ("Entropy, last third", "entropy/mean", ""),
    (f"Reward, last {RECENT} steps", "reward/mean", "good"),
)


def against(first: RunRecord, run: RunRecord) -> dict[str, Figure]:
    """Compares the results of `run` with the results of `first`. Returns a dict that maps each
    result's label in the report to the difference of this result. A difference is the value of
    `run` minus the value of `first`."""
    found: dict[str, Figure] = {}
    for task in first.tasks:
        one, two = first.on_task(task), run.on_task(task)
        for label, results in zip(labels_of(one, task), ("correct", "greedy_correct"), strict=True):
            if one.after and two.after and one.after.get(results) and two.after.get(results):
                found[label] = _problems(one.after, two.after, results)
        sampled, greedy = (found.get(label) for label in labels_of(one, task))
        if sampled and greedy and sampled.tone == "good" and greedy.tone == "warn":
            note = f"{greedy.note}; {NOT_OPTIMISED}"
            found[labels_of(one, task)[1]] = replace(greedy, tone="", note=note)
    for label, key, good in _BY_STEP:
        if figure := _steps(first, run, key, good):
            found[label] = figure
    return found


def outcome(first: RunRecord, run: RunRecord) -> str:
    """Returns a sentence that compares `run` with the first run. The sentence tells how the
    entropies of the two runs differ, and how the results of the two runs on the first task differ.
    The results come from evaluations with sampled responses. If one of the two runs has no
    evaluation with sampled responses, the sentence compares the runs' rewards instead of evaluation
    results. Returns "" if the two runs have nothing in common that can be compared."""
    found, task = against(first, run), first.tasks[0]
    label = labels_of(first.on_task(task), task)[0]
    name = label.partition(", ")[0]
    parts = []
    if sampled := found.get(label):
        note = sampled.note.replace(", 95 %, paired by problem", "").removesuffix(_NO_DIFFERENCE)
        if sampled.value == "–":
            parts.append(f"sampled {name} cannot be compared ({note})")
        else:
            word = {"good": "higher", "warn": "lower"}.get(sampled.tone, _NOT_SIGNIFICANT)
            parts.append(f"sampled {name} {word} ({sampled.value} {note})")
    for label, key, _ in _BY_STEP[: 1 if parts else None]:
        if pair := _over_steps(first, run, key):
            what, word = label.partition(",")[0].lower(), "lower" if pair.mean < 0 else "higher"
            if math.isnan(pair.low):
                word = "measured in too few steps to judge"
            elif pair.low <= 0 <= pair.high:
                word = _NOT_SIGNIFICANT
            means = f"{short(pair.ours)} against {short(pair.theirs)}"
            parts.append(f"{what} {word}, {means} in {_last_of_both(pair.steps)}")
    return f"{run.name} against {first.name}: {'; '.join(parts)}." if parts else ""


def _problems(one: Mapping[str, Any], two: Mapping[str, Any], results: str) -> Figure:
    pair = compared(one, two, results)
    if isinstance(pair, str):
        return Figure("", "–", pair)
    mean, low, high = pair
    interval = (
        f"[{low:+.3f}, {high:+.3f}], 95 %, paired by problem"
        if not math.isnan(low)
        else "one problem"
    )
    steps = one.get("step"), two.get("step")
    apart = f"; after steps {steps[0]} and {steps[1]}" if steps[0] != steps[1] else ""
    return Figure("", f"{mean:+.3f}", interval + apart + _word(low, high), _tone(low, high))


def _steps(first: RunRecord, run: RunRecord, key: str, good: str) -> Figure | None:
    """Compares the values of the metric `key` in `run` with the values of the same metric in the
    first run. The comparison uses the steps in which both runs logged a finite value, and only the
    last third of these steps. Neighbouring steps are not independent, so each block of `RECENT`
    consecutive steps counts as one observation."""
    pair = _over_steps(first, run, key)
    if pair is None:
        return None
    said = f"{short(pair.ours)} against {short(pair.theirs)} in {_last_of_both(pair.steps)}"
    if math.isnan(pair.low):
        return Figure("", f"{pair.mean:+.3g}", f"{said}, too few for an interval")
    interval = f"[{short(pair.low)}, {short(pair.high)}]"
    note = f"{interval}, 95 %, paired by step in blocks of {RECENT}, {said}"
    tone = _tone(pair.low, pair.high) if good else ""
    return Figure("", f"{pair.mean:+.3g}", note + _word(pair.low, pair.high), tone)


@dataclass(frozen=True)
class _Pair:
    """Difference of a metric between `run` and the first run, over the last third of the steps that
    both runs have.

    Contains the mean of the difference, the confidence interval of this mean, the metric's mean in
    each run, and the number of steps.
    """

    mean: float
    low: float
    high: float
    ours: float
    theirs: float
    steps: int


def _over_steps(first: RunRecord, run: RunRecord, key: str) -> _Pair | None:
    ours, theirs = (
        {row["step"]: row[key] for row in r.metrics if math.isfinite(row.get(key, math.nan))}
        for r in (run, first)
    )
    shared = sorted(ours.keys() & theirs.keys())
    shared = shared[-math.ceil(len(shared) * LAST) :]
    if not shared:
        return None
    blocks = [i // RECENT for i in range(len(shared))]
    interval = paired_interval(
        [theirs[s] for s in shared], [ours[s] for s in shared], problems=blocks
    )
    mine, other = (sum(of[s] for s in shared) / len(shared) for of in (ours, theirs))
    return _Pair(*interval, mine, other, len(shared))


def _word(low: float, high: float) -> str:
    return _NO_DIFFERENCE if low <= 0 <= high else ""


def _last_of_both(steps: int) -> str:
    return f"the last {steps} steps that both have" if steps > 1 else "the last step that both have"


def _tone(low: float, high: float) -> Tone:
    return "good" if low > 0 else "warn" if high < 0 else ""


def settings_that_tell(runs: Sequence[RunRecord]) -> tuple[list[tuple[str, list[str | None]]], str]:
    """Returns a table of settings, and a sentence that says which settings are in the table. The
    table has a row for each setting that at least one run has changed from its default. The table
    also has a row for each setting for which the runs have different values. A row contains the
    setting's name and the setting's value in every run. If the defaults are not known, the table
    has a row for every setting."""
    trees = [_flat(run.config) for run in runs]
    defaults = [_defaults(run.config) for run in runs]
    known = all(default is not None for default in defaults)
    keys = dict.fromkeys(key for tree in trees for key in tree)
    rows = []
    for key in keys:
        values = [tree.get(key) for tree in trees]
        usual = [default.get(key) if default else None for default in defaults]
        differs = any(value != values[0] for value in values)
        if key not in _UNTOLD and (differs or not known or values != usual):
            rows.append((key, [None if key not in tree else _plain(tree[key]) for tree in trees]))
    said = "Settings that differ from the defaults"
    said += " or between the runs" if len(runs) > 1 else ""
    unknown = "All settings, because the defaults of a method are not known here."
    return rows, f"{said}." if known else unknown


_UNTOLD = ("format", "run.dir")  # shown elsewhere on the page


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    if above == "" and isinstance(tree.get("algorithm"), str):  # the short form, written by hand
        found["algorithm.name"] = found.pop("algorithm")
    return found


def _defaults(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the default settings of the configuration's method, or None if the method is unknown
    or its class cannot be imported.

    Imports the method's class, and therefore torch, which no other part of the report needs.
    """
    algorithm = config.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
    try:
        from megatron_stare.config.schema import Config

        model = Config.model_validate({"model": {"path": "-"}, "algorithm": {"name": name}})
    except (ImportError, ValueError):  # from pydantic, or ours for an unknown name
        return None
    found = _flat(model.model_dump(mode="json"))
    return {
        key: value for key, value in found.items() if key not in ("model.path", "algorithm.name")
    }


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
