"""Trajectories laid end to end, and what each data rank is given of them."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.errors import DataError
from megatron_stare.megatron.batching.microbatch import RankBatch
from megatron_stare.megatron.batching.sequence_layout import (
    SequenceLayout,
    SplitSequences,
    WholeSequences,
)
from megatron_stare.megatron.batching.zigzag import Zigzag
from megatron_stare.ops.plan import PlanRules, plan_mini_batches
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import NOT_SAMPLED, Trajectory, sampled_trajectory
from megatron_stare.rollout.agreement.agreement import canary_batch

CPU = torch.device("cpu")
GROUP = 2


def two_turns(prompt: Prompt, index: int, length: int) -> Trajectory:
    """Trajectory of `length` tokens: the second third is an observation, the last third is by newer
    weights."""
    third = length // 3
    made = sampled_trajectory(
        prompt, index, range(100 * index + 10, 100 * index + 10 + length), [-0.5] * length
    )
    made.loss_mask[third : 2 * third] = False
    made.log_probs[third : 2 * third] = 0.0
    made.versions = (
        ((4, third), (NOT_SAMPLED, third), (5, length - 2 * third)) if third else ((5, length),)
    )
    made.reward, made.reward_status = float(index), "ok"
    return made


def batch_of(lengths: list[int]) -> RolloutBatch:
    """Groups of two, given out of order; judged."""
    made = []
    for i, length in enumerate(lengths):
        prompt = Prompt(i // GROUP + 7, str(i), "", "", tuple(range(1, 3 + i // GROUP)))
        made.append(two_turns(prompt, i % GROUP, length))
    return Grpo().judge(RolloutBatch.from_trajectories(reversed(made), step=3))


def rules(ranks: int, *, packed: bool = True, mini_batch: int | None = None) -> PlanRules:
    return PlanRules(
        data_parallel=ranks, budget=10**6, packed=packed, mini_batch_prompts=mini_batch
    )


def plan(batch: RolloutBatch, of: PlanRules):
    return plan_mini_batches(batch.lengths.tolist(), batch.groups.tolist(), of)


def test_columns_in_canonical_order() -> None:
    batch = batch_of([3, 0, 4])
    assert batch.tokens.tolist() == [1, 2, 10, 11, 12, 1, 2, 1, 2, 3, 10, 11, 12, 13]
    assert batch.tokens.dtype == torch.int32
    assert batch.prompt_lengths.tolist() == [2, 2, 3] and batch.response_lengths.tolist() == [
        3,
        0,
        4,
    ]
    assert batch.loss_mask.tolist() == [True, False, True, True, False, True, True]
    assert batch.loss_lengths.tolist() == [2, 0, 3]
    assert batch.weight_versions.tolist() == [4, NOT_SAMPLED, 5, 4, NOT_SAMPLED, 5, 5]
    assert batch.runs.tolist() == [3, 1, 3]
    assert batch.groups.tolist() == [0, 0, 1] and batch.rewards.tolist() == [0.0, 1.0, 0.0]
    assert (batch.size, batch.step) == (3, 3)


def test_what_has_no_reward_counts_as_0_and_is_not_verified() -> None:
    one, other = (two_turns(Prompt(0, "p", "", "", (1,)), index, 3) for index in (0, 1))
    one.reward, one.reward_status = None, "crash"
    batch = RolloutBatch.from_trajectories([one, other])
    assert batch.rewards.tolist() == [0.0, 1.0] and batch.verified.tolist() == [False, True]


def test_a_batch_that_is_of_no_step_is_of_step_0() -> None:
    assert RolloutBatch.from_trajectories([two_turns(Prompt(0, "p", "", "", (1,)), 0, 3)]).step == 0
    assert canary_batch([[1, 2, 3]]).step == 0


@pytest.mark.parametrize("column", ["log_probs", "loss_mask", "versions"])
def test_columns_that_do_not_belong_together_are_refused(column: str) -> None:
    broken = two_turns(Prompt(0, "p", "", "", (1,)), 0, 6)
    setattr(broken, column, getattr(broken, column)[:-1])
    with pytest.raises(DataError, match="prompt p, sample 0"):
        RolloutBatch.from_trajectories([broken])


def test_a_cursor_is_of_one_prompt() -> None:
    """A group's prompt is kept once: another of the same cursor would be trained on in its
    place."""
    one, other = (
        two_turns(Prompt(4, "p", "", "", ids), index, 3)
        for index, ids in enumerate([(1, 2), (1, 3)])
    )
    with pytest.raises(DataError, match="cursor 4"):
        RolloutBatch.from_trajectories([one, other])
    other.prompt = Prompt(4, "p", "", "", (1, 2))
    assert RolloutBatch.from_trajectories([one, other]).size == 2


def test_the_first_samples() -> None:
    batch = batch_of([3, 5, 4, 9])
    want = batch_of([3, 5])
    got = batch.first(2)
    assert [t.sample_index for t in got.trajectories] == [t.sample_index for t in want.trajectories]
    for name, column in vars(replace(want, trajectories=())).items():
        got = replace(got, trajectories=())
        same = (
            torch.equal(getattr(got, name), column)
            if isinstance(column, Tensor)
            else getattr(got, name) == column
        )
        assert same, name


def test_a_share_has_the_tokens_of_its_own_samples_alone() -> None:
    batch = batch_of([3, 5, 4, 9, 0, 6])
    share = batch.share([1, 4, 5])
    second, last_two = batch.tokens[5:12], batch.tokens[-(4 + 0 + 4 + 6) :]
    assert torch.equal(share.tokens, torch.cat([second, last_two]))
    assert share.loss_mask.tolist() == [
        True,
        False,
        True,
        True,
        True,
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    assert share.weight_versions.tolist() == [4, -1, 5, 5, 5, 4, 4, -1, -1, 5, 5]
    assert share.starts(share.response_lengths).tolist() == [0, 0, 0, 0, 5, 5]
    assert share.loss_lengths.tolist() == batch.loss_lengths.tolist()  # of all, as N and means are


def test_bytes_of_a_share_fall_with_the_data_ranks() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = batch_of(torch.randint(1000, 5000, (128,), generator=generator).tolist())
    whole = len(pickle.dumps(batch.share(range(128))))
    for ranks in (1, 2, 4, 8):
        cut = plan(batch, rules(ranks))
        sizes = [len(pickle.dumps(batch.share(cut.branches_of(rank)))) for rank in range(ranks)]
        assert max(sizes) <= 1.1 * whole / ranks, ranks
        assert sum(sizes) >= whole  # nothing is lost


def layouts(context: int, packed: bool) -> list[SequenceLayout]:
    """Layouts of every rank that a sequence lies on."""
    if context == 1:
        return [WholeSequences(packed=packed, multiple=2)]
    sizes = {"packed": packed, "multiple": 4 * context, "each": 2 * context}
    return [SplitSequences(**sizes, place=Zigzag(rank, context)) for rank in range(context)]


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=9),
    ranks=st.integers(1, 4),
    packed=st.booleans(),
    mini_batch=st.sampled_from([None, 1, 2]),
    context=st.integers(1, 3),
)
def test_every_position_of_the_loss_mask_lies_on_one_rank(
    lengths, ranks, packed, mini_batch, context
) -> None:
    batch = batch_of(lengths)
    cut = plan(batch, rules(ranks, packed=packed, mini_batch=mini_batch))
    seen = []
    starts = batch.lengths.cumsum(0) - batch.response_lengths  # of responses among the tokens
    sequence = torch.repeat_interleave(torch.arange(batch.size), batch.response_lengths)
    for rank in range(ranks):
        share = batch.share(cut.branches_of(rank))
        for layout in layouts(context, packed):
            here = RankBatch(share, cut, rank, CPU, layout)
            tokens = here.token_batch(torch.zeros(len(here.index)), torch.zeros(len(here.index)))
            seen.append(here.index)
            assert torch.equal(here.sequence, sequence[here.index])
            targets = torch.cat([micro.targets for micro in here.micro_batches])
            assert torch.equal(targets, batch.tokens[starts[here.sequence] + here.position].long())
            assert torch.equal(tokens.rollout_log_prob, batch.rollout_log_probs[here.index])
            assert torch.equal(share.weight_versions[here.held], batch.weight_versions[here.index])
            for micro in here.micro_batches:  # the row before a target is fed the token before it
                fed, place = (
                    micro.tokens.flatten()[micro.rows],
                    micro.positions.flatten()[micro.rows],
                )
                sample = here.sequence[micro.span]
                assert torch.equal(
                    fed,
                    batch.tokens[(batch.lengths.cumsum(0) - batch.lengths)[sample] + place].long(),
                )
                assert torch.equal(
                    place, batch.prompt_lengths[sample] + here.position[micro.span] - 1
                )
    assert torch.equal(torch.cat(seen).sort().values, batch.loss_mask.nonzero().squeeze(1))


def test_a_share_of_another_rank_is_refused() -> None:
    batch = batch_of([3, 5, 4, 9])
    cut = plan(batch, rules(2))
    with pytest.raises(ValueError, match="data rank 0 was given the share of another"):
        RankBatch(batch.share(cut.branches_of(1)), cut, 0, CPU, WholeSequences())


def test_ranks_read_the_judgement_of_the_driver() -> None:
    """And do not judge again: columns that no method would give are obeyed."""
    batch = replace(
        batch_of([3, 6, 4, 9]),
        advantages=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64),
        carries_loss=torch.tensor([True, False, True, False]),
        penalties=torch.tensor([0.0, -1.0, 0.0, -2.0], dtype=torch.float64),
    )
    cut = plan(batch, rules(1, mini_batch=1))
    here = RankBatch(batch.share(range(4)), cut, 0, CPU, WholeSequences(packed=True))
    tokens = here.token_batch(torch.zeros(len(here.index)), torch.zeros(len(here.index)))
    assert tokens.advantage.tolist() == [1.0] * 2 + [2.0] * 4 + [3.0] * 3 + [4.0] * 6
    assert tokens.loss_mask.tolist() == [True] * 2 + [False] * 4 + [True] * 3 + [False] * 6
    assert tokens.sequence_lengths is not None and tokens.sequence_lengths.tolist() == [2, 0, 3, 0]
    assert tokens.num_sequences == 2
    assert tokens.penalties is not None and tokens.penalties.tolist() == [0.0, -1.0, 0.0, -2.0]
    second = here.tokens_of(1, tokens)
    assert second.loss_mask.tolist() == [False] * 6 + [True] * 3 + [False] * 6
    assert second.sequence_lengths is not None and second.sequence_lengths.tolist() == [0, 0, 3, 0]
