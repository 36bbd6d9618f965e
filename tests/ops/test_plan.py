"""Micro-batch plans: every sample once, budgets kept, ranks in step and about equally loaded."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.errors import ConfigError
from megatron_stare.ops.plan import PlanRules, plan_micro_batches, plan_mini_batches


def quadratic(length: int) -> float:
    return length * (1 + length / 384)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), max_size=60),
    data_parallel=st.integers(1, 5),
    multiple=st.integers(1, 4),
    each=st.sampled_from([1, 4, 8]),
    packed=st.booleans(),
)
def test_what_every_plan_keeps(
    lengths: list[int], data_parallel: int, multiple: int, each: int, packed: bool
) -> None:
    rules = PlanRules(data_parallel, 64, packed, multiple, each, cost=quadratic)
    plan = plan_micro_batches(lengths, rules)
    assert sorted(i for rank in plan.ranks for micro in rank for i in micro) == list(
        range(len(lengths))
    )
    assert len(plan.ranks) == data_parallel
    assert {len(rank) for rank in plan.ranks} == {plan.micro_batches}
    assert plan.micro_batches >= 1
    assert plan.micro_batches % multiple == 0
    for rank in plan.ranks:
        for micro in filter(None, rank):
            sizes = [lengths[i] + -lengths[i] % each for i in micro]
            assert (sum(sizes) if packed else max(sizes) * len(sizes)) <= 64
    assert plan == plan_micro_batches(lengths, rules)


@given(
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=60), data_parallel=st.integers(1, 5)
)
def test_no_rank_is_ahead_by_more_than_one_sample(lengths: list[int], data_parallel: int) -> None:
    rules = PlanRules(data_parallel=data_parallel, budget=1000, packed=True, cost=quadratic)
    plan = plan_micro_batches(lengths, rules)
    work = [sum(rules.cost(lengths[i]) for micro in rank for i in micro) for rank in plan.ranks]
    assert max(work) - min(work) <= rules.cost(max(lengths)) + 1e-6


def test_long_samples_cost_more_than_their_length() -> None:
    rules = PlanRules(data_parallel=2, budget=10_000, packed=True, cost=quadratic)
    # the one long sample outweighs all short ones, which have more tokens: by length it would get
    # one of them
    for short in (8, 9, 12):
        plan = plan_micro_batches([4000] + [500] * short, rules)
        assert plan.ranks[0] == ((0,),)


def test_padded_micro_batches_are_filled_to_the_budget() -> None:
    rules = PlanRules(data_parallel=1, budget=8, packed=False)
    assert plan_micro_batches([4, 4, 4, 4], rules).ranks == (((0, 1), (2, 3)),)
    assert plan_micro_batches([2, 4, 2, 3, 2, 2], rules).ranks == (((1, 3), (0, 2, 4, 5)),)


def test_a_sample_longer_than_the_budget_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"batch.micro_batch_tokens: the longest sample has 65 tokens, the budget"
    ):
        plan_micro_batches([3, 65], PlanRules(data_parallel=1, budget=64, packed=True))
    with pytest.raises(
        ConfigError, match="the longest sample has 64 tokens, padded to a multiple of 8, the budget"
    ):
        plan_micro_batches([3, 57], PlanRules(data_parallel=1, budget=63, packed=True, each=8))


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=12, max_size=12),
    data_parallel=st.integers(1, 3),
    multiple=st.integers(1, 2),
    prompts=st.sampled_from([1, 2, 3, None]),
)
def test_mini_batches_are_planned_one_by_one(
    lengths: list[int], data_parallel: int, multiple: int, prompts: int | None
) -> None:
    rules = PlanRules(
        data_parallel,
        64,
        packed=True,
        multiple=multiple,
        cost=quadratic,
        mini_batch_prompts=prompts,
    )
    size = 2 * (prompts or 6)  # two samples a prompt
    plan = plan_mini_batches(lengths, [i // 2 for i in range(12)], rules)
    assert len(plan.mini_batches) == 12 // size
    for number, where in enumerate(plan.mini_batches):
        mine = lengths[number * size : (number + 1) * size]
        alone = plan_micro_batches(mine, rules)
        for rank, micro_batches in enumerate(plan.ranks):
            found = tuple(
                tuple(sample - number * size for sample in micro) for micro in micro_batches[where]
            )
            assert found == alone.ranks[rank]
        assert plan.branches(number) == list(range(number * size, (number + 1) * size))


@pytest.mark.parametrize("seed", range(20))
def test_packing_is_first_fit_whichever_micro_batches_are_full(seed: int) -> None:
    """The first that has room, in the order in which they were opened: as gone over without any
    left out."""
    drawn = random.Random(seed)
    lengths = [drawn.randint(1, 60) for _ in range(80)] + [60, 60, 1]
    plan = plan_micro_batches(lengths, PlanRules(data_parallel=1, budget=64, packed=True))
    expected: list[list[int]] = []
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        room = [sum(lengths[i] for i in each) + lengths[sample] <= 64 for each in expected]
        if True not in room:
            expected.append([])
            room.append(True)
        expected[room.index(True)].append(sample)
    assert plan.ranks == (tuple(tuple(sorted(each)) for each in expected),)
