"""Defines the result of an optimizer step (an update). Combines the metrics of all updates on one
rollout batch into the metrics of the training step."""

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
        "optimizer steps taken",
        "batch.prompts / batch.mini_batch_prompts x batch.epochs",
    ),
    Metric(
        "update/finite",
        "0 or 1",
        "0: an update of the step had a loss or gradient that was not finite, and was skipped",
        "1; 0 is an alert, faults.guards.not_finite updates in a row stop the run",
    ),
    Metric(
        "update/empty",
        "mini-batches",
        "mini-batches in which no token had a loss, so that no step was taken",
        "0; any is an alert",
    ),
    Metric(
        "update/skipped",
        "updates",
        "updates skipped because the loss scale was too large for the gradient; float16 only",
        "a few at the start, rare afterwards",
    ),
    Metric(
        "optimizer/grad_norm_max",
        "norm",
        "largest finite optimizer/grad_norm of the step's updates, if there are several",
        "see optimizer/grad_norm, the mean of the updates",
    ),
    Metric(
        "ratio/first_max_abs_log",
        "nats",
        "ratio/max_abs_log of the first update, which is on policy, if there are several",
        "exactly 0",
    ),
)


# default number of consecutive non-finite updates after which a run stops
MAX_SKIPPED = 3

# metrics are summed if their name after the "/" begins with one of these words, else averaged
COUNTS = ("tokens", "selected")


@dataclass(frozen=True)
class UpdateResult:
    """Result of one optimizer step. Contains the metrics of this optimizer step, and the state with
    which the method begins the next training step."""

    metrics: dict[str, float]
    state: dict[str, float]

    @property
    def finite(self) -> bool:
        """Returns True if the gradient was finite. If the gradient was not finite, no optimizer
        step was taken."""
        return bool(self.metrics["update/finite"])

    @property
    def empty(self) -> bool:
        """Returns True if no optimizer step was taken because the mini-batch had no token that
        carried loss."""
        return bool(self.metrics["update/empty"])

    @property
    def skipped(self) -> bool:
        """Returns True if no optimizer step was taken because the loss scale was too large for the
        gradient. Only float16 training has a loss scale."""
        return bool(self.metrics.get("update/skipped", 0.0))

    @property
    def taken(self) -> bool:
        return self.finite and not (self.empty or self.skipped or self.held)

    @property
    def held(self) -> bool:
        """Returns True if no optimizer step was taken because the gradient norm was above its
        limit."""
        return bool(self.metrics.get("update/held", 0.0))


def combined(updates: Sequence[UpdateResult]) -> dict[str, float]:
    """Combines the metrics of a training step's updates into the metrics of the training step.
    `updates` lists the updates in the order in which the trainer made them.

    If a metric is a maximum, the result is the maximum over the updates. Counts of tokens are
    summed. A metric that is neither a maximum nor a count is averaged over the updates that report
    the metric. Normally, the average leaves out two kinds of updates: updates on empty
    mini-batches, and updates whose scaled gradient overflowed. If this rule would leave no update
    for a metric, the metric is averaged over all updates that report the metric. Only the first
    update reports the metrics of the rollout batch.

        update/count              optimizer steps taken
        update/finite             0 if any gradient was not finite
        update/empty              number of empty mini-batches
        update/skipped            number of overflows
        update/held               number of gradient norms above the limit
        ratio/first_max_abs_log   largest log ratio of the first update, which is on policy
        optimizer/grad_norm_max   largest finite gradient norm

    ratio/first_max_abs_log and optimizer/grad_norm_max exist only if the step has several updates.
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
    """Counts consecutive non-finite updates, and returns the count after the last update of a
    training step. A finite update resets the count to 0. `skipped` is the count of consecutive
    non-finite updates before the first update of the training step. The count ignores an update on
    an empty mini-batch, because such an update has no gradient. The count also ignores an update
    whose scaled gradient overflowed, because an overflow only requires a smaller loss scale.

    Raises:
        NonFiniteError: the loss or the gradient was not finite in `most` updates in a row.
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
                    "look at the batches in the run's folder guards/, which name the first value"
                    " that was not finite; the weights are unharmed, and a new run from their"
                    " checkpoint (megatron-stare convert) may have a lower optimizer.lr"
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
