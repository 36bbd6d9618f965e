"""Computes the statistics that the report shows about a run.

Uses the rows of metrics.jsonl that `run_files.read_metrics` returns, and the results per problem in
eval.jsonl. The report's first screen shows the statistics as numbers, on cards or in a table. The
code is plain Python without arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation, fmean
from typing import Any

from megatron_stare.evaluation.estimates import mean_of_problems, student_quantile
from megatron_stare.observability.metrics.conditions import BAND

RECENT = 20  # steps at the end of a run that count as recent
JUDGED = 2 * RECENT  # with fewer steps, start and end overlap, so no change is reported
HELD_SHARE = 0.9  # share of the last third's steps that must be on target


def paired_interval(
    before: Sequence[float],
    after: Sequence[float],
    level: float = 0.95,
    *,
    problems: Sequence[int] | None = None,
) -> tuple[float, float, float]:
    """Returns the mean of `after` - `before` over prompts, and Student's confidence interval of
    this mean. `before` and `after` contain results of the same prompts in the same order.

    Let d_i be the difference after_i - before_i of prompt i, and let n be the number of
    differences. Let m be the mean of the n differences. Let s be the sample standard deviation of
    the n differences, computed with the divisor n - 1. Let t be the (1 + level)/2 quantile of
    Student's distribution with n - 1 degrees of freedom. The confidence interval is m ± t s / √n.
    Pairing removes the spread between easy and hard problems, which is most of the variance. The
    interval is too narrow if two conditions both hold: there are fewer than about 30 problems, and
    most of the differences d_i are equal to each other. If all differences d_i are equal, the
    interval has width 0, although the mean over unseen problems remains uncertain.

    Several prompts of one problem are not independent. If a problem has several prompts, the
    function `evaluation.estimates.mean_of_problems` computes two numbers: the variance v of the
    mean m, and the effective number of problems G. The half width of the interval is then t √v, and
    Student's distribution has G - 1 degrees of freedom. If every problem has one prompt, v is s² /
    n, and G is n.

    Args:
        problems: the problem of each prompt, or None if all prompts belong to different problems.

    Returns:
        The mean difference, and the low and the high end of the interval. Both ends are NaN for a
            single problem.

    Raises:
        ValueError: there are no pairs, or the lists differ in length.
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} results before and {len(after)} after are not pairs")
    if not before:
        raise ValueError("no pairs")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, not {level}")
    differences = [b - a for a, b in zip(before, after, strict=True)]
    mean, variance, count = mean_of_problems(differences, problems)
    if math.isinf(variance):
        return mean, math.nan, math.nan
    half = student_quantile(level, count - 1) * math.sqrt(variance)
    return mean, mean - half, mean + half


def compared(
    before: Mapping[str, Any], after: Mapping[str, Any], results: str
) -> tuple[float, float, float] | str:
    """Compares two evaluations problem by problem. Returns the `paired_interval` of the
    evaluations' results, or a text that says why there is no interval.

    Args:
        results: the key of the results, "correct" or "greedy_correct".
    """
    one, two = before.get(results), after.get(results)
    if not one or not two or len(one) != len(two):
        return "different problems"
    if found := difference(before, after, results):
        return found
    return paired_interval(one, two, problems=after.get("problem"))


def difference(before: Mapping[str, Any], after: Mapping[str, Any], results: str) -> str:
    """Checks that the results of two evaluations of one task can be compared. Returns "" if the
    results can be compared. Otherwise returns a text that names one difference between the
    evaluations, such as "decoded differently". The two evaluations may belong to one run, because a
    resume may change the section `eval`.

    An evaluation that an earlier release recorded lacks some of the compared entries. If `before`
    lacks the entry `problem`, `difference` does not compare this entry. The dict `asked` identifies
    the problems, the template, the verifier and the environment of an evaluation. `difference`
    compares only those keys of `asked` that both evaluations contain. If an evaluation lacks the
    entry `decoding`, `difference` assumes that this evaluation has one response per problem.
    `difference` then also assumes that both evaluations have the same other decoding settings.

    Args:
        results: the key of the results, "correct" or "greedy_correct".
    """
    if before.get("problem") not in (None, after.get("problem")):
        return "different problems"
    asked = after.get("asked", {})
    for name, value in before.get("asked", {}).items():
        if asked.get(name, value) != value:
            return f"different {name}"
    one, two = before.get("decoding"), after.get("decoding")
    if one is None or two is None:
        # earlier releases recorded no decoding of the run's own task with one response a problem
        alike = (one or two or {}).get("samples", 1) == 1
    elif results == "greedy_correct":
        # the likeliest tokens depend on no other setting
        alike = one.get("max_new_tokens") == two.get("max_new_tokens")
    else:
        alike = one == two
    return "" if alike else "decoded differently"


