"""Rewards, advantages and prompts worth keeping, on random batches with failed verifiers and
truncated responses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.shaped_by_hand import advantages, penalties

from megatron_stare.algorithms.policy import PolicyGradient
from megatron_stare.algorithms.shaping import LengthPenalty, informative_groups
from megatron_stare.config.load import build_method
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import Trajectory, sampled_trajectory

BATCHES = 30
SETTINGS: dict[str, dict[str, Any]] = {
    "grop": {"name": "grpo", "length_penalty": {"easy_from": 0.75}},
    "grop, medium": {"name": "grpo", "length_penalty": {"easy_from": 0.9}, "truncated": "drop"},
    "overlong": {
        "name": "grpo",
        "overlong": {"max_length": 40, "cache": 15, "factor": 0.5},
        "truncated": "mask",
    },
}


def batch_of(seed: int) -> RolloutBatch:
    """Prompts of one to eight responses; a failed answer stands with a reward that would count if
    it were read."""
    generator = torch.Generator().manual_seed(seed)

    def chance(p: float) -> bool:
        return bool(torch.rand((), generator=generator) < p)

    samples: list[Trajectory] = []
    for cursor, size in enumerate(torch.randint(1, 9, (5,), generator=generator).tolist()):
        prompt, solved = Prompt(cursor, str(cursor), "", "", (1,)), 0.2 + 0.2 * cursor
        for number in range(size):
            n = int(torch.randint(1, 41, (), generator=generator))
            finish = "length" if chance(0.2) else "stop"
            sample = sampled_trajectory(prompt, number, [2] * n, [0.0] * n, finish_reason=finish)  # type: ignore[arg-type]
            sample.reward, sample.reward_status = (
                float(chance(solved)),
                "crash" if chance(0.25) else "ok",
            )
            samples.append(sample)
    return RolloutBatch.from_trajectories(samples)


@pytest.mark.parametrize("case", SETTINGS)
def test_rewards_and_advantages_equal_those_by_hand(case: str) -> None:
    method = build_method(SETTINGS[case])
    assert isinstance(method, PolicyGradient)
    punished = 0
    for seed in range(BATCHES):
        batch = batch_of(seed)
        want = batch.rewards + penalties(SETTINGS[case], batch)
        judged = method.baseline_mask(batch)
        torch.testing.assert_close(method.shaped_rewards(batch)[judged], want[judged])
        torch.testing.assert_close(
            method.judge(batch).advantages, advantages(SETTINGS[case], batch)
        )
        punished += int((want != batch.rewards)[judged].sum())
    assert punished > BATCHES


def test_half_is_taken_from_twice_the_typical_length_on() -> None:
    """L = max((0 + 8) / 2, 4) = 4 over an empty answer and one of 8 = 2 L."""
    two, yes = torch.tensor([0, 8]), torch.ones(2, dtype=torch.bool)
    assert LengthPenalty().penalty(two, yes, torch.zeros(2, dtype=torch.int64), yes).tolist() == [
        0.0,
        -0.5,
    ]


def test_half_a_reward_is_a_correct_answer_unless_told_otherwise() -> None:
    """Easy, L = max((10 + 30) / 2, 20) = 20: the long answer loses (30 - 20) / 40."""
    prompt = Prompt(0, "0", "", "", (1,))
    samples = [
        sampled_trajectory(prompt, i, [2] * n, [0.0] * n, finish_reason="stop")
        for i, n in enumerate((10, 30))
    ]
    for sample in samples:
        sample.reward, sample.reward_status = 0.5, "ok"
    batch = RolloutBatch.from_trajectories(samples)
    for settings, want in (({}, [0.5, 0.25]), ({"correct_from": 0.6}, [0.5, 0.5])):
        method = build_method({"name": "grpo", "length_penalty": settings})
        assert isinstance(method, PolicyGradient)
        assert method.shaped_rewards(batch).tolist() == want


def test_prompts_worth_keeping_are_told_by_verified_answers() -> None:
    for seed in range(BATCHES):
        batch = batch_of(seed)
        rewards = [batch.rewards[batch.verified & (batch.groups == group)] for group in range(5)]
        kept = informative_groups(batch.rewards, batch.groups, batch.verified)
        assert kept.tolist() == [len(x.unique()) > 1 for x in rewards]
