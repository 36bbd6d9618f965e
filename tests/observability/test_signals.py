"""The signals of reward hacking against numbers worked out by hand."""

import math
import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_stare.observability.metrics.reward_hacking import (
    FEW_TOKENS,
    hacking_signals,
    length_reward_correlation,
    repetition,
    tokens_before_answer,
)
from megatron_stare.observability.metrics.step_metrics import degenerate_share
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import sampled_trajectory


def sample(length=4, reward=1.0, text="", answer_at=None, status="ok", ids=None):
    ids = list(range(length)) if ids is None else ids
    made = sampled_trajectory(Prompt(0, "0", "", ""), 0, ids, [0.0] * len(ids))
    made.text, made.reward, made.reward_status, made.answer_at = text, reward, status, answer_at
    return made


def test_length_and_reward():
    # lengths 1, 2, 3, 6 (mean 3), rewards 0, 0, 1, 1: covariance sum 1 + 0.5 + 0 + 1.5, squares 14
    # and 1
    lengths, rewards = (1, 2, 3, 6), (0.0, 0.0, 1.0, 1.0)
    samples = [sample(n, r) for n, r in zip(lengths, rewards, strict=True)]
    assert length_reward_correlation(samples) == pytest.approx(3 / math.sqrt(14))
    assert math.isnan(length_reward_correlation([sample(3, 1.0), sample(5, 1.0)]))
    assert math.isnan(length_reward_correlation([sample()]))


@pytest.mark.parametrize(
    ("responses", "share"),
    [
        ([[1, 2, 3, 4, 5, 6]], 0.0),
        ([[1, 2, 1, 2, 1, 2, 1, 2]], 3 / 5),  # 1212, 2121, 1212, 2121, 1212: three seen before
        ([[7] * 10], 6 / 7),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 0.0),  # between responses nothing is a repeat
        ([[7] * 5, [1, 2, 3, 4], [1]], 1 / 3),
    ],
)
def test_repetition(responses, share):
    assert repetition(columns(responses)) == pytest.approx(share)


def columns(responses):
    return [torch.tensor(ids, dtype=torch.int32) for ids in responses]


@given(
    st.lists(st.lists(st.sampled_from([0, 1, 2, 151_000, 2**31 - 1]), max_size=40), max_size=4),
    st.integers(1, 6),
)
def test_repetition_equals_counting_tuples(responses, n):
    """Ids of a large vocabulary: n of them do not fit in 64 bits."""
    grams = [[tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)] for ids in responses]
    total = sum(map(len, grams))
    got = repetition(columns(responses), n)
    assert (
        got == (total - sum(len(set(each)) for each in grams)) / total if total else math.isnan(got)
    )


def test_repetition_of_a_large_batch_takes_the_memory_of_a_response():
    """A batch may have a hundred million tokens."""
    draw = torch.Generator().manual_seed(1)
    responses = [torch.randint(0, 50, (20_000,), generator=draw) for _ in range(50)]
    tracemalloc.start()
    try:
        assert 0 < repetition(responses) < 1
        assert tracemalloc.get_traced_memory()[1] < 8 * 20_000 * 20
    finally:
        tracemalloc.stop()


def test_repetition_in_a_response_of_a_large_vocabulary():
    """Half of it is a copy: hashes of equal n-grams are equal, of others different."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 152_000, (10_000,), generator=draw, dtype=torch.int32)
    assert repetition([torch.cat([ids, ids])]) == (10_000 - 3) / (20_000 - 3)


def test_responses_are_counted_beside_each_other():
    """8,192 responses one after the other would keep all GPUs waiting for seconds."""
    both = threading.Barrier(2, timeout=20)

    class Waiting:
        def __len__(self):
            return 4

        def numpy(self):
            both.wait()  # until the other one is counted, too
            return np.arange(4)

    assert repetition([Waiting(), Waiting()]) == 0


def test_no_n_grams():
    assert math.isnan(repetition(columns([[1, 2, 3], []])))


def test_tokens_before_the_answer():
    assert tokens_before_answer(sample(10, text="x" * 40, answer_at=20)) == 5.0
    assert tokens_before_answer(sample(10, text="x" * 40, answer_at=0)) == 0.0


def test_a_step():
    straight, worked = FEW_TOKENS - 1, FEW_TOKENS
    samples = [
        sample(20, 1.0, "x" * 20, straight),
        sample(30, 1.0, "x" * 30, worked),
        sample(40, 0.0, "x" * 40, 0),  # wrong: how it came about is not asked
        sample(60, 0.0, "x" * 60, -1),
        sample(25, 1.0, "x" * 25, -1),  # a verifier may pay for what its parser does not find
        sample(99, None, status="timeout"),
    ]
    signals = hacking_signals(samples)
    assert signals["signal/length_right"] == 25
    assert signals["signal/length_wrong"] == 50
    assert signals["signal/format"] == 3 / 5
    assert signals["signal/no_reasoning"] == 1 / 2
    assert signals["signal/repetition"] == 0
    assert signals["signal/length_reward"] < 0


def test_a_verifier_that_does_not_say_where_the_answer_stands():
    signals = hacking_signals([sample(), sample(reward=0.0)])
    assert signals.keys() == {
        f"signal/{n}" for n in ("length_reward", "length_right", "length_wrong", "repetition")
    }


def test_nothing_was_scored():
    signals = hacking_signals([sample(3, None, status="crash")])
    assert all(math.isnan(value) for value in signals.values())


def test_groups_that_teach_nothing():
    """Three of four groups teach nothing. Rewards are all one in the first, differ in the second,
    differ without a verdict on one of them in the third, and have no verdict at all in the
    fourth."""
    rewards = {0: [1.0, 1.0], 1: [0.0, 1.0], 2: [0.0, 1.0], 3: [0.0, 1.0]}
    unknown = {(2, 1), (3, 0), (3, 1)}
    batch = RolloutBatch.from_trajectories(
        replace(
            sample(reward=reward, status="crash" if (cursor, index) in unknown else "ok"),
            prompt=Prompt(cursor, str(cursor), "", ""),
            sample_index=index,
        )
        for cursor, group in rewards.items()
        for index, reward in enumerate(group)
    )
    assert degenerate_share(batch) == 3 / 4
