"""Writes the text of the report's first screen: remarks, problems, and a sentence that summarises a
run.

Reads a `RunRecord`. Every number in the text also appears among the results that the report shows
below the text, as cards or in a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_stare.observability.metrics.paired import (
    BAND,
    JUDGED,
    RECENT,
    compared,
    on_target,
    summary,
)
from megatron_stare.observability.metrics.rules import RULES, Watch
from megatron_stare.observability.metrics.scales import short
from megatron_stare.observability.sink import Alert
from megatron_stare.run_dir.liveness import liveness
from megatron_stare.run_dir.run_files import RunRecord, result_name

# entropy below this share of its target, or of its first value, has collapsed
COLLAPSED = 0.25
_FELL = 0.5  # a value below this share of its best stretch, or of its start, has fallen
GREEDY = (
    "Training optimises sampled responses, not greedy decoding, which always takes the most"
    " probable token. Greedy pass@1 can therefore fall while the result of sampling rises."
)
Figures = Mapping[str, float | None]


@dataclass(frozen=True)
class Headline:
    """Text of the report's first screen. `sentence` summarises the run. If sampled responses were
    evaluated, `sentence` includes their result: pass@1 with one response per problem, or avg@k with
    k responses per problem. `greedy` states the pass@1 of greedy decoding, for comparison with the
    result of sampled responses. `remarks` are further explanations."""

    sentence: str
    greedy: str = ""
    remarks: Sequence[str] = ()


def headline(run: RunRecord) -> Headline:
    """Summarises one run: its progress, its result with sampled responses, and its entropy."""
    if not run.metrics:
        return Headline("No step is recorded yet.")
    figures = summary(run.metrics)
    if run.supervised:
        return Headline(f"{_progress(run)} {_loss(figures)}.")
    on = run.on_task(run.tasks[0])
    sampled = _change(on, "pass1", "correct")
    parts = [_result(run, on, sampled, figures), _entropy(figures), _reward_fell(run)]
    if sampled is None:
        said = _reward(figures)
        parts.insert(1, said if parts[0] or not said else f"{said}, with no evaluation")
    remarks = []
    greedy = _change(on, "greedy", "greedy_correct")
    if greedy and greedy.word == "fell" and sampled and sampled.word == "rose":
        remarks.append(GREEDY)
    if figures["gate_on_share"] == 0:
        remarks.append(_never_opened(run, figures))
    sentence = f"{_progress(run)} {'; '.join(filter(None, parts)) or 'nothing is measured'}."
    return Headline(sentence, _greedy(on, greedy) if greedy else "", remarks)


@dataclass(frozen=True)
class Problem:
    """One alert of a run, summarised over all steps in which the alert was active."""

    name: str
    when: str
    text: str


def problems(run: RunRecord) -> list[Problem]:
    """Applies the alert rules to the logged steps of a run. Returns one `Problem` for each rule
    that raised an alert, the most serious problem first."""
    watch = Watch(run.coarsest_dtype, sampled=not run.supervised)
    spells: dict[str, list[Alert]] = {}
    for row in run.metrics:
        figures = {key: value for key, value in row.items() if key != "step"}
        for alert in watch.add(int(row["step"]), figures):
            if alert.over:
                spells.setdefault(alert.name, []).append(alert)
    for name, alert in watch.active.items():
        spells.setdefault(name, []).append(alert)
    return [
        Problem(name, _when(spells[name], name in watch.active), spells[name][-1].text)
        for name in RULES
        if name in spells
    ]


def _when(spells: Sequence[Alert], holds: bool) -> str:
    first, last = spells[0].first_step, spells[-1].last_step
    span = f"step {first}" if first == last else f"steps {first} to {last}"
    times = f"{len(spells)} times, " if len(spells) > 1 else ""
    return f"{times}{span}{', still active at the last step' if holds else ''}"


def alike(runs: Sequence[RunRecord]) -> list[str]:
    """Returns one text for each pair of runs whose entropy and reward are equal in the first steps.
    The text states up to which step the entropy and the reward of the two runs are equal. The text
    also says that the two runs' lines overlap in the charts. Two runs can be equal because the gate
    of one or both runs stayed closed. The text therefore names each run whose gate stayed closed in
    all steps before the stated step. If the runs are equal in all steps that they share, the text
    names each run whose gate stayed closed in all of these steps."""
    found = []
    for later, run in enumerate(runs):
        for other in runs[:later]:
            same = _steps_alike(run, other)
            if not same:
                continue
            shared = min(len(run.metrics), len(other.metrics))
            how = (
                f"in all {same} steps they share"
                if same == shared
                else f"up to step {other.metrics[same - 1]['step']}"
            )
            # a gate that opens in a step shows its effect in the next step
            before = same if same == shared else same - 1
            closed = [
                r.name for r in (other, run) if summary(r.metrics[:before])["gate_on_share"] == 0
            ]
            whose = f"gate{'s' if len(closed) > 1 else ''} of {' and '.join(closed)}"
            was = f"{'were' if len(closed) > 1 else 'was'} closed"
            when = "throughout" if same == shared else "until then"
            why = f" The {whose} {was} {when}." if closed else ""
            names = f"{other.name} and {run.name}"
            found.append(
                f"{names} have the same entropy and reward {how}, so their lines overlap.{why}"
            )
    return found


def _progress(run: RunRecord) -> str:
    made, planned = int(run.metrics[-1]["step"]), run.setting("run.steps")
    if not isinstance(planned, int) or made >= planned:
        return f"In {_steps(made)},"
    steps = f"step {made:,} of {planned:,}"
    return {
        "running": f"Still running, {steps} is done:",
        "silent": f"Last seen at {steps}:",
    }.get(liveness(run).state, f"Interrupted after {steps}:")


@dataclass(frozen=True)
class _Change:
    """One evaluation result: its value before training and its value after training. `word` is
    "rose" or "fell" for a significant change, and "went" otherwise."""

    before: float
    after: float
    word: str
    note: str

    @property
    def said(self) -> str:
        """The change in words."""
        if self.before == self.after:
            return f"stayed at {self.after:.3f} ({self.note})"
        return f"{self.word} from {self.before:.3f} to {self.after:.3f} ({self.note})"


def _change(run: RunRecord, accuracy: str, results: str) -> _Change | None:
    """Returns the change of a result between two evaluations, one before training and one after
    training. Returns None if one of the two evaluations lacks the result."""
    before, after = run.before or {}, run.after or {}
    if before.get(accuracy) is None or after.get(accuracy) is None:
        return None
    pair = compared(before, after, results)
    if isinstance(pair, str) or math.isnan(pair[1]):
        note = f"{pair}, so no interval" if isinstance(pair, str) else "one problem, so no interval"
        return _Change(before[accuracy], after[accuracy], "went", note)
    mean, low, high = pair
    word = "rose" if low > 0 else "fell" if high < 0 else "went"
    note = f"{_signed(mean)} [{_signed(low)}, {_signed(high)}]"
    if word == "went":
        note += ", no significant difference"
    return _Change(before[accuracy], after[accuracy], word, note)


def _signed(change: float) -> str:
    return f"{change:+.3f}".replace("-", "−")


def _result(run: RunRecord, on: RunRecord, sampled: _Change | None, figures: Figures) -> str:
    """Describes the evaluation result of sampled responses (not of greedy decoding) on the run's
    first task."""
    before, after = on.before or {}, on.after or {}
    name = f"sampled {result_name(after or before)}"
    if (task := run.tasks[0]) is not None:
        name += f" on {task}"
    at, last = after.get("step"), figures["last_step"]
    if sampled:
        by = f" by step {at:,}" if at is not None and last is not None and at < last else ""
        return f"{name} {sampled.said}{by}"
    if after.get("pass1") is not None:
        when = f" at step {at:,}" if at is not None else ""
        return f"{name} is {after['pass1']:.3f}{when}, with no evaluation before training"
    if before.get("pass1") is not None:
        return f"{name} was {before['pass1']:.3f} before training, with no evaluation since"
    return ""


def _greedy(on: RunRecord, greedy: _Change) -> str:
    sampled = (on.after or {}).get("pass1")
    above = (
        f", and is still above the sampled {sampled:.3f}"
        if greedy.word == "fell" and sampled is not None and greedy.after > sampled
        else ""
    )
    return f"Greedy pass@1 {greedy.said}{above}."


def _entropy(figures: Figures) -> str:
    last = figures["entropy_last"]
    target = figures["entropy_target"]
    began = figures["entropy_first"]
    if last is None or began is None:
        return ""
    steps = figures["steps"] or 0
    aim = f" (target {short(target)})" if target is not None else ""
    if steps < JUDGED:
        judged = f"fewer than {JUDGED} steps are too few to judge it"
        return f"entropy was {short(last)} in {_last(steps)}{aim}; {judged}"
    if last < COLLAPSED * (target or began) and last < _FELL * began:
        of = f"{short(last / target, 2)} × its target {short(target)}" if target else ""
        return f"entropy collapsed to {short(last)} ({of or f'from {short(began)}'})"
    if figures["gate_on_share"] == 0 and target is not None:
        return f"entropy ended at {short(last)}{aim}, and the gate never opened"
    if target is None and short(began) == short(last):
        return f"entropy stayed at {short(last)}"
    if target is None:
        return f"entropy went from {short(began)} to {short(last)}"
    if on_target(figures):
        return f"entropy held at {short(figures['entropy_last_share'])}{aim}"
    if abs(last / target - 1) > BAND:
        side = "above" if last > target else "below"
        return f"entropy ended {side} its target, at {short(last)}{aim}"
    return (
        f"entropy ended near its target, at {short(last)}{aim}, but was not held there: in the last"
        f" third of the run, {figures['in_band_share'] or 0:.0%} of the steps were within"
        f" ±{BAND:.0%} of the target"
    )


def _steps(number: int) -> str:
    return f"{number:,} step{'s' if number != 1 else ''}"


def _last(steps: float) -> str:
    return "the only step" if steps == 1 else f"the last {min(RECENT, steps):.0f} steps"


def _loss(figures: Figures) -> str:
    """Describes the losses of supervised fine-tuning."""
    first, last = short(figures["loss_first"]), short(figures["loss_last"])
    held_out, steps = figures["heldout_loss"], figures["steps"] or 0
    if figures["loss_last"] is None:
        said = "no loss is recorded"
    elif steps == 1:
        said = f"the loss was {last} nats a token"
    elif steps < JUDGED:
        said = f"the loss went from {first} nats a token in the first step to {last} in the last"
    else:
        said = f"the loss went from {first} to {last} nats a token"
    return said if held_out is None else f"{said}; on held-out rows it is {short(held_out)}"


def _reward(figures: Figures) -> str:
    first, last = figures["reward_first"], figures["reward_last"]
    if last is None:
        return ""
    if (steps := figures["steps"] or 0) < JUDGED:
        return f"reward was {short(last)} in {_last(steps)}"
    if short(first) == short(last):
        return f"reward stayed at {short(last)}"
    return f"reward went from {short(first)} to {short(last)}"


def _reward_fell(run: RunRecord) -> str:
    rewards = [
        row["reward/mean"] for row in run.metrics if math.isfinite(row.get("reward/mean", math.nan))
    ]
    if len(rewards) < JUDGED:
        return ""
    means = [
        sum(rewards[i : i + RECENT]) / RECENT for i in range(0, len(rewards) - RECENT + 1, RECENT)
    ]
    best, last = max(means), sum(rewards[-RECENT:]) / RECENT
    # rewards may be negative: then a share of the run's range, or of the best's size if larger
    scale = max(abs(best), best - min(0.0, *means))
    fell = last < best - (1 - _FELL) * scale
    return f"reward fell from {short(best)} to {short(last)}" if fell else ""


def _never_opened(run: RunRecord, figures: Figures) -> str:
    above = all(_above_target(row) for row in run.metrics)
    reason = " because the entropy never fell below the target" if above else ""
    return (
        f"The gate never opened in {_steps(len(run.metrics))}{reason}. STARE's weights were"
        " therefore 1 throughout and had no effect. A higher target would open the gate, or a"
        " longer run, if the entropy falls below the target."
    )


def _above_target(row: Mapping[str, Any]) -> bool:
    return bool(row.get("entropy/mean", math.nan) >= row.get("entropy/target", math.nan))


def _steps_alike(run: RunRecord, other: RunRecord) -> int:
    """Counts the steps before the first step in which two runs differ in entropy or reward."""
    keys, same = ("step", "entropy/mean", "reward/mean"), 0
    for one, two in zip(run.metrics, other.metrics, strict=False):
        if any(key not in one or one[key] != two.get(key) for key in keys):
            break
        same += 1
    return same
