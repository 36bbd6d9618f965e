"""Results of the optimizer steps of one rollout batch, and how their metrics become those of the
step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_stare.errors import NonFiniteError
from megatron_stare.records.metric import Metric

METRICS = (
    Metric(
        "update/count",
        "steps",
        "optimizer steps that were taken",
        "batch.prompts / batch.mini_batch_prompts x batch.epochs",
    ),
    Metric(
        "update/finite",
        "0 or 1",
        "0: loss or gradient of an update of the step was not finite, and that update was not"
        " taken",
        "1; 0 is an alert, faults.guards.not_finite updates in a row stop the run",
    ),
    Metric(
        "update/empty",
        "mini-batches",
        "in which no token had a loss, so that no step was taken",
        "0; any is an alert",
    ),
    Metric(
        "update/skipped",
        "updates",
        "not taken because the loss scale was too large for the gradient; float16 alone",
        "a few at the start, then one now and then",
    ),
    Metric(
        "optimizer/grad_norm_max",
        "norm",
        "the largest optimizer/grad_norm of several updates, of those that are finite",
        "see optimizer/grad_norm, their mean",
    ),
    Metric(
        "ratio/first_max_abs_log",
        "nats",
        "ratio/max_abs_log of the first of several updates, which is on policy",
        "exactly 0",
    ),
)


# default number of consecutive updates that are not finite before a run stops
MAX_SKIPPED = 3

# by the last part of a metric's name; every other metric is averaged
COUNTS = ("tokens", "selected")


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step: its metrics, and the method's state that the next training step starts
    from."""

    metrics: dict[str, float]
    state: dict[str, float]

    @property
    def finite(self) -> bool:
        """Tells whether the gradient was finite; if not, no step was taken."""
        return bool(self.metrics["update/finite"])

    @property
    def empty(self) -> bool:
        """Tells whether no token of the mini-batch had a loss, so that no step was taken."""
        return bool(self.metrics["update/empty"])

    @property
    def skipped(self) -> bool:
        """Tells whether the loss scale was too large for the gradient, so that no step was taken;
        float16 alone."""
        return bool(self.metrics.get("update/skipped", 0.0))

    @property
    def taken(self) -> bool:
        return self.finite and not (self.empty or self.skipped or self.held)

    @property
    def held(self) -> bool:
        """Tells whether the gradient norm was above its limit, so that no step was taken."""
        return bool(self.metrics.get("update/held", 0.0))


def combined(updates: Sequence[UpdateResult]) -> dict[str, float]:
    """The metrics of a training step from those of its updates, in order.

    Largest values stay the largest, counts of tokens are summed over the updates, everything else
    is averaged over the updates that report it: what belongs to the rollout batch is reported by
    the first alone. In averages those of empty mini-batches have no say where others report the
    same, nor have those whose scaled gradient overflowed. `update/count` is the number of optimizer
    steps taken, `update/finite` 0 if a gradient was not, `update/empty` the number of empty
    mini-batches, `update/skipped` that of overflows, `update/held` that of norms above the limit.
    Of several updates, `ratio/first_max_abs_log` is the largest log ratio of the first, which is on
    policy, and `optimizer/grad_norm_max` the largest norm that is finite.
    """
    names = {name: None for update in updates for name in update.metrics}
    rows = [update.metrics for update in updates]
    telling = [update.metrics for update in updates if not (update.empty or update.skipped)]
    metrics = {name: _combined(name, rows, telling) for name in names}
    metrics["update/finite"] = min(row["update/finite"] for row in rows)
    metrics["update/empty"] = float(sum(update.empty for update in updates))
    metrics["update/count"] = float(sum(update.taken for update in updates))
    if "update/skipped" in metrics:
        metrics["update/skipped"] = float(sum(update.skipped for update in updates))
    if "update/held" in metrics:
        metrics["update/held"] = float(sum(update.held for update in updates))
    if len(updates) > 1:
        metrics["ratio/first_max_abs_log"] = rows[0]["ratio/max_abs_log"]
        norms = [row["optimizer/grad_norm"] for row in telling if "optimizer/grad_norm" in row]
        if norms := [norm for norm in norms if math.isfinite(norm)]:
            metrics["optimizer/grad_norm_max"] = max(norms)
    return metrics


def skipped_after(
    updates: Sequence[UpdateResult], skipped: int, step: int, most: int = MAX_SKIPPED
) -> int:
    """How many updates in a row were not taken, counted on from `skipped` through those of a
    training step. Those of empty mini-batches, which have no gradient, are passed over, and so are
    overflows, which a smaller loss scale mends.

    Raises:
        NonFiniteError: loss or gradient of `most` updates in a row was not finite.
    """
    for update in updates:
        if update.empty or update.skipped:
            continue
        skipped = 0 if update.finite else skipped + 1
        if skipped >= most:
            raise NonFiniteError(
                f"loss or gradient was not finite in {most} optimizer steps in a row",
                where=f"step {step}",
                fix=(
                    "lower optimizer.lr, and look at the batches in the run's folder guards/,"
                    " which name the first value that was not finite; the weights are unharmed"
                ),
            )
    return skipped


def _combined(
    name: str, rows: Sequence[Mapping[str, float]], telling: Sequence[Mapping[str, float]]
) -> float:
    values = [row[name] for row in rows if name in row]
    words = name.rpartition("/")[2].split("_")
    if "max" in words:
        return max(values)
    if words[0] in COUNTS:
        return sum(values)
    return fmean([row[name] for row in telling if name in row] or values)
