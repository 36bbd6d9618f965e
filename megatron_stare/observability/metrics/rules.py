"""Defines the rules for a run's metrics in one table, RULES, and derives alerts from the rules.

`Watch` determines when alerts begin and end. The monitor uses `Watch` during a run. The command
`status` applies `Watch` to a run's logged metrics. Some rules can end a run, or roll it back to a
checkpoint. Before a step is complete, the driver applies the rules that can end or roll back a run
(driver/guards.py and driver/agreement_watch.py). The thresholds for ending a run or rolling it back
come from the run's configuration, and not from the table RULES.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from megatron_stare.observability.metrics.conditions import (
    GUARDS,
    OFF_TARGET_STEPS,
    TREND_MEAN,
    Above,
    Collapse,
    Condition,
    Equal,
    Found,
    Grown,
    Judge,
    OffTarget,
    Outside,
    Risen,
    Row,
    Spike,
    TimesMedian,
)
from megatron_stare.observability.sink import Alert

# All prompts share one token limit: above a fifth, the reward reflects the limit more than the
# reasoning.
TRUNCATED_SHARE = 0.2
# float32 on both sides differs by rounding, 1e-6 to 1e-5. A difference of a thousandth means a
# different model: stale or misplaced weights, other sampling settings, a mask. Not checked in 16
# bits, where bfloat16 tokens differ by tenths without a fault.
LOGPROB_DIFF = 1e-3
# Nats up to which engine and trainer agree, however small their earlier difference; by
# `coarsest_dtype`.
LEAST_AGREEMENT = {
    "fp8": 8 * TREND_MEAN,
    "fp8_e4m3": 4 * TREND_MEAN,
    "bfloat16": TREND_MEAN,
    "float16": 1e-3,
    "float32": LOGPROB_DIFF,
}
# Share of groups without a learning signal: above it, a step costs as much but learns from a tenth
# of its batch.
DEGENERATE_SHARE = 0.9
# An alert ends after this many steps without its condition; otherwise a value near its threshold
# would make it flicker.
QUIET_STEPS = 5


class _Numbers(dict[str, float | str]):
    """Values for the placeholders in a rule's text, keyed by placeholder. A missing value is
    NaN."""

    def __missing__(self, name: str) -> float:
        return math.nan


Text = str | Callable[[Row], str]


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    `name`: name of the rule's alert, without measured values.
    `when`: the rule's condition.
    `alert`: text of the rule's alert, or "" if the rule raises no alert. The text can contain
        placeholders in braces. The name in a placeholder is the name of a metric of the step, or
        the name of a value that the rule's condition has measured. The alert shows the value
        instead of the placeholder. `alert` can also be a function that makes the text from the
        metrics of the step.
    `error`: text of the error that ends the run, or "" if the rule does not end the run. If a rule
        has both an alert and an error, the setting `action` determines which of the two applies.
    `metrics`: metrics that show the problem most directly. An alert reports only one metric: among
        the metrics in `metrics`, the metric with the largest value. If `metrics` is empty, the
        alert reports the metric with the largest value among the metrics in `when.metrics`.
    `guard`: name of the subsection of `faults.guards` that contains the settings of the rule, or ""
        if `faults.guards` has no settings for the rule.
    `flag`: name of a metric that is 1 in every step in which the rule's condition held, or "" if
        the rule has no such metric. If a rule has a `flag`, the driver tests the rule's condition
        and logs the result as the metric that `flag` names. The class `Watch` then raises the alert
        in every step in which the flag's metric is 1, and does not test the condition again.
    `dtype`: the rule applies only to runs whose `coarsest_dtype` is this dtype. If `dtype` is "",
        the rule applies to runs of every dtype.
    `sampled`: True if the rule applies only to runs that sample their responses.
    """

    name: str
    when: Condition
    alert: Text = ""
    error: str = ""
    metrics: tuple[str, ...] = ()
    guard: str = ""
    flag: str = ""
    dtype: str = ""
    sampled: bool = False

    @property
    def told_by(self) -> tuple[str, ...]:
        return self.metrics or self.when.metrics

    @property
    def setting(self) -> str:
        """Name of the setting that changes the rule for a run, or "" if no setting changes the
        rule."""
        return f"{GUARDS}.{self.guard}" if self.guard else getattr(self.when, "setting", "")

    def given(self, **settings: Any) -> Condition:
        """Returns a copy of the rule's condition, in which the run's `settings` replace the values
        from the table RULES."""
        return replace(self.when, **settings)

    @property
    def action(self) -> str:
        """The rule's consequence, in words."""
        if self.guard:
            return f"`{self.setting}.action`"
        return "alert" if self.alert else "stop"


