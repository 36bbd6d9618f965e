"""How a trajectory ended, and what that makes of it."""

from __future__ import annotations

import pytest

from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import sampled_trajectory


@pytest.mark.parametrize(
    ("reason", "truncated"), [("stop", False), ("length", True), ("abort", False)]
)
def test_only_the_limit_of_length_truncates(reason: str, truncated: bool) -> None:
    """A response that was given up was not cut at the limit: no metric and no method may take it
    for one that was."""
    made = sampled_trajectory(
        Prompt(0, "0", "", "", (1,)), 0, [2, 3], [-1.0, -1.0], finish_reason=reason
    )  # type: ignore[arg-type]
    assert made.truncated is truncated
    made.reward, made.reward_status = 1.0, "ok"
    assert RolloutBatch.from_trajectories([made]).truncated.tolist() == [truncated]


@pytest.mark.parametrize(
    ("status", "reward", "judged"),
    [
        ("ok", 0.0, True),
        ("timeout", 0.0, True),
        ("timeout", None, False),
        ("crash", None, False),
        ("pending", None, False),
    ],
)
def test_an_answer_that_ran_out_of_time_is_judged_where_it_has_a_reward(
    status: str, reward: float | None, judged: bool
) -> None:
    """So that it stays in its group; a server's has none, as it may be the server that hangs."""
    made = sampled_trajectory(Prompt(0, "0", "", "", (1,)), 0, [2], [-1.0])
    made.reward, made.reward_status = reward, status  # type: ignore[assignment]
    assert made.judged is judged
    assert RolloutBatch.from_trajectories([made]).verified.tolist() == [judged]
