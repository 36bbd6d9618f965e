"""The verdict figures and settings of a run, in words and numbers.

Comes from a `RunRecord`; goes to the head of the report, as cards for one run and as columns for several, and to the
terminal when a run has finished.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_stare.observability.paired import BAND, RECENT, paired_interval, summary
from megatron_stare.observability.run_files import RunRecord, read_run, result_name
from megatron_stare.observability.scales import short

Tone = Literal["", "good", "warn"]


@dataclass(frozen=True)
class Figure:
    """One figure: what it is, its value, what to hold it against, and whether that is good news."""

    label: str
    value: str
    note: str = ""
    tone: Tone = ""


def verdict(run: RunRecord) -> list[Figure]:
    """The figures of a run, most important first. Figures that do not apply to its method are left out."""
    s = summary(run.metrics)
    figures = [
        *(figure for task in run.tasks for figure in _pass_at_1_of(run, task)),
        _entropy(s),
        Figure(f"Entropy, last {RECENT} steps", short(s["entropy_last"]), "nats, mean"),
    ]
    if s["gate_on_share"] is not None:
        note = (
            f"of the steps; {s['gate_on_last_share']:.0%} of the last third"
            if s["gate_on_last_share"] is not None
            else ""
        )
        figures.append(Figure("Gate on", f"{s['gate_on_share']:.0%}", note or "of the steps"))
    figures.append(_reward(s))
    planned = run.setting("run.steps")
    done = "–" if s["last_step"] is None else f"{s['last_step']:,.0f}"
    figures.append(Figure("Steps", done, f"of {planned:,} planned" if isinstance(planned, int) else ""))
    figures.append(Figure("Training time", duration(s["wall_s"]), f"{short(s['step_s'])} s a step"))
    figures.append(Figure("Throughput", short(s["tokens_per_s"], 4), "tokens a second, mean"))
    figures.append(Figure("Peak memory", short(s["peak_memory_gb"]), "GB, all processes of the run (Pss)"))
    figures.append(Figure("Largest |log ratio|", short(s["max_abs_log_ratio"], 2), "nats; 0 is exactly on-policy"))
    figures.append(
        Figure("Engine against trainer", short(s["logprob_diff_max"], 2), "nats, largest log-prob difference")
    )
    return figures


def settings(run: RunRecord) -> list[tuple[str, str]]:
    """The settings one looks for first; the whole configuration is further down the page."""
    parallel = {key: run.setting(f"parallel.{key}") for key in ("tensor", "pipeline", "context", "expert", "data")}
    layout = ", ".join(f"{key} {size}" for key, size in parallel.items() if size not in (None, 1))
    algorithm = run.setting("algorithm") or {}
    algorithm = {"name": algorithm} if isinstance(algorithm, str) else algorithm  # the short form, written by hand
    extra = ", ".join(f"{key} {_plain(value)}" for key, value in algorithm.items() if key != "name")
    prompts, samples = run.setting("batch.prompts"), run.setting("batch.samples_per_prompt")
    rows = [
        ("Algorithm", algorithm.get("name")),
        ("Algorithm settings", extra or None),
        ("Model", run.setting("model.path")),
        ("Precision", run.setting("model.dtype")),
        ("Batch", f"{prompts} prompts × {samples} responses" if prompts and samples else None),
        ("Longest response", _with_unit(run.setting("rollout.max_new_tokens"), "tokens")),
        ("Temperature", run.setting("rollout.temperature")),
        ("Learning rate", run.setting("optimizer.lr")),
        ("Layout", None if parallel["data"] is None else layout or "one rank"),
        ("Engine", run.setting("rollout.engine")),
        ("Verifier", run.setting("reward.verifier")),
        ("Seed", run.setting("run.seed")),
    ]
    return [(label, _plain(value)) for label, value in rows if value is not None]


def duration(seconds: float | None) -> str:
    """A duration in its two largest units."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{short(seconds)} s"
    whole = round(seconds)
    for size, unit, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // below} {small}"
    return f"{whole} s"


def _entropy(s: dict[str, float | None]) -> Figure:
    value, target, ratio = s["entropy_last_share"], s["entropy_target"], s["entropy_ratio"]
    label = "Entropy, last third"
    if target is None or ratio is None:
        return Figure(label, short(value), "nats, mean; the method has no target" if value is not None else "")
    inside = abs(ratio - 1) <= BAND
    where = f"inside ±{BAND:.0%}" if inside else f"outside ±{BAND:.0%}"
    return Figure(
        label, short(value), f"nats; {ratio:.2f} × target {short(target)}, {where}", "good" if inside else "warn"
    )


def _reward(s: dict[str, float | None]) -> Figure:
    failures = s["reward_failures"]
    note = f"mean; first {RECENT} steps {short(s['reward_first'])}"
    if failures:
        note += f"; {failures:,.0f} answers not verified"
    return Figure(f"Reward, last {RECENT} steps", short(s["reward_last"]), note, "warn" if failures else "")


def _pass_at_1_of(run: RunRecord, task: str | None) -> list[Figure]:
    """The results on one task."""
    on = run.on_task(task)
    sampled = result_name(on.after or on.before or {})
    named = f"{task}: " if task else ""
    return [
        _pass_at_1(on, f"{named}{sampled}, sampled", "pass1", "correct"),
        _pass_at_1(on, f"{named}pass@1, greedy", "greedy", "greedy_correct"),
    ]


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
    pair = _as_pairs(before.get(results), after.get(results))
    problems = after.get("problem")  # evaluations of earlier releases do not say
    if pair is None or before.get("problem") not in (None, problems):
        return Figure(label, value, "different problems before and after, so no interval")
    if before.get("decoding") != after.get("decoding"):  # eval.* may change where a run is resumed
        return Figure(label, value, "decoded differently before and after, so no interval")
    mean, low, high = paired_interval(*pair, problems=problems)
    if math.isnan(low):
        return Figure(label, value, f"{mean:+.3f}, one problem")
    tone: Tone = "good" if low > 0 else "warn" if high < 0 else ""
    count = f"{len(pair[0])} problems"
    if problems and (different := len(set(problems))) < len(problems):
        count += f", {different} of them different"
    return Figure(label, value, f"{mean:+.3f} [{low:+.3f}, {high:+.3f}], 95 %, paired, {count}", tone)


def _as_pairs(before: Any, after: Any) -> tuple[Sequence[float], Sequence[float]] | None:
    return (before, after) if before and after and len(before) == len(after) else None


def _with_unit(value: Any, unit: str) -> str | None:
    return None if value is None else f"{value:,} {unit}"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


CONTENTS = {
    "report.html": "figures, curves, responses before and after",
    "metrics.jsonl": "every metric of every step",
    "tensorboard": "the same for TensorBoard",
    "eval.jsonl": "pass@1 on held-out problems",
    "rollouts": "sampled responses",
    "checkpoints": "to continue with --resume",
    "hf": "the policy, as transformers loads it",
    "config.yaml": "the resolved configuration",
}


def closing(run_dir: Path) -> str:
    """Several lines: the run's figures, then the files of its directory."""
    figures = verdict(read_run(run_dir))
    width = max(len(figure.label) for figure in figures)
    lines = [f"  {f.label:<{width}}  {f.value}  {f.note}".rstrip() for f in figures]
    files = [f"  {name:<{width}}  {what}" for name, what in CONTENTS.items() if (run_dir / name).exists()]
    return "\n".join(["", *lines, "", f"{run_dir}/", *files])
