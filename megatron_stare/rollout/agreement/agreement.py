"""Decides whether the log-probs of the rollout engine and the trainer differ too much. If the
log-probs differ too much, this module also determines the likely cause. Pure.

There are two comparisons. The rollout comparison covers the sampled tokens of every rollout, at the
run's temperature. The canary is a fixed set of sequences. After every weight sync, the canary
comparison compares the engines' log-probs of the canary's tokens with the trainer's log-probs, at
temperature 1. The likely cause is inferred from two facts: which of the two comparisons shows a
difference, and at which positions of the sequences the log-probs differ. The differences themselves
are computed by the ranks that hold the trainer's log-probs (megatron/step/differences.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_stare.errors import UserError
from megatron_stare.records.log_prob_difference import LogProbDifference, Sizes
from megatron_stare.records.metric import Metric
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.rollout.agreement.limits import Limits

METRICS = (
    Metric(
        "agreement/mean",
        "nats",
        "mean |engine's log-prob - trainer's log-prob| over the step's sampled tokens",
        "below agreement.mean, which stops a run in 16 bits",
    ),
    Metric(
        "agreement/max",
        "nats",
        "largest |engine's log-prob - trainer's log-prob| over the step's sampled tokens",
        "float32 below sglang.agreement_limit, which stops a run; not judged in 16 bits",
    ),
    Metric(
        "agreement/p50",
        "nats",
        "median of |engine's log-prob - trainer's log-prob|, exact over all ranks",
        "float32 near 1e-6; 16 bits below agreement/mean",
    ),
    Metric(
        "agreement/p90",
        "nats",
        "90 % quantile of |engine's log-prob - trainer's log-prob|, exact over all ranks",
        "steady",
    ),
    Metric(
        "agreement/p99",
        "nats",
        "99 % quantile of |engine's log-prob - trainer's log-prob|, exact over all ranks",
        "below agreement.p99, which stops a run in 16 bits",
    ),
    Metric(
        "agreement/p999",
        "nats",
        "99.9 % quantile of |engine's log-prob - trainer's log-prob|, exact over all ranks",
        "below agreement.p999, which stops a run in 16 bits",
    ),
    Metric(
        "agreement/likely_mean",
        "nats",
        "agreement/mean over tokens with a probability of at least 1/1000",
        "near agreement/mean",
    ),
    Metric(
        "agreement/unlikely_mean",
        "nats",
        "agreement/mean over tokens with a probability below 1/1000",
        "a few times agreement/mean",
    ),
    Metric(
        "agreement/max_from_position_<n>",
        "nats",
        "agreement/max over tokens from position n of the response to the next range's position",
        "similar in all ranges; if it grows with the position, positions or the cache are wrong",
    ),
    Metric(
        "agreement/max_of_age_<n>",
        "nats",
        "agreement/max over tokens sampled by weights that are n steps old",
        "for age 1 as agreement/max; for older weights larger, because the policies differ",
    ),
    Metric(
        "agreement/canary_max",
        "nats",
        "largest log-prob difference on the canary, fixed sequences that every server scores after"
        " a sync",
        "float32 below sglang.agreement_limit",
    ),
    Metric(
        "agreement/canary_likely_mean",
        "nats",
        "mean log-prob difference on the canary's likely tokens, for the server that differs most",
        "below 4 x agreement.mean, which stops a run in 16 bits",
    ),
    Metric(
        "agreement/canary_unlikely_mean",
        "nats",
        "mean log-prob difference on the canary's unlikely tokens, for the server that differs"
        " most",
        "not judged",
    ),
)


class AgreementError(UserError):
    """Raised if engine and trainer compute different log-probs, because training would then use
    wrong importance ratios."""


def agreement_metrics(difference: LogProbDifference, step: int) -> dict[str, float]:
    """Returns metrics of the log-prob differences: the mean difference, the largest difference, the
    quantiles of the differences, the mean difference over likely tokens, and the mean difference
    over unlikely tokens. Also returns the largest difference in each range of token positions. Also
    groups the tokens by the age, in steps, of the weights that sampled the tokens, and returns the
    largest difference in each group.

    Args:
        step: step of the rollout. Tokens that were sampled with the weights of the previous step
            have age 1.
    """
    if not difference.everywhere.tokens:
        return {}
    metrics = {"agreement/mean": difference.everywhere.mean, "agreement/max": difference.largest}
    metrics |= {f"agreement/{name}": size for name, size in difference.quantiles.items()}
    metrics |= _by_likelihood("agreement/", [difference])
    for first, sizes in difference.from_position.items():
        metrics[f"agreement/max_from_position_{first}"] = sizes.largest
    for version, sizes in difference.of_version.items():
        metrics[f"agreement/max_of_age_{step - version}"] = sizes.largest
    return metrics


def _by_likelihood(prefix: str, differences: Sequence[LogProbDifference]) -> dict[str, float]:
    """Returns two metrics: the mean difference over likely tokens, and the mean difference over
    unlikely tokens. If `differences` has several elements, each element has its own mean, and the
    metric is the largest of these means. A mean that covers no tokens is left out."""
    found = {}
    for name in ("likely", "unlikely"):
        parts: list[Sizes] = [getattr(difference, name) for difference in differences]
        if means := [part.mean for part in parts if part.tokens]:
            found[f"{prefix}{name}_mean"] = max(means, key=_nan_first)
    return found


def _nan_first(value: float) -> tuple[bool, float]:
    """Sort key that orders NaN above all numbers."""
    return value != value, value


def canary_batch(sequences: Sequence[Sequence[int]]) -> RolloutBatch:
    """Makes a batch from the canary's token ids; see canary.py. The first token of a sequence is
    the prompt, and all later tokens are the response."""
    lengths = torch.tensor([len(tokens) for tokens in sequences], dtype=torch.int64)
    responses, count = lengths - 1, len(sequences)
    total = int(responses.sum())
    return RolloutBatch(
        tokens=torch.tensor([token for tokens in sequences for token in tokens], dtype=torch.int32),
        loss_mask=torch.ones(total, dtype=torch.bool),
        rollout_log_probs=torch.zeros(total),
        run_versions=torch.zeros(count, dtype=torch.int64),
        run_lengths=responses,
        runs=torch.ones(count, dtype=torch.int64),
        prompt_lengths=torch.ones(count, dtype=torch.int64),
        response_lengths=responses,
        groups=torch.arange(count),
        rewards=torch.zeros(count, dtype=torch.float64),
        verified=torch.ones(count, dtype=torch.bool),
        truncated=torch.zeros(count, dtype=torch.bool),
    )


def canary_verdict(
    differences: Sequence[LogProbDifference], limits: Limits, engines: Sequence[int] | None = None
) -> str | None:
    """Returns a text with the likely cause if log-probs of the canary differ between engines and
    trainer. Returns None if engines and trainer agree. `differences` has one element per engine.

    Args:
        engines: index of each engine; None: the engines have the indices 0, 1, and so on.
    """
    wrong = [i for i, difference in enumerate(differences) if limits.canary_passed(difference)]
    if not wrong:
        return None
    if len(wrong) < len(differences):
        number = wrong[0] if engines is None else engines[wrong[0]]
        return (
            f"the weights of engine {number} are to blame: the other engines agree with the trainer"
        )
    worst = differences[wrong[0]]
    if (
        not _first_position(worst).not_numbers
        and limits.size(_first_position(worst)) <= limits.same
    ):
        cache = f", or keys are too large for a cache of {limits.cache}" if limits.cache else ""
        return (
            f"positions are to blame (RoPE's base or scaling, or the attention mask){cache}: the"
            " first position, which attends to nothing else, agrees, later ones do not"
        )
    if not worst.longest.not_numbers and limits.size(worst.longest) <= limits.same:
        return (
            "padding is to blame: the longest sequence agrees, which nothing pads, shorter ones"
            " do not"
        )
    return "the weights are to blame: the engine's differ from the trainer's, in all positions"


def rollout_verdict(
    sampled: LogProbDifference, unscaled: LogProbDifference, temperature: float, limits: Limits
) -> str:
    """Names a likely cause of log-prob differences between engine and trainer on sampled tokens.
    The function assumes that engine and trainer agree on the log-probs of the canary.

    Args:
        sampled: differences between engine and trainer, with the trainer's log-probs at the run's
            temperature.
        unscaled: differences for the same tokens, with the trainer's log-probs at temperature 1.
    """
    everywhere, first = limits.size(sampled.everywhere), limits.size(_first_position(sampled))
    if (nan := sampled.everywhere.not_numbers) and everywhere <= limits.wrong:
        return (
            f"NaN is to blame, in {sampled.engine_nan} log-probs of the engine and"
            f" {nan - sampled.engine_nan} of the trainer alone; all others agree: activations"
            " overflowed, as in float16, or a device computes wrongly"
        )
    if (
        temperature != 1.0
        and not unscaled.everywhere.not_numbers
        and limits.size(unscaled.everywhere) <= limits.same
    ):
        return (
            "the temperature is to blame: the engine samples at 1, the trainer divides by"
            f" {temperature:g}"
        )
    if sampled.lowest >= -limits.rounding:
        return (
            "the sampling support is to blame: the engine gives no sampled token a lower"
            " probability than the trainer, as with top-k, top-p or min-p"
        )
    if first <= limits.wrong < everywhere:
        return (
            "the engine's cache or batching is to blame: the canary agrees, and so do first tokens;"
            " later ones do not"
        )
    return (
        "the temperature, a penalty or a bias of the engine is to blame: the canary, which is not"
        " sampled, agrees, and log-probs differ both ways"
    )


def _first_position(difference: LogProbDifference) -> Sizes:
    return difference.from_position.get(0, Sizes(0, 0, 0.0, 0.0))


def require_agreement(what: str, passed: str, verdict: str, where: str) -> None:
    """Raises AgreementError if log-prob differences exceed a limit.

    Args:
        passed: text that describes every exceeded limit; "" if no limit is exceeded (see
            `Limits.passed`).
    """
    if not passed:
        return
    raise AgreementError(
        f"{what} differ {passed}; {verdict}",
        where=where,
        fix=(
            "correct the cause; if the difference is known to be harmless, raise"
            " sglang.agreement_limit or the limit in the section agreement"
        ),
    )


def summary(differences: Sequence[LogProbDifference]) -> dict[str, float]:
    """Returns three metrics of the canary: the largest difference, the mean difference over likely
    tokens, and the mean difference over unlikely tokens. Each metric is computed for every engine,
    and the largest result is returned."""
    largest = max((d.largest for d in differences), default=0.0, key=_nan_first)
    return {"agreement/canary_max": largest, **_by_likelihood("agreement/canary_", differences)}