def summary(
    metrics: Sequence[Mapping[str, Any]], last_share: float = 1 / 3
) -> dict[str, float | None]:
    """Returns a dict with statistics of one run. The keys are the names of the statistics. A
    statistic is None if its metric was never logged or never finite.

        steps, last_step           number of steps, and number of the last step
        wall_s, step_s             sum and mean of the step times, s
        tokens_per_s               mean
        entropy_last_share         mean entropy over the last `last_share` of the steps, nats
        entropy_target, _ratio     mean target over the same steps, and entropy over target
        in_band_share              share of the same steps with entropy within BAND of the target
        entropy_last, reward_last  means of the last RECENT steps
        reward_first               mean of the first RECENT steps
        loss_first, loss_last      mean losses of the first and the last RECENT steps; with fewer
                                   than JUDGED steps, losses of the first and of the last step
        heldout_loss               the last loss on held-out conversations, nats
        entropy_first              mean of the first RECENT steps, nats
        gate_on_share              share of steps with the gate on, of those that logged the gate
        gate_on_last_share         the same for the last `last_share` of the steps
        peak_memory_gb, max_abs_log_ratio, logprob_diff_max  largest of the run
        reward_failures            sum of timeouts and crashes
    """
    tail = metrics[-max(1, math.ceil(len(metrics) * last_share)) :]
    recent, first = metrics[-RECENT:], metrics[:RECENT]
    losses = _values(metrics, "loss/policy")
    few = losses and len(metrics) < JUDGED
    entropy, target = _mean(tail, "entropy/mean"), _mean(tail, "entropy/target")
    near = [
        float(abs(row["entropy/mean"] - row["entropy/target"]) <= BAND * row["entropy/target"])
        for row in tail
        if _has(row, "entropy/mean") and _has(row, "entropy/target")
    ]
    times = _values(metrics, "time/step_s")
    failures = _values(metrics, "reward/timeouts") + _values(metrics, "reward/crashes")
    return {
        "steps": float(len(metrics)),
        "last_step": float(metrics[-1]["step"]) if metrics else None,
        "wall_s": sum(times) if times else None,
        "step_s": fmean(times) if times else None,
        "tokens_per_s": _mean(metrics, "perf/tokens_per_s"),
        "entropy_last_share": entropy,
        "entropy_target": target,
        "entropy_ratio": entropy / target if entropy is not None and target else None,
        "in_band_share": fmean(near) if near else None,
        "entropy_first": _mean(first, "entropy/mean"),
        "entropy_last": _mean(recent, "entropy/mean"),
        "reward_first": _mean(first, "reward/mean"),
        "reward_last": _mean(recent, "reward/mean"),
        "loss_first": losses[0] if few else _mean(first, "loss/policy"),
        "loss_last": losses[-1] if few else _mean(recent, "loss/policy"),
        "heldout_loss": next(reversed(_values(metrics, "heldout/loss")), None),
        "gate_on_share": _mean(metrics, "stare/gate"),
        "gate_on_last_share": _mean(tail, "stare/gate"),
        "peak_memory_gb": _max(metrics, "memory/tree_pss_gb"),
        "max_abs_log_ratio": _max(metrics, "ratio/max_abs_log"),
        "logprob_diff_max": _max(metrics, "rollout/logprob_diff_max"),
        "reward_failures": sum(failures) if failures else None,
    }


def on_target(figures: Mapping[str, float | None]) -> bool | None:
    """Returns True if the run held the entropy at the target. An entropy is on target if its
    relative difference from the target is at most `BAND`. The mean entropy over the last third of
    the steps must be on target. The mean entropy over the last `RECENT` steps must also be on
    target. In the last third of the steps, the share of steps whose entropy is on target must be at
    least `HELD_SHARE`.

    Args:
        figures: a `summary`.

    Returns:
        None if the method has no target, or the run has fewer than JUDGED steps.
    """
    ratio, last = figures["entropy_ratio"], figures["entropy_last"]
    if ratio is None or last is None or (figures["steps"] or 0) < JUDGED:
        return None
    end = last / (figures["entropy_target"] or math.nan)
    near = max(abs(ratio - 1), abs(end - 1)) <= BAND
    return near and (figures["in_band_share"] or 0) >= HELD_SHARE


@dataclass(frozen=True)
class ForecastFit:
    """Agreement between forecasts and measurements of the same steps.

    `scale`: slope of the least-squares regression line through the origin, with the forecasts as x
        and the measurements as y.
    `correlation`: Pearson's correlation, or NaN if the forecasts or the measurements do not vary.
    `same_sign`: share of the steps in which forecast and measurement have the same sign.
    `points`: number of steps compared.
    """

    scale: float
    correlation: float
    same_sign: float
    points: int


def forecast_fit(forecast: Sequence[float], measured: Sequence[float]) -> ForecastFit | None:
    """Compares a series of forecasts with a series of measured values. Element i of both series
    belongs to the same step. Returns None if the series are empty, or if every forecast is 0."""
    squares = sum(f * f for f in forecast)
    if not squares:
        return None
    try:
        together = correlation(forecast, measured)
    except StatisticsError:  # fewer than two, or no spread
        together = math.nan
    return ForecastFit(
        scale=sum(f * m for f, m in zip(forecast, measured, strict=True)) / squares,
        correlation=together,
        same_sign=fmean(f * m > 0 for f, m in zip(forecast, measured, strict=True)),
        points=len(forecast),
    )


def _has(row: Mapping[str, Any], key: str) -> bool:
    value = row.get(key)
    return value is not None and math.isfinite(value)


def _values(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(row[key]) for row in rows if _has(row, key)]


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = _values(rows, key)
    return fmean(values) if values else None


def _max(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return max(_values(rows, key), default=None)
