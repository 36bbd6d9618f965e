"""What in the figures of a run a person should look at now.

Comes from the metrics of the latest steps; goes to the sinks, which are told once that an alert began and once that it
is over. Every check is a pure function of what `Recent` holds; `Watch` remembers, and knows begin from end.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_stare.observability.metrics.paired import BAND
from megatron_stare.observability.sink import Alert

Row = Mapping[str, float]

# Single batches leave the band by chance; ten in a row do not, and a controller that works is back sooner.
OFF_TARGET_STEPS = 10
# Without a target: entropy halves in fewer steps than this, as in the published collapses of plain GRPO. Slower is the
# normal sharpening of a policy that learns.
HALVING_STEPS = 40
FALL_WINDOW = 20  # steps the speed is measured over: means of its two halves, so that one odd batch is no fall
FALLEN_SHARE = (
    0.5  # of the entropy the run started with; above it, the fast first steps of a base model are no collapse
)
START_STEPS = 5  # averaged to say what the run started with
# One token budget for all: beyond a fifth, the reward says more about the budget than about the reasoning.
TRUNCATED_SHARE = 0.2
# float32 on both sides differs by rounding, 1e-6 to 1e-5. A thousandth is another model: stale or misplaced weights,
# other sampling settings, a mask. Not checked in 16 bits: bfloat16 tokens differ by tenths with nothing wrong.
LOGPROB_DIFF = 1e-3
# Of 16 bits: how far the mean difference has grown since the run's first steps. By chance windows differ by a tenth or
# two; a run stops at agreement.trend. Means below are rounding whatever they grew from.
TREND = 2.0
TREND_MEAN = 5e-3  # nats
GRAD_SPIKE = 10.0  # times the median; batches of one run differ by factors of two or three
GRAD_WINDOW = 50  # steps the median is over: long enough to be steady, short enough to follow training
GRAD_KNOWN = 10  # steps before there is a median worth the name
DEGENERATE_SHARE = 0.9  # of the groups teach nothing: a step costs as much and learns from a tenth of its batch
# An alert is over after this many steps without its condition: a value at its threshold would else come and go.
QUIET_STEPS = 5
ROWS_KEPT = max(GRAD_WINDOW + 1, FALL_WINDOW, OFF_TARGET_STEPS)


@dataclass(frozen=True)
class Recent:
    """What checks look at.

    rows: metrics of the latest steps, oldest first, at least one.
    since_target: steps since entropy was first at its target; None before.
    start_entropy: nats, mean of the first steps of the run; None while it is not known.
    dtype: of the model in training.
    """

    rows: Sequence[Row]
    since_target: int | None = None
    start_entropy: float | None = None
    dtype: str = "float32"

    def now(self, key: str) -> float:
        """The newest value of a metric; NaN where it is missing, and NaN fails every comparison."""
        return self.rows[-1].get(key, math.nan)


def on_target(row: Row) -> bool:
    """Entropy is within its band; False without a target."""
    target = row.get("entropy/target", math.nan)
    return abs(row.get("entropy/mean", math.nan) - target) <= BAND * target


def entropy_off_target(recent: Recent) -> str | None:
    """Outside the band for OFF_TARGET_STEPS steps, after it was reached: on the way there it is no alert."""
    rows = recent.rows[-OFF_TARGET_STEPS:]
    known = [r for r in rows if math.isfinite(r.get("entropy/target", math.nan) + r.get("entropy/mean", math.nan))]
    if recent.since_target is None or any(map(on_target, known)):
        return None
    if min(recent.since_target, len(known)) < OFF_TARGET_STEPS:
        return None
    entropy, target = recent.now("entropy/mean"), recent.now("entropy/target")
    side = "below" if entropy < target else "above"
    low, high = target * (1 - BAND), target * (1 + BAND)
    return f"entropy {entropy:.3g} is {side} its band {low:.3g} to {high:.3g} for {OFF_TARGET_STEPS}+ steps"


def entropy_collapse(recent: Recent) -> str | None:
    """Without a target: already low against the start of the run, and still halving fast."""
    rows = recent.rows[-FALL_WINDOW:]
    values = [row.get("entropy/mean", math.nan) for row in rows]
    if "entropy/target" in rows[-1] or recent.start_entropy is None or len(values) < FALL_WINDOW:
        return None
    if not all(math.isfinite(v) and v > 0 for v in values):
        return None
    half = FALL_WINDOW // 2
    before, after = statistics.fmean(values[:half]), statistics.fmean(values[half:])
    if after >= before or after > FALLEN_SHARE * recent.start_entropy:
        return None
    halving = half * math.log(2) / math.log(before / after)  # the halves' centres are `half` steps apart
    if halving >= HALVING_STEPS:
        return None
    start = recent.start_entropy
    return f"entropy {after:.3g} ({start:.3g} at first) halves every {halving:.0f} steps, no target"


def reward_failures(recent: Recent) -> str | None:
    """Any answer without a verdict: rewards are the only thing the run learns from."""
    timeouts, crashes = recent.now("reward/timeouts"), recent.now("reward/crashes")
    parts = [f"{count:.0f} {what}" for count, what in ((timeouts, "timed out"), (crashes, "crashed")) if count > 0]
    return f"verifying answers: {' and '.join(parts)}" if parts else None


def truncation(recent: Recent) -> str | None:
    """Many responses end at the token limit."""
    share = recent.now("response/truncated")
    if not share > TRUNCATED_SHARE:
        return None
    return f"{share:.0%} of the responses are cut off at rollout.max_new_tokens"


def logprob_difference(recent: Recent) -> str | None:
    """Engine and trainer disagree about the log-prob of a token."""
    difference = recent.now("rollout/logprob_diff_max")
    if recent.dtype != "float32" or not difference > LOGPROB_DIFF:
        return None
    return f"engine and trainer differ by {difference:.2g} nats on a token"


def log_probs_drift(recent: Recent) -> str | None:
    """Engine and trainer disagree ever more."""
    growth, mean = recent.now("agreement/trend"), recent.now("agreement/mean")
    if not (growth > TREND and mean > TREND_MEAN):
        return None
    return f"engine and trainer differ {growth:.2g} times as much as at first, {mean:.2g} nats in the mean"


def requests_lost(recent: Recent) -> str | None:
    """Any response that had to be asked for again."""
    again, late = recent.now("rollout/retried"), recent.now("rollout/retried_late")
    if not again > 0:
        return None
    return f"{again:.0f} requests for responses were lost and made again, {late:.0f} of them late"


def engines_lost(recent: Recent) -> str | None:
    """An engine is lost, whether it will come back or not."""
    lost, serving = recent.now("engine/dead"), recent.now("engine/serving")
    if not lost > 0:
        return None
    return f"engines were lost {lost:.0f} times, {serving:.0f} serve"


def gradient_spike(recent: Recent) -> str | None:
    """One gradient norm far above those before it."""
    norms = [row.get("optimizer/grad_norm", math.nan) for row in recent.rows[-GRAD_WINDOW - 1 : -1]]
    norms = [norm for norm in norms if math.isfinite(norm)]
    median = statistics.median(norms) if len(norms) >= GRAD_KNOWN else 0.0
    norm = recent.now("optimizer/grad_norm")
    if not (median > 0 and GRAD_SPIKE * median < norm < math.inf):  # not finite: update_skipped says so
        return None
    return f"gradient norm {norm:.3g} is {norm / median:.0f} times the median {median:.3g} before it"


def loss_guard(recent: Recent) -> str | None:
    """The loss is a spike, by the section `faults.guards`."""
    return _spike(recent, "loss", "loss/policy")


def norm_guard(recent: Recent) -> str | None:
    """The gradient norm is one."""
    return _spike(recent, "grad_norm", "optimizer/grad_norm")


def agreement_guard(recent: Recent) -> str | None:
    """The difference of engine and trainer is one."""
    return _spike(recent, "agreement", "rollout/logprob_diff_mean")


def _spike(recent: Recent, guard: str, figure: str) -> str | None:
    if recent.now(f"guard/{guard}_spike") != 1:
        return None
    away = recent.now(f"guard/{guard}")
    return f"{figure} {recent.now(figure):.3g} is {away:.3g} spreads from the median before it (faults.guards.{guard})"


def entropy_guard(recent: Recent) -> str | None:
    """Entropy is outside the band of the section `faults.guards`."""
    if recent.now("guard/entropy_outside") != 1:
        return None
    return f"entropy {recent.now('entropy/mean'):.3g} is outside the band of faults.guards.entropy"


def rolled_back(recent: Recent) -> str | None:
    """The run has just gone back to a checkpoint."""
    before = recent.rows[-2].get("guard/rollbacks", 0.0) if len(recent.rows) > 1 else 0.0
    if not (made := recent.now("guard/rollbacks")) > before:
        return None
    prompts = recent.now("guard/left_out")
    return f"the run went back to a checkpoint, {made:.0f} times so far, and leaves {prompts:.0f} prompts out"


def update_skipped(recent: Recent) -> str | None:
    """Loss or gradient was not finite."""
    if recent.now("update/finite") != 0:
        return None
    if (taken := recent.now("update/count")) > 0:  # of several updates; their norms are averaged
        return f"a gradient was not finite, {taken:.0f} of this step's optimizer steps were taken"
    return f"gradient norm {recent.now('optimizer/grad_norm'):g}, no optimizer step taken"


def nothing_to_learn(recent: Recent) -> str | None:
    """A mini-batch in which no token had a loss."""
    number = recent.now("update/empty")
    if not number > 0:
        return None
    return f"no token had a loss in {number:.0f} of this step's mini-batches, for which no optimizer step was taken"


def degenerate_groups(recent: Recent) -> str | None:
    """Nearly every group's rewards are all equal."""
    share = recent.now("group/degenerate")
    if not share > DEGENERATE_SHARE:
        return None
    return f"{share:.0%} of the groups have equal rewards and teach nothing"


