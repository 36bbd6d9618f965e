"""Read-only commands about runs: `status`, `report` and `rollouts`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_stare.commands.status import Status, status_of
from megatron_stare.errors import UserError
from megatron_stare.observability.terminal.progress import clock
from megatron_stare.run_dir.json_lines import finite
from megatron_stare.run_dir.run_files import Rereading

EVERY_S = 2.0
_SAYS = {
    "running": "running",
    "finished": "finished",
    "dead": "not running",
    "silent": "last seen",
}


def add_status_arguments(status: argparse.ArgumentParser) -> None:
    """Adds the arguments of `status`."""
    status.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    status.add_argument("--json", action="store_true", help="print one line of JSON")
    status.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=EVERY_S,
        metavar="SECONDS",
        help=f"repeat at this interval until Ctrl-C; default {EVERY_S:g} s",
    )


def run_status(args: argparse.Namespace) -> int:
    """Prints a run's status. Returns 0 if the run is running or finished, and 1 if the run is dead
    or silent. Raises UserError."""
    if args.watch is not None and not args.watch > 0:
        raise UserError(f"the interval must be above 0 s, not {args.watch:g} s", where="--watch")
    if not args.run_dir.is_dir():
        raise UserError("there is no such directory", where=str(args.run_dir))
    found = status_of(args.run_dir)
    told: Callable[[Status], str] = as_json if args.json else as_text
    if args.watch is None:
        print(told(found))
    else:
        _watch(args.run_dir, told, args.watch, clear=not args.json and sys.stdout.isatty())
        found = status_of(args.run_dir)
    return int(found.state in ("dead", "silent"))


def _watch(run_dir: Path, told: Callable[[Status], str], every_s: float, clear: bool) -> None:
    read = Rereading()
    try:
        while True:
            text = told(status_of(run_dir, read=read))
            print(f"\033[H\033[J{text}" if clear else text, flush=True)
            time.sleep(every_s)
    except KeyboardInterrupt:
        print()


def as_json(status: Status) -> str:
    """Returns one line of JSON, with null for unknown values."""
    return json.dumps(finite(dataclasses.asdict(status)), allow_nan=False)


def as_text(status: Status) -> str:
    """Returns the status as readable text, with one line for each subject, such as 'phase' or
    'rates'."""
    where = (
        f" on {status.host}" + (f" (process {status.pid})" if status.pid else "")
        if status.host
        else ""
    )
    steps = "" if status.steps is None else f" of {status.steps:,}"
    made = f"step {status.step:,}{steps}" if status.step else "no step done yet"
    head = (
        f"{status.run}:"
        f" {_SAYS[status.state]}{where if status.state in ('running', 'silent') else ''}, {made}"
    )
    lines = [(name, text) for name, text in _subjects(status) if text]
    body = [f"  {name:<12}{text}" for name, text in lines]
    again = ["  resume it with", f"    {status.again}"] if status.again else []
    return "\n".join([head, *body, *again])


def _subjects(status: Status) -> list[tuple[str, str]]:
    from megatron_stare.observability.metrics.scales import short  # imports numpy

    rates = [
        (status.steps_per_h, "steps/h"),
        (status.tokens_per_s, "tokens/s"),
        (status.samples_per_s, "samples/s"),
    ]
    subjects = [
        ("phase", _phase(status)),
        (
            "rates",
            " · ".join(f"{short(value)} {unit}" for value, unit in rates if value is not None),
        ),
        (
            "time left",
            (
                ""
                if status.left_s is None
                else f"{clock(status.left_s)} for the remaining steps, at the recent pace"
            ),
        ),
    ]
    if told := [each for each in status.planned if each.name in ("step", "memory in update")]:
        figures = (
            f"{each.name} {short(each.planned)} {each.unit}, measured {short(each.measured)}"
            for each in told
        )
        subjects.append(("planned", " · ".join(figures)))
    for each in status.evaluations:
        greedy = f", greedy {each.greedy:.3f}" if each.greedy is not None else ""
        task = f" of {each.task}" if each.task else ""
        subjects.append(
            (
                "evaluation",
                f"{each.result}{task} {short(each.value)}{greedy}, after step {each.step:,}",
            )
        )
    if status.checkpoint is None:
        subjects.append(("checkpoint", "none yet"))
    else:
        subjects.append(
            (
                "checkpoint",
                f"of step {status.checkpoint:,}, {clock(status.checkpoint_age_s or 0)} old",
            )
        )
    if status.starts:
        again = status.starts - 1
        times = "once" if again == 1 else f"{again} times, last"
        more = f", resumed {times} after step {status.resumed_after:,}" if again else ""
        subjects.append(("started", f"{status.started[:16].replace('T', ' ')}{more}"))
    if status.restarts:
        subjects.append(
            ("restarts", f"{status.restarts} automatic, the last because: {status.restart}")
        )
    subjects += [
        ("alert", f"{alert.name}: {alert.text} (step {alert.last_step:,})")
        for alert in status.alerts
    ]
    subjects.append(("alerts", "" if status.alerts else "none"))
    if status.state != "finished" and status.beat_age_s is not None:
        process = {"stopped": ", the driver is stopped", "ended": ", the driver has ended"}
        ended = process.get(status.process, "")
        subjects.append(("heartbeat", f"{clock(status.beat_age_s)} old{ended}"))
    subjects.append(("black box", status.black_box))
    return subjects


def _phase(status: Status) -> str:
    if not status.phase or status.phase_s is None:
        return ""
    counted = f", {status.done:,} of {status.total:,} responses" if status.total else ""
    limit = (
        f"; must make progress within {clock(status.limit_s)}" if status.limit_s is not None else ""
    )
    return f"{status.phase} for {clock(status.phase_s)}{counted}{limit}"


def add_report_arguments(report: argparse.ArgumentParser) -> None:
    """Adds the arguments of `report`."""
    _add_runs(
        report, "one run, or several to compare", "report.html", "several runs, comparison.html"
    )


def run_report(args: argparse.Namespace) -> None:
    """Writes the report and prints its path. Raises UserError."""
    from megatron_stare.observability.report.page import write_report

    for run in args.runs:
        if not (run / "metrics.jsonl").exists():
            raise UserError("no metrics.jsonl: not a run directory", where=str(run))
    print(write_report(args.runs, _place(args.runs, args.out, "report.html", "comparison.html")))


def add_rollouts_arguments(rollouts: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rollouts`."""
    _add_runs(
        rollouts, "one run, or two to show side by side", "rollouts.html", "two runs, rollouts.html"
    )


def run_rollouts(args: argparse.Namespace) -> None:
    """Writes the page of sampled responses and prints its path. Raises UserError."""
    from megatron_stare.observability.report.rollouts_page import write_rollouts

    print(write_rollouts(args.runs, _place(args.runs, args.out, "rollouts.html", "rollouts.html")))


def _add_runs(command: argparse.ArgumentParser, which: str, of_one: str, of_several: str) -> None:
    """Adds the arguments of a command that writes a page about runs."""
    command.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help=which)
    command.add_argument(
        "--out",
        type=Path,
        help=(
            f"file to write, or an existing folder for it; default: {of_one} in the run directory;"
            f" for {of_several} in the current directory"
        ),
    )


def _place(runs: list[Path], out: Path | None, of_one: str, of_several: str) -> Path:
    # a page of several runs goes into no run directory, where it might replace the run's own page
    several = len(runs) > 1
    out = out or (Path() if several else runs[0])
    return out / (of_several if several else of_one) if out.is_dir() else out
