"""How old a batch's tokens are, and which of them carry no loss for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_stare.errors import WeightVersionError
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import NOT_SAMPLED, Trajectory
from megatron_stare.rollout.sources.ages import Ages, ages_of, check_ages


def of(*versions: tuple[int, int], cursor: int = 0, silent: tuple[int, ...] = ()) -> Trajectory:
    """Its environment's words carry no loss, nor do the tokens at `silent`."""
    n = sum(tokens for _, tokens in versions)
    mask = torch.tensor(
        [version != NOT_SAMPLED for version, tokens in versions for _ in range(tokens)]
    )
    mask[list(silent)] = False
    prompt = Prompt(cursor, str(cursor), "", "", (1, 2))
    return Trajectory(
        prompt,
        0,
        torch.arange(n, dtype=torch.int32),
        torch.zeros(n),
        mask,
        versions,
        "stop",
        reward=1.0,
    )


def test_tokens_of_a_wrong_age_are_refused() -> None:
    ages = ages_of([of((3, 5), (NOT_SAMPLED, 9), (4, 2)), of((4, 1), (5, 0))], 5)
    assert ages == {2: 5, 1: 3}
    check_ages(ages, 2, 6)
    check_ages(ages, None, 6)
    with pytest.raises(
        WeightVersionError, match=r"step 6 may train on .* but there are 5 tokens of age 2"
    ):
        check_ages(ages, 1, 6)
    for bound in (3, None):
        with pytest.raises(WeightVersionError, match="1 tokens of age -1"):
            check_ages({-1: 1, 0: 4}, bound, 6)


@pytest.mark.parametrize(
    ("masked_from", "first", "second", "share"),
    [
        (1, "0000" + "0" + "000" + "11", "0011", 7 / 11),
        (2, "0000" + "1" + "000" + "11", "1011", 4 / 11),
        (3, "1111" + "1" + "000" + "11", "1011", 0.0),
    ],
)
def test_stale_tokens_lose_their_loss_and_keep_their_place(
    masked_from: int, first: str, second: str, share: float
) -> None:
    """At step 9, which trains version 8; an observation of three tokens stands behind the first
    five."""
    one, other = (
        of((6, 4), (7, 1), (NOT_SAMPLED, 3), (8, 2)),
        of((7, 2), (8, 2), cursor=1, silent=(1,)),
    )
    metrics = Ages(None, masked_from).settle([one, other], 9)
    marked = ["".join(str(int(x)) for x in t.loss_mask) for t in (one, other)]
    assert marked == [first, second]
    # by what sampled them, whether or not their environment had given them a loss
    assert metrics["staleness/masked"] == pytest.approx(share)
    assert (
        metrics["staleness/mean_age"] == pytest.approx((4 * 2 + 3 * 1) / 11)
        and metrics["staleness/max_age"] == 2
    )
    batch = RolloutBatch.from_trajectories([one, other])
    assert batch.response_lengths.tolist() == [10, 4]
    assert batch.loss_lengths.tolist() == [first.count("1"), second.count("1")]


def test_without_a_mask_the_loss_is_left_alone() -> None:
    one: Any = of((3, 4), (5, 2))
    before = one.loss_mask
    assert Ages(2).settle([one], 6) == {
        "staleness/mean_age": pytest.approx(8 / 6),
        "staleness/max_age": 2,
    }
    assert one.loss_mask is before
    empty = of()
    assert Ages(0, 1).settle([empty], 6) == {
        "staleness/mean_age": 0.0,
        "staleness/max_age": 0,
        "staleness/masked": 0.0,
    }
