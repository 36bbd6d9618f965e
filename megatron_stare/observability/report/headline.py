"""Summary of a run in one sentence, and remarks on what a reader may trip over.

Comes from a `RunRecord`; goes to the top of the report. Every number in it is one of the figures
below it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_stare.observability.metrics.paired import BAND, RECENT, compared, summary
from megatron_stare.observability.metrics.scales import short
from megatron_stare.run_dir.run_files import RunRecord, result_name

# a run whose entropy is below this share of its target, or of its first value, has collapsed
COLLAPSED = 0.25
_FELL = 0.5  # of its best stretch: a reward below this share is said to have fallen
GREEDY = (
    "Greedy decoding takes the likeliest token everywhere and never meets the rest of the"
    " distribution, which is what training improves and what entropy that is held up keeps alive:"
    " it may lose while sampling gains."
)


@dataclass(frozen=True)
class Headline:
    """One sentence, and remarks that explain it."""

    sentence: str
    remarks: Sequence[str] = ()


def headline(run: RunRecord) -> Headline:
    """Sums up one run."""
    figures = summary(run.metrics)
    parts, remarks = [_entropy(figures)], []
    on = run.on_task(run.tasks[0])
    name = result_name(on.after or on.before or {})
    sampled, greedy = _change(on, "pass1", "correct"), _change(on, "greedy", "greedy_correct")
    if sampled:
        parts.append(f"sampled {name} {sampled[1]}")
    if greedy:
        parts.append(f"greedy {greedy[1]}")
        if greedy[0] < 0 <= (sampled[0] if sampled else -1):
            remarks.append(GREEDY)
    if not sampled:
        parts.append(_reward(figures))
    if (fall := _reward_fell(run)) and sampled:
        parts.append(fall)
    if figures["gate_on_share"] == 0:
        remarks.append(_never_opened(run, figures))
    sentence = ", ".join(filter(None, parts))
    return Headline(
        f"{sentence[:1].upper()}{sentence[1:]}." if sentence else "No step is recorded yet.",
        remarks,
    )


def alike(runs: Sequence[RunRecord]) -> list[str]:
    """Which runs are the same, step for step, so that their lines cover each other, and why they
    may be."""
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
            closed = [
                r.name for r in (other, run) if summary(r.metrics[:same])["gate_on_share"] == 0
            ]
            why = f", since the gate of {' and '.join(closed)} was closed" if closed else ""
            names = f"{other.name} and {run.name}"
            found.append(
                f"{names} have the same entropy and reward {how}: their lines cover each"
                f" other{why}."
            )
    return found


def _entropy(figures: dict[str, float | None]) -> str:
    last = figures["entropy_last_share"]
    target = figures["entropy_target"]
    began = figures["entropy_first"]
    if last is None or began is None:
        return ""
    ratio = figures["entropy_ratio"]
    if last < COLLAPSED * (target or began):
        against = (
            f"{short(ratio, 2)} × its target {short(target)}"
            if ratio is not None
            else f"from {short(began)}"
        )
        return f"entropy collapsed to {short(last)} ({against})"
    if figures["gate_on_share"] == 0 and target is not None:
        return (
            f"entropy ended at {short(last)} without its gate (target {short(target)}) ever opening"
        )
    if ratio is None:
        return f"entropy went from {short(began)} to {short(last)}"
    how = (
        "held at"
        if abs(ratio - 1) <= BAND
        else f"ended {'above' if ratio > 1 else 'below'} its target, at"
    )
    return f"entropy {how} {short(last)} (target {short(target)})"


def _change(run: RunRecord, accuracy: str, results: str) -> tuple[float, str] | None:
    """The change over training, and how it is said."""
    before, after = run.before or {}, run.after or {}
    if before.get(accuracy) is None or after.get(accuracy) is None:
        return None
    change = after[accuracy] - before[accuracy]
    pair = compared(before, after, results)
    if isinstance(pair, str) or math.isnan(pair[1]) or pair[1] > 0 or pair[2] < 0:
        return change, _signed(change)
    return change, f"{_signed(change)} (within its noise)"


def _signed(change: float) -> str:
    return f"{change:+.2f}".replace("-", "−")


def _reward(figures: dict[str, float | None]) -> str:
    if figures["reward_last"] is None:
        return ""
    first, last = short(figures["reward_first"]), short(figures["reward_last"])
    return f"reward from {first} to {last}, no evaluation before and after"


def _reward_fell(run: RunRecord) -> str:
    rewards = [
        row["reward/mean"] for row in run.metrics if math.isfinite(row.get("reward/mean", math.nan))
    ]
    if len(rewards) < 2 * RECENT:
        return ""
    means = [
        sum(rewards[i : i + RECENT]) / RECENT for i in range(0, len(rewards) - RECENT + 1, RECENT)
    ]
    best, last = max(means), sum(rewards[-RECENT:]) / RECENT
    return f"reward fell from {short(best)} to {short(last)}" if last < _FELL * best else ""


def _never_opened(run: RunRecord, figures: dict[str, float | None]) -> str:
    reason = (
        "its entropy never came below the target"
        if figures["entropy_target"] is not None
        else "it stayed closed"
    )
    return (
        f"The gate never opened in {len(run.metrics):,} steps: {reason}, so every token had weight"
        " 1 and the run is the same as one without STARE's weights. A longer run, or a higher"
        " target, shows what they do."
    )


def _steps_alike(run: RunRecord, other: RunRecord) -> int:
    """How many steps from the first on have the same entropy and reward."""
    keys, same = ("step", "entropy/mean", "reward/mean"), 0
    for one, two in zip(run.metrics, other.metrics, strict=False):
        if any(key not in one or one[key] != two.get(key) for key in keys):
            break
        same += 1
    return same
