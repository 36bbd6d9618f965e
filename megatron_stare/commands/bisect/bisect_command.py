"""Defines the arguments of `megatron-stare bisect` and runs the command. Imports torch only when
the command runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_stare.errors import ConfigError, DataError, UserError
from megatron_stare.process.signs_of_life import say_loading
from megatron_stare.run_dir.run_files import CONFIG_FILE

if TYPE_CHECKING:
    from megatron_stare.commands.bisect.explain import Explanation

CAUSES = ("gate", "correction", "staleness", "layout", "engine")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bisect`."""
    command.add_argument("run_dir", type=Path, metavar="RUN", help="run directory; it is only read")
    command.add_argument(
        "--from",
        dest="first",
        type=int,
        required=True,
        metavar="S",
        help="step of the checkpoint from which the steps are repeated",
    )
    command.add_argument(
        "--to", dest="last", type=int, required=True, metavar="T", help="last step to repeat"
    )
    command.add_argument(
        "--causes",
        metavar="A,B",
        help=f"causes to change, one at a time: {', '.join(CAUSES)}; default: all",
    )
    command.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="new folder for the repeated steps; default: bisects/NAME-S-T, with RUN's name",
    )
    command.add_argument(
        "--json", action="store_true", help="print the findings as JSON instead of a table"
    )


def run_command(args: argparse.Namespace) -> int:
    """Repeats the steps and prints the explanation.

    Returns:
        0 if the record matches the configuration. 1 if the bisection names a cause or cannot
        explain the record.

    Raises:
        UserError: the run cannot be bisected between these steps.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    found = bisect(args.run_dir, args.first, args.last, _chosen(args.causes), args.out, say=_say)
    print(json.dumps(as_tree(found), indent=2, allow_nan=False) if args.json else as_text(found))
    return 0 if found.reproduced and not found.cause else 1


def _chosen(causes: str | None) -> Sequence[str]:
    chosen = CAUSES if causes is None else tuple(map(str.strip, causes.split(",")))
    if unknown := [cause for cause in chosen if cause not in CAUSES]:
        raise ConfigError(
            f"unknown cause {unknown[0]!r}", where="--causes", fix=f"use {', '.join(CAUSES)}"
        )
    return chosen


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def bisect(
    run_dir: Path,
    first: int,
    last: int,
    causes: Sequence[str] = CAUSES,
    out: Path | None = None,
    say: Any = _say,
) -> Explanation:
    """Repeats steps `first` + 1 to `last` of a run several times: first without any change, and
    then once for each change that could explain a difference. Compares the run's recorded metrics
    with the metrics of the repeated steps. Returns an Explanation. If the metrics differ and a
    cause is found, the Explanation names the cause of the difference.

    Raises:
        UserError: the run, checkpoint or record is missing, the folder is not empty, or the run
            still uses its servers.
    """
    if not (run_dir / CONFIG_FILE).exists():
        raise DataError(f"no {CONFIG_FILE}: not a run directory", where=str(run_dir))
    say_loading()
    from megatron_stare.commands.bisect.causes import changes, contradictions
    from megatron_stare.commands.bisect.explain import Remade, explain
    from megatron_stare.commands.bisect.rerun import make_again, prepare
    from megatron_stare.config.load import load_recorded
    from megatron_stare.config.resolved import resolve_run
    from megatron_stare.rollout.engines.engine import Engine
    from megatron_stare.rollout.engines.replicas import resolve_engine
    from megatron_stare.run_dir.run_files import METRICS_FILE, read_metrics
    from megatron_stare.run_dir.run_state import complete_checkpoints, refuse_busy

    config = load_recorded(run_dir / CONFIG_FILE)
    if config.sglang.urls:
        refuse_busy(run_dir)  # two runs must not send weights to the same servers
    checkpoints = {
        int(path.name.removeprefix("step_")): path for path in complete_checkpoints(run_dir)
    }
    if first not in checkpoints:
        there = ", ".join(map(str, checkpoints)) or "none"
        raise DataError(
            f"there is no checkpoint of step {first}; there are: {there}",
            where=str(run_dir),
            fix="--from",
        )
    rows = {int(row["step"]): row for row in read_metrics(run_dir / METRICS_FILE)}
    wanted = range(first + 1, last + 1)
    missing = [step for step in wanted if step not in rows]
    if missing or not wanted:
        what = (
            f"the run has no record of step {missing[0]}"
            if missing
            else f"step {last} is not after step {first}"
        )
        raise DataError(what, where=str(run_dir), fix=f"give --to up to {max(rows, default=0)}")
    place = out or Path("bisects") / f"{run_dir.resolve().name}-{first}-{last}"
    if place.exists() and any(place.iterdir()):
        raise UserError(
            "there are files in this folder already", where=str(place), fix="give another --out"
        )

    method = resolve_run(config).method
    found, left_out = changes(config, method)
    tried = [change for change in found if change.cause in causes]
    remade: list[Remade] = []
    for number, change in enumerate([None, *tried]):
        name = "unchanged" if change is None else change.name
        say(f"{number + 1} of {len(tried) + 1}: {name}, steps {first + 1} to {last}")
        folder = (place / name).resolve()
        folder.mkdir(parents=True)
        try:
            prepare(run_dir, checkpoints[first], folder, {} if change is None else change.settings)
            made = {int(row["step"]): row for row in make_again(folder, name, last)}
            remade.append(Remade(change, [made[step] for step in wanted if step in made]))
        except UserError as error:
            if change is None:
                raise
            remade.append(Remade(change, failed=str(error).splitlines()[0]))
    kind = resolve_engine(config.rollout.engine)
    exact = issubclass(kind, Engine) and config.rollout.staleness is None
    before = [row for step, row in rows.items() if first - 50 < step <= first]
    explanation = explain(
        before,
        [rows[step] for step in wanted],
        remade,
        [each for each in left_out if each.cause in causes],
        exact=exact,
        dtype=config.model.dtype,
        contradicted=contradictions(config, method, [rows[step] for step in wanted]),
    )
    (place / "findings.json").write_text(
        json.dumps(as_tree(explanation), indent=2, allow_nan=False)
    )
    return explanation


def as_tree(found: Explanation) -> dict[str, Any]:
    """Converts an Explanation to a dict for JSON, and replaces non-finite numbers by None."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(each) for each in value]
        return None if isinstance(value, float) and value - value != 0 else value

    return finite(asdict(found))