def said(text: Text, row: Row, found: Found) -> str:
    """Fills in the placeholders in the text of a rule."""
    return text(row) if callable(text) else text.format_map(_Numbers(row, **found.measured))


def _not_taken(row: Row) -> str:
    # if a step has several updates, their norms are averaged
    if (taken := row.get("update/count", math.nan)) > 0:
        return f"a gradient was not finite; {taken:.0f} of this step's optimizer steps were taken"
    return f"gradient norm {row.get('optimizer/grad_norm', math.nan):g}, no optimizer step taken"


def _not_verified(row: Row) -> str:
    counts = (
        (row.get("reward/timeouts", math.nan), "timed out"),
        (row.get("reward/crashes", math.nan), "crashed"),
    )
    return (
        "verifying answers:"
        f" {' and '.join(f'{count:.0f} {what}' for count, what in counts if count > 0)}"
    )


# The most serious first: a small display shows only the first.
_TABLE = (
    Rule("no finite gradient", Equal(("update/finite",), 0.0), _not_taken),
    Rule(
        "rolled back",
        Risen(("guard/rollbacks",)),
        "the run was rolled back to a checkpoint; rollbacks so far: {guard/rollbacks:.0f}, prompts"
        " skipped: {guard/left_out:.0f}",
    ),
    Rule(
        "entropy out of bounds",
        Outside(("entropy/mean",)),
        f"entropy {{entropy/mean:.3g}} is outside the band of {GUARDS}.entropy",
        f"entropy {{entropy/mean:.3g}} is outside {GUARDS}.entropy, {{low:g}} to {{high:g}} nats",
        guard="entropy",
        flag="guard/entropy_outside",
    ),
    Rule(
        "spike of the loss",
        Spike(("loss/policy",), both_ways=True),
        "loss/policy {loss/policy:.3g} is {guard/loss:.3g} spreads from the median of earlier"
        f" steps ({GUARDS}.loss)",
        "the loss {figure:.3g} is {away:.3g} spreads from the median of earlier steps,"
        " {median:.3g}",
        guard="loss",
        flag="guard/loss_spike",
    ),
    Rule(
        "spike of the gradient norm",
        # the first metric applies if a step has several updates
        Spike(("optimizer/grad_norm_max", "optimizer/grad_norm")),
        "optimizer/grad_norm {optimizer/grad_norm:.3g} is {guard/grad_norm:.3g} spreads from"
        f" the median of earlier steps ({GUARDS}.grad_norm)",
        "the gradient norm {figure:.3g} is {away:.3g} spreads from the median of earlier steps,"
        " {median:.3g}",
        metrics=("optimizer/grad_norm",),
        guard="grad_norm",
        flag="guard/grad_norm_spike",
    ),
    Rule(
        "spike of engine against trainer",
        # the second metric applies to an in-process engine in float32
        Spike(("agreement/mean", "rollout/logprob_diff_mean")),
        "rollout/logprob_diff_mean {rollout/logprob_diff_mean:.3g} is {guard/agreement:.3g}"
        f" spreads from the median of earlier steps ({GUARDS}.agreement)",
        "the log-prob difference between engine and trainer, {figure:.3g}, is {away:.3g} spreads"
        " from the median of earlier steps, {median:.3g}",
        metrics=("rollout/logprob_diff_mean",),
        guard="agreement",
        flag="guard/agreement_spike",
    ),
    Rule(
        "nothing to learn",
        Above(("update/empty",)),
        "no token had a loss in {update/empty:.0f} of this step's mini-batches; no optimizer step"
        " was taken for them",
    ),
    Rule(
        "engine and trainer differ",
        Above(("rollout/logprob_diff_max",), LOGPROB_DIFF),
        "engine and trainer differ by {rollout/logprob_diff_max:.2g} nats on a token",
        dtype="float32",
    ),
    Rule(
        "engine and trainer too far apart",
        Grown(("agreement/trend",), setting="agreement.trend"),
        error=(
            "log-probs of sampled tokens lie {agreement/trend:.3g} times as far apart between"
            " rollout engine and trainer as at the start of the run ({agreement/mean:.3g} nats on"
            " average; the limit is {limit:g} times): part of the weights is not synced, or"
            " rounding errors grow with the weights"
        ),
    ),
    Rule(
        "engine and trainer drift apart",
        Grown(("agreement/trend",)),
        "engine and trainer differ {agreement/trend:.2g} times as much as at the start,"
        " {agreement/mean:.2g} nats on average",
    ),
    Rule("reward failures", Above(("reward/timeouts", "reward/crashes")), _not_verified),
    Rule(
        "requests lost",
        Above(("rollout/retried",)),
        "{rollout/retried:.0f} requests for responses were lost and retried,"
        " {rollout/retried_late:.0f} of them because they timed out",
    ),
    Rule(
        "engines lost",
        Above(("engine/dead",)),
        "engine losses: {engine/dead:.0f}; engines that serve now: {engine/serving:.0f}",
    ),
    Rule(
        "entropy collapse",
        Collapse(("entropy/mean",)),
        "entropy {late:.3g} ({start:.3g} at the start) halves every {halving:.0f} steps; the run"
        " has no target",
        sampled=True,  # what is learnt from others' responses lowers the entropy
    ),
    Rule(
        "entropy off target",
        OffTarget(("entropy/mean",)),
        "entropy {entropy/mean:.3g} is {side} its target's band, {low:.3g} to {high:.3g}; outside"
        f" the band for at least {OFF_TARGET_STEPS} steps",
    ),
    Rule(
        "gradient spike",
        TimesMedian(("optimizer/grad_norm",)),
        "gradient norm {optimizer/grad_norm:.3g} is {times:.0f} times the median of earlier steps,"
        " {median:.3g}",
    ),
    Rule(
        "responses cut off",
        Above(("response/truncated",), TRUNCATED_SHARE),
        "{response/truncated:.0%} of the responses are cut off at rollout.max_new_tokens",
    ),
    Rule(
        "groups without signal",
        Above(("group/degenerate",), DEGENERATE_SHARE),
        "{group/degenerate:.0%} of the groups have equal rewards and teach nothing",
    ),
)
RULES = {rule.name: rule for rule in _TABLE}


