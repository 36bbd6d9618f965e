"""Formats the most important results and settings of a run as text.

Reads a `RunRecord`. The report's first screen shows the results as cards for one run, or as table
columns for several runs. The terminal shows the results as lines of text when a run has finished.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_stare.observability.metrics.conditions import BAND
from megatron_stare.observability.metrics.paired import (
    JUDGED,
    RECENT,
    compared,
    on_target,
    summary,
)
from megatron_stare.observability.metrics.scales import short
from megatron_stare.run_dir.run_files import RunRecord, read_run, result_name

Tone = Literal["", "good", "warn"]
# note on a greedy result that fell while the sampled result rose
NOT_OPTIMISED = "training optimises sampled responses, not greedy decoding"


@dataclass(frozen=True)
class Figure:
    """One result of a run as text: a label, a value, a note that helps to judge the value, and a
    tone that marks good or bad news.

    `first`: true for the few results that a reader needs to judge quickly whether the run worked.
    """

    label: str
    value: str
    note: str = ""
    tone: Tone = ""
    first: bool = False


def verdict(run: RunRecord) -> list[Figure]:
    """Returns a run's results as `Figure`s, most important first. Leaves out results that do not
    apply to the run's method."""
    s = summary(run.metrics)
    if run.supervised:
        return [*_losses(s), *_course(run, s)]
    figures = [
        *(replace(f, first=True) for task in run.tasks for f in _pass_at_1_of(run, task)),
        replace(_entropy(s), first=True),
        _recent_entropy(s),
    ]
    if s["gate_on_share"] is not None:
        note = (
            f"of the steps; {s['gate_on_last_share']:.0%} of the last third"
            if s["gate_on_last_share"] is not None
            else ""
        )
        figures.append(Figure("Gate on", f"{s['gate_on_share']:.0%}", note or "of the steps"))
    figures.append(replace(_reward(s), first=True))
    return [*figures, *_course(run, s), *_agreement(s)]


def _losses(s: dict[str, float | None]) -> list[Figure]:
    """Returns the loss and the entropy of a supervised fine-tuning run as `Figure`s."""
    # with fewer steps, means of the first and the last would be of the same steps
    judged = (s["steps"] or 0) >= JUDGED
    which = f"{RECENT} steps" if judged else "step"
    before = f"nats a token; first {which} {short(s['loss_first'])}"
    found = [Figure(f"Loss, last {which}", short(s["loss_last"]), before, first=True)]
    if s["heldout_loss"] is not None:
        held_out = Figure("Held-out loss", short(s["heldout_loss"]), "nats a token", first=True)
        found.append(held_out)
    return [*found, _recent_entropy(s)]


def _recent_entropy(s: dict[str, float | None]) -> Figure:
    return Figure(f"Entropy, last {RECENT} steps", short(s["entropy_last"]), f"nats, {_mean_of(s)}")


def _mean_of(s: dict[str, float | None]) -> str:
    """Returns a note that tells the reader that a value is a mean over the last RECENT steps of a
    run. The note is the word "mean". If the run has fewer than RECENT steps, the note also contains
    the number of steps, as in "mean of 3 steps"."""
    steps = int(s["steps"] or 0)
    return f"mean of {steps} step{'s' if steps > 1 else ''}" if 0 < steps < RECENT else "mean"


def _course(run: RunRecord, s: dict[str, float | None]) -> list[Figure]:
    """Returns a run's number of steps, training time, throughput and peak memory as `Figure`s."""
    figures = []
    planned = run.setting("run.steps")
    done = "–" if s["last_step"] is None else f"{s['last_step']:,.0f}"
    figures.append(
        Figure("Steps", done, f"of {planned:,} planned" if isinstance(planned, int) else "")
    )
    figures.append(Figure("Training time", duration(s["wall_s"]), f"{short(s['step_s'])} s a step"))
    figures.append(Figure("Throughput", short(s["tokens_per_s"], 4), "tokens a second, mean"))
    figures.append(
        Figure(
            "Peak memory",
            short(s["peak_memory_gb"]),
            "GB, the run's processes on the driver's node (Pss)",
        )
    )
    return figures