def as_text(found: Explanation) -> str:
    """Formats the results of the re-runs as a table, followed by the conclusion."""
    head = ("", "cause", "equal steps", "entropy", "agreement", "reward")
    figures = head[3:]
    rows = [head, ("the record", "", "", *(f"{found.record[figure]:.4g}" for figure in figures))]
    for line in found.lines:
        if line.failed:
            rows.append((line.name, line.cause, "failed", "", "", ""))
            continue
        cells = []
        for figure in figures:
            far = line.moved.get(figure, 0.0)
            mark = f" ({far:+.0f})" if abs(far) > _far() and line.name != "unchanged" else ""
            cells.append(f"{line.medians[figure]:.4g}{mark}")
        rows.append((line.name, line.cause, f"{line.equal} of {found.steps}", *cells))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    notes = [f"{line.name}: {line.failed}" for line in found.lines if line.failed]
    notes += [f"{each.cause} was not changed: {each.why}" for each in found.left_out]
    named = f"named: {found.cause or 'none'}" + (f" ({found.change})" if found.change else "")
    legend = (
        "figures are medians over the steps; (n): n standard errors of the run's own noise away"
        " from the unchanged steps"
    )
    return "\n".join([*table, "", legend, *notes, "", named, found.why])


def _far() -> float:
    from megatron_stare.commands.bisect.explain import FAR

    return FAR
