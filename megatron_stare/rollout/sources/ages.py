"""Computes the age of each sampled token of a batch. Tokens whose age reaches the limit
`Ages.masked_from` are removed from the loss mask. If the age of a token exceeds the limit
`Ages.oldest`, an error is raised. Pure.

Training step s starts from the weights of version s - 1. If weights of version v sampled a token,
and step s trains on the token, the token's age is s - 1 - v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_stare.errors import WeightVersionError
from megatron_stare.records.metric import Metric
from megatron_stare.records.trajectory import NOT_SAMPLED, Trajectory

METRICS = (
    Metric(
        "staleness/masked",
        "share",
        "sampled tokens whose weights are too old for them to carry loss, with"
        " rollout.stale_tokens: mask",
        "small; near 1 little is trained on",
    ),
)


@dataclass(frozen=True)
class Ages:
    """Limits on the ages of the tokens in a batch.

    Attributes:
        `oldest`: maximum age of a token; None means no limit.
        `masked_from`: smallest age at which a token is removed from the loss mask. If `masked_from`
            is None, the age of a token never removes the token from the loss mask.
    """

    oldest: int | None = None
    masked_from: int | None = None

    def settle(self, trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
        """Masks tokens that are too old, and returns metrics of the tokens' ages.

        Raises:
            WeightVersionError: the weights that sampled a token are too old, or newer than the
                trainer's weights.
        """
        ages = ages_of(trajectories, step - 1)
        check_ages(ages, self.oldest, step)
        tokens = sum(ages.values())
        metrics = {
            "staleness/mean_age": (
                sum(age * n for age, n in ages.items()) / tokens if tokens else 0.0
            ),
            "staleness/max_age": max(ages, default=0),
        }
        if self.masked_from is not None:
            masked = sum(
                mask_from(trajectory, self.masked_from, step - 1) for trajectory in trajectories
            )
            metrics["staleness/masked"] = masked / tokens if tokens else 0.0
        return metrics


def ages_of(trajectories: Sequence[Trajectory], newest: int) -> dict[int, int]:
    """Returns the number of sampled tokens of each age. A token's age is `newest` minus the version
    of the weights that sampled the token."""
    found: dict[int, int] = {}
    for trajectory in trajectories:
        for version, tokens in trajectory.versions:
            if version != NOT_SAMPLED and tokens:
                found[newest - version] = found.get(newest - version, 0) + tokens
    return found


def check_ages(ages: Mapping[int, int], bound: int | None, step: int) -> None:
    """Raises WeightVersionError if a token's age exceeds `bound`, or if a token's weights are newer
    than the trainer's weights."""
    wrong = {
        age: tokens
        for age, tokens in ages.items()
        if age < 0 or (bound is not None and age > bound)
    }
    if wrong:
        counts = ", ".join(f"{tokens} tokens of age {age}" for age, tokens in sorted(wrong.items()))
        allowed = "at least 0" if bound is None else f"between 0 and {bound}"
        raise WeightVersionError(
            f"step {step} may train on tokens of weights up to {allowed} versions old, but there"
            f" are {counts}",
            where="rollout",
            fix=("an engine reports a wrong weight version, or did not get the published weights"),
        )


def mask_from(trajectory: Trajectory, age: int, newest: int) -> int:
    """Removes tokens that are too old from the loss mask. A token is too old if the weights that
    sampled the token are at least `age` versions older than the weights of version `newest`.
    Returns the number of tokens that are too old. Tokens that are too old stay in the trajectory,
    because they were part of the context in which later tokens were sampled."""
    if not trajectory.versions:
        return 0
    versions, lengths = (
        torch.tensor(column, dtype=torch.int64) for column in zip(*trajectory.versions, strict=True)
    )
    stale = (versions != NOT_SAMPLED) & (versions <= newest - age)
    trajectory.loss_mask = trajectory.loss_mask & ~stale.repeat_interleave(lengths)
    return int(lengths[stale].sum())