def _agreement(s: dict[str, float | None]) -> list[Figure]:
    """Returns two `Figure`s: the run's largest absolute log ratio, and the run's largest difference
    between the log-probs of engine and trainer."""
    return [
        Figure(
            "Largest |log ratio|", short(s["max_abs_log_ratio"], 2), "nats; 0 is exactly on-policy"
        ),
        Figure(
            "Engine against trainer",
            short(s["logprob_diff_max"], 2),
            "nats, largest log-prob difference",
        ),
    ]


def outline(run: RunRecord) -> str:
    """Describes the method, the model and the batch size in one line."""
    prompts, samples = run.setting("batch.prompts"), run.setting("batch.samples_per_prompt")
    if run.supervised:
        return " · ".join(
            map(str, filter(None, (run.method, run.setting("model.path"), f"{prompts} rows")))
        )
    batch = f"{prompts} prompts × {samples} responses" if prompts and samples else None
    return " · ".join(str(part) for part in (run.method, run.setting("model.path"), batch) if part)


def started(run: RunRecord) -> str:
    """Describes when, on which host and with which commit the run was started and resumed. If the
    host and the commit stay the same over several starts and resumes, the text names the host and
    the commit only once, and gives only the first and the last date. Returns "" for a run of an old
    release, because old releases did not write the file starts.jsonl."""
    said: list[str] = []
    for place, starts in itertools.groupby(run.starts, _place):
        first, *others = starts
        said.append(f"{_begun(first) if said else 'started'} {_date(first)} {place}")
        if others:
            times = f"{len(others)} times there, last " if len(others) > 1 else ""
            said.append(f"{_begun(others[-1], times)} {_date(others[-1])}")
    return "; ".join(said)


def _place(start: dict[str, Any]) -> str:
    code = f"commit {start['commit']}" if start.get("commit") else f"release {start.get('version')}"
    return f"on {start.get('host')}, {code}"


def _begun(start: dict[str, Any], times: str = "") -> str:
    return f"resumed {times}after step {start['step']},"


def _date(start: dict[str, Any]) -> str:
    return str(start.get("date"))[:16].replace("T", " ")