# The most serious first: a narrow or low display shows the first.
CHECKS: dict[str, Callable[[Recent], str | None]] = {
    "no finite gradient": update_skipped,
    "rolled back": rolled_back,
    "entropy out of bounds": entropy_guard,
    "spike of the loss": loss_guard,
    "spike of the gradient norm": norm_guard,
    "spike of engine against trainer": agreement_guard,
    "nothing to learn": nothing_to_learn,
    "engine and trainer differ": logprob_difference,
    "engine and trainer drift apart": log_probs_drift,
    "reward failures": reward_failures,
    "requests lost": requests_lost,
    "engines lost": engines_lost,
    "entropy collapse": entropy_collapse,
    "entropy off target": entropy_off_target,
    "gradient spike": gradient_spike,
    "responses cut off": truncation,
    "groups without signal": degenerate_groups,
}

# The metric that tells of each most directly; of several, the one that is larger.
MEASURED: dict[str, tuple[str, ...]] = {
    "no finite gradient": ("update/finite",),
    "nothing to learn": ("update/empty",),
    "engine and trainer differ": ("rollout/logprob_diff_max",),
    "engine and trainer drift apart": ("agreement/trend",),
    "reward failures": ("reward/timeouts", "reward/crashes"),
    "requests lost": ("rollout/retried",),
    "engines lost": ("engine/dead",),
    "entropy collapse": ("entropy/mean",),
    "entropy off target": ("entropy/mean",),
    "gradient spike": ("optimizer/grad_norm",),
    "responses cut off": ("response/truncated",),
    "groups without signal": ("group/degenerate",),
    "rolled back": ("guard/rollbacks",),
    "entropy out of bounds": ("entropy/mean",),
    "spike of the loss": ("loss/policy",),
    "spike of the gradient norm": ("optimizer/grad_norm",),
    "spike of engine against trainer": ("rollout/logprob_diff_mean",),
}


