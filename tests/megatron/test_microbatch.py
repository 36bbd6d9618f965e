"""Ranks tell methods of their part of a batch: positions, masks, lengths, how many responses carry
loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_methods_in_training import MINI_BATCH, batch_of
from torch import Tensor

from megatron_stare.megatron.batching import sequence_layout
from megatron_stare.megatron.batching.microbatch import RankBatch
from megatron_stare.megatron.batching.sequence_layout import WholeSequences
from megatron_stare.ops.plan import PlanRules, plan_mini_batches

DATA = 2


def test_rows_of_hidden_states_that_are_whole_or_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of [s, b, h] are taken by their number in [b s]. Where each rank holds some of the
    positions, rows are taken from those of all ranks."""
    hidden = torch.arange(24.0).view(4, 3, 2)
    both = torch.cat([hidden, hidden + 100])
    monkeypatch.setattr(sequence_layout, "copy_to_tensor_model_parallel_region", lambda x: x)
    monkeypatch.setattr(sequence_layout, "gather_from_sequence_parallel_region", lambda x: both)
    for layout, whole in ((WholeSequences(), hidden), (WholeSequences(cut=True), both)):
        rows = torch.tensor([0, 3, 5, 3 * len(whole) - 1])
        torch.testing.assert_close(
            layout.rows(hidden, rows), whole.transpose(0, 1).reshape(-1, 2)[rows]
        )


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_what_a_gpu_copies_from_is_pinned(
    monkeypatch: pytest.MonkeyPatch, routed: bool, packed: bool
) -> None:
    """Every tensor that travels, the experts with them; what is not there is still not there."""
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self) or self.clone())
    batch = replace(
        batch_of(1), advantages=torch.zeros(len(batch_of(1).lengths), dtype=torch.float64)
    )
    if routed:
        batch = replace(
            batch, experts=torch.zeros(int(batch.lengths.sum()), 2, 1, dtype=torch.uint8)
        )
    rules = PlanRules(data_parallel=1, budget=24, packed=packed)
    plan = plan_mini_batches(batch.lengths.tolist(), batch.groups.tolist(), rules)
    share = batch.share(plan.branches_of(0))
    micro = RankBatch(
        share, plan, 0, torch.device("cpu"), WholeSequences(packed=packed)
    ).micro_batches[0]
    assert not pinned  # a CPU has nothing to copy to
    copy = micro.pinned()
    for name in ("tokens", "positions", "rows", "targets", *(["experts"] if routed else [])):
        before, after = getattr(micro, name), getattr(copy, name)
        assert (
            any(before is each for each in pinned)
            and before is not after
            and torch.equal(before, after)
        )
    assert (copy.experts is None) == (not routed) and (copy.packing is None) == (
        micro.packing is None
    )


def test_tool_observations_and_failed_answers_carry_no_loss() -> None:
    batch = batch_of(1)
    rules = PlanRules(data_parallel=DATA, budget=24, packed=True, mini_batch_prompts=MINI_BATCH)
    plan = plan_mini_batches(batch.lengths.tolist(), batch.groups.tolist(), rules)
    carries, judged_against = batch.verified & ~batch.truncated, batch.verified
    batch = replace(
        batch,
        advantages=torch.arange(batch.size, dtype=torch.float64),
        carries_loss=carries,
        baseline_mask=judged_against,
        penalties=torch.full((batch.size,), -0.25, dtype=torch.float64),
    )
    lengths = [
        int(x.sum()) if carry else 0
        for x, carry in zip(
            batch.loss_mask.split(batch.response_lengths.tolist()), carries.tolist(), strict=True
        )
    ]
    assert 0 < lengths.count(0) < batch.size
    starts = (batch.response_lengths.cumsum(0) - batch.response_lengths).tolist()
    seen: list[int] = []
    for rank in range(DATA):
        share = batch.share(plan.branches_of(rank))
        part = RankBatch(share, plan, rank, torch.device("cpu"), WholeSequences(packed=True))
        scores = torch.zeros(len(part.index))
        tokens = part.token_batch(scores, scores)
        seen += tokens.index.tolist()
        rows = list(
            zip(
                tokens.index.tolist(),
                tokens.sequence.tolist(),
                tokens.position.tolist(),
                strict=True,
            )
        )
        assert all(index == starts[sample] + position for index, sample, position in rows)
        assert tokens.loss_mask.tolist() == [bool(carries[sample]) for _, sample, _ in rows]
        assert tokens.in_baseline.tolist() == [
            bool(judged_against[sample]) for _, sample, _ in rows
        ]
        assert tokens.advantage.tolist() == [float(sample) for _, sample, _ in rows]
        assert tokens.num_sequences == sum(n > 0 for n in lengths)
        assert tokens.sequence_lengths is not None and tokens.sequence_lengths.tolist() == lengths
        assert tokens.penalties is not None and tokens.penalties.tolist() == [-0.25] * batch.size
        for number in range(2):
            mine = set(plan.branches(number))
            assert {int(batch.groups[i]) // MINI_BATCH for i in mine} == {number}
            few = part.tokens_of(number, tokens)
            assert few.loss_mask.tolist() == [
                bool(carries[sample]) and sample in mine for _, sample, _ in rows
            ]
            want = [n if i in mine else 0 for i, n in enumerate(lengths)]
            assert few.sequence_lengths is not None and few.sequence_lengths.tolist() == want
            assert few.num_sequences == sum(n > 0 for n in want)
            judged = [bool(judged_against[sample]) and sample in mine for _, sample, _ in rows]
            assert few.in_baseline.tolist() == judged
            same = replace(
                few,
                loss_mask=tokens.loss_mask,
                baseline_mask=tokens.baseline_mask,
                sequence_lengths=tokens.sequence_lengths,
                num_sequences=0,
            )
            # nothing else is the mini-batch's own
            assert vars(same) == vars(replace(tokens, num_sequences=0))
    # every sampled token on one rank
    assert sorted(seen) == batch.loss_mask.nonzero().squeeze(1).tolist()