def duration(seconds: float | None) -> str:
    """Formats a duration in its two largest units, such as 3 h 20 min."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{short(seconds)} s"
    whole = round(seconds)
    for size, unit, below, small in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // below} {small}"
    return f"{whole} s"


def _entropy(s: dict[str, float | None]) -> Figure:
    value, target, ratio = s["entropy_last_share"], s["entropy_target"], s["entropy_ratio"]
    label = "Entropy, last third"
    if target is None or ratio is None:
        return Figure(
            label, short(value), "nats, mean; the run has no target" if value is not None else ""
        )
    inside = abs(ratio - 1) <= BAND
    where = f"{'inside' if inside else 'outside'} ±{BAND:.0%}"
    held = on_target(s)
    if held is None:
        where += f"; too few steps to judge, fewer than {JUDGED}"
    elif inside and not held:
        where += f" on average, in {s['in_band_share'] or 0:.0%} of the steps"
    tone: Tone = "" if held is None else "good" if held else "warn"
    note = f"nats; {ratio:.2f} × target {short(target)}, {where}"
    return Figure(label, short(value), note, tone)


def _reward(s: dict[str, float | None]) -> Figure:
    failures = s["reward_failures"]
    judged = (s["steps"] or 0) >= JUDGED
    note = f"mean; first {RECENT} steps {short(s['reward_first'])}" if judged else _mean_of(s)
    if failures:
        note += f"; {failures:,.0f} answers not verified"
    return Figure(
        f"Reward, last {RECENT} steps", short(s["reward_last"]), note, "warn" if failures else ""
    )


def _pass_at_1_of(run: RunRecord, task: str | None) -> list[Figure]:
    """Returns two figures for the evaluation results on one task. The first figure shows the result
    with sampled responses. The second figure shows the result with greedy decoding. If training
    improved the sampled result and worsened the greedy result, the greedy result is not marked as
    bad news."""
    on = run.on_task(task)
    labels = labels_of(on, task)
    sampled = _pass_at_1(on, labels[0], "pass1", "correct")
    greedy = _pass_at_1(on, labels[1], "greedy", "greedy_correct")
    if greedy.tone == "warn" and sampled.tone == "good":
        greedy = replace(greedy, tone="", note=f"{greedy.note}; {NOT_OPTIMISED}")
    return [sampled, greedy]


def labels_of(run: RunRecord, task: str | None) -> tuple[str, str]:
    """Returns two labels for the evaluation results on a task. The first label names the result
    with sampled responses. The second label names the result with greedy decoding.

    Args:
        run: the run with only the evaluations on this task.
    """
    named = f"{task}: " if task else ""
    return f"{named}{result_name(run.after or run.before or {})}, sampled", f"{named}pass@1, greedy"


def _pass_at_1(run: RunRecord, label: str, accuracy: str, results: str) -> Figure:
    before, after = run.before or {}, run.after or {}
    if after.get(accuracy) is None:
        return Figure(
            label,
            short(before.get(accuracy)),
            "before training" if before.get(accuracy) is not None else "no evaluation",
        )
    if before.get(accuracy) is None:
        return Figure(label, short(after[accuracy]), "after training")
    value = f"{before[accuracy]:.3f} → {after[accuracy]:.3f}"
    pair = compared(before, after, results)
    if isinstance(pair, str):
        return Figure(label, value, f"{pair} before and after, so no interval")
    mean, low, high = pair
    if math.isnan(low):
        return Figure(label, value, f"{mean:+.3f}, one problem")
    tone: Tone = "good" if low > 0 else "warn" if high < 0 else ""
    number, problems = len(after[results]), after.get("problem")
    count = f"{number} problems"
    if problems and (different := len(set(problems))) < number:
        count += f" ({different} distinct)"
    return Figure(
        label, value, f"{mean:+.3f} [{low:+.3f}, {high:+.3f}], 95 %, paired, {count}", tone
    )


CONTENTS = {
    "report.html": "figures, curves, samples",
    "metrics.jsonl": "every metric of every step",
    "tensorboard": "the same metrics, for TensorBoard",
    "eval.jsonl": "evaluations on held-out problems",
    "rollouts": "samples, some with values for every token",
    "starts.jsonl": "date, host and commit of every start",
    "checkpoints": "training state, to resume with --resume",
    "hf": "the policy as a Hugging Face folder",
    "config.yaml": "the resolved configuration",
}


NOTE_WIDTH = 82  # characters per line of a note in the terminal, at most
NARROWEST_NOTE = 24


def closing(run_dir: Path, columns: int | None = None) -> str:
    """Formats two lists as text: the run's figures, and the files in the run directory.

    Args:
        columns: the width of the terminal in characters. The notes of the figures are wrapped to
            fit into this width. None: the notes are only limited to NOTE_WIDTH characters per line.
    """
    figures = verdict(read_run(run_dir))
    width = max(len(figure.label) for figure in figures)
    lines = []
    for each in figures:
        room = NOTE_WIDTH
        if columns is not None:
            room = min(room, columns - width - len(each.value) - 6)
        notes = textwrap.wrap(each.note, max(NARROWEST_NOTE, room)) or [""]
        lines.append(f"  {each.label:<{width}}  {each.value}  {notes[0]}".rstrip())
        lines += [f"  {'':<{width}}  {more}" for more in notes[1:]]
    files = [
        f"  {name:<{width}}  {what}" for name, what in CONTENTS.items() if _holds(run_dir / name)
    ]
    return "\n".join(["", *lines, "", f"{run_dir}/", *files])


def _holds(path: Path) -> bool:
    """Returns True if the path is a folder, or a file that is not empty."""
    return path.is_dir() or (path.is_file() and path.stat().st_size > 0)