@dataclass
class Watch:
    """Follows a run and says when alerts begin and end.

    Args:
        dtype: of the model in training; what agreement of engine and trainer may be expected.
    """

    dtype: str = "float32"
    active: dict[str, Alert] = field(default_factory=dict)
    _rows: deque[Row] = field(default_factory=lambda: deque(maxlen=ROWS_KEPT))
    _since_target: int | None = None
    _first: list[float] = field(default_factory=list)

    def add(self, step: int, metrics: Row) -> list[Alert]:
        """Takes a step; returns the alerts that began with it and those that are over with it."""
        self._remember(metrics)
        start = statistics.fmean(self._first) if len(self._first) == START_STEPS else None
        recent = Recent(tuple(self._rows), self._since_target, start, self.dtype)
        changed = []
        for name, check in CHECKS.items():
            text, held = check(recent), self.active.get(name)
            if text is not None:
                first = held.first_step if held else step
                metric, value = _measured(name, metrics)
                self.active[name] = Alert(name, text, first, step, metric=metric, value=value)
                changed += [] if held else [self.active[name]]
            elif held and step - held.last_step >= QUIET_STEPS:
                changed.append(replace(self.active.pop(name), over=True))
        return changed

    def restore(self, rows: Sequence[Row]) -> None:
        """Takes the steps of a resumed run: what they did is remembered, but nothing is said about them."""
        for row in rows:
            self._remember(row)

    def _remember(self, row: Row) -> None:
        gaps = [r.get("entropy/mean", math.nan) - r.get("entropy/target", math.nan) for r in [*self._rows, row][-2:]]
        if self._since_target is not None:
            self._since_target += 1
        elif on_target(row) or gaps[0] * gaps[-1] < 0:  # or stepped over it, from one side of the band to the other
            self._since_target = 0
        entropy = row.get("entropy/mean", math.nan)
        if len(self._first) < START_STEPS and math.isfinite(entropy):
            self._first.append(entropy)
        self._rows.append(row)


def _measured(name: str, metrics: Row) -> tuple[str, float]:
    known = [metric for metric in MEASURED.get(name, ()) if metric in metrics]
    if not known:
        return "", math.nan
    metric = max(known, key=lambda each: metrics[each])
    return metric, float(metrics[metric])