class Watch:
    """Begins and ends the alerts of a run, according to the metrics of the run's steps.

    Args:
        dtype: see `coarsest_dtype`. The dtype determines how closely engine and trainer should
            agree.
        sampled: whether the run samples its responses.
    """

    def __init__(self, dtype: str = "float32", *, sampled: bool = True) -> None:
        self.active: dict[str, Alert] = {}
        self._rules = [
            rule
            for rule in RULES.values()
            if rule.alert and rule.dtype in ("", dtype) and (sampled or not rule.sampled)
        ]
        self._judge = Judge({rule.name: _as_logged(rule) for rule in self._rules})

    def add(self, step: int, metrics: Row) -> list[Alert]:
        """Adds a step. Returns the alerts that began with the step and the alerts that ended with
        the step."""
        changed = []
        for rule in self._rules:
            found, held = self._judge.judge(rule.name, metrics), self.active.get(rule.name)
            if found.holds:
                metric = max(
                    (name for name in rule.told_by if name in metrics),
                    key=metrics.__getitem__,
                    default="",
                )
                value = float(metrics[metric]) if metric else math.nan
                first, text = held.first_step if held else step, said(rule.alert, metrics, found)
                self.active[rule.name] = Alert(
                    rule.name, text, first, step, metric=metric, value=value
                )
                changed += [] if held else [self.active[rule.name]]
            elif held and step - held.last_step >= QUIET_STEPS:
                changed.append(replace(self.active.pop(rule.name), over=True))
        self._judge.remember(metrics)
        return changed

    def restore(self, rows: Iterable[Row]) -> None:
        """Adds the metrics of the steps that a resumed run has already finished, so that `add` can
        compare new steps with the finished steps. Alerts that were active after the last finished
        step stay active, and `add` does not return these alerts as new alerts."""
        for row in rows:
            self.add(int(row["step"]), row)


def _as_logged(rule: Rule) -> Condition:
    """Returns the condition that decides, from a run's logged metrics, whether this rule applies.
    For a rule with a flag, the condition holds if the flag is 1."""
    return Equal((rule.flag,), 1.0) if rule.flag else rule.when
