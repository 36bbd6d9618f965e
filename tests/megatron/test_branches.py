"""Responses of several branches: cut by hand where nothing is rewritten, they train as uncut
ones."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import ROOT
from support.steps import plan_of

from megatron_stare.algorithms import METHODS
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.config.load import build_method
from megatron_stare.driver.checkpoint_proof import canary_of
from megatron_stare.driver.guards import read_guarded, step_folder, write_guarded
from megatron_stare.errors import DataError
from megatron_stare.megatron.batching.microbatch import RankBatch
from megatron_stare.megatron.batching.sequence_layout import WholeSequences
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import Branch, sampled_trajectory

sys.path.insert(0, str(ROOT / "tools"))


def of(module: str, *names: str) -> list[Any]:
    """These names of a tool's module."""
    return [getattr(importlib.import_module(module), name) for name in names]


Case, fixed_batch, write_model = of("invariance.case", "Case", "fixed_batch", "write_model")
(compare,) = of("invariance.compare", "compare")
take, ALGORITHMS, LAYOUTS = (
    *of("invariance.step", "take"),
    *of("invariance.table", "ALGORITHMS", "LAYOUTS"),
)
(rank_processes,) = of("rank_processes", "rank_processes")
COUPLED = [name for name in ALGORITHMS if build_method(ALGORITHMS[name]).coupling == "sequence"]
APART = [name for name in ALGORITHMS if name not in COUPLED]
FIRST = ("tp2 sp", "pp2 vpp2", "dp2", "cp2 pp2")  # the other layouts are of the slow tests
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    with rank_processes(4) as processes:
        yield processes


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize("name", [name for name in APART if not name.startswith("stare C")])
def test_a_method_trains_on_branches_as_on_the_whole_response(
    name: str, pool: Any, tmp_path: Path
) -> None:
    """Selections, loss, gradients, weights, over two data ranks and small micro-batches, where a
    response's branches lie on different ranks."""
    write_model(tmp_path)
    case = Case(ALGORITHMS[name], off_policy=0.5, parallel={"data": 2}, budget=64, branches=True)
    whole = take(pool, case.alone(), str(tmp_path), None)
    found = compare(whole, take(pool, case, str(tmp_path), whole["scores"]))
    assert found.faults == []
    assert found.selected > 0 or "stare" not in name or "closed" in name


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "packed"),
    [
        pytest.param(
            layout, packed, marks=pytest.mark.wide if layout in FIRST else pytest.mark.slow
        )
        for layout in LAYOUTS
        for packed in (True, False)
    ],
)
def test_stare_trains_on_branches_in_every_layout(
    layout: str, packed: bool, pool: Any, tmp_path: Path
) -> None:
    write_model(tmp_path)
    algorithm, cut = ALGORITHMS["stare C2, gate by sample"], {"budget": 64, "packed": packed}
    case = Case(algorithm, off_policy=0.5, parallel=LAYOUTS[layout], branches=True, **cut)
    whole = take(pool, case.alone(), str(tmp_path), None)
    found = compare(whole, take(pool, case, str(tmp_path), whole["scores"]))
    assert found.faults == [] and found.selected > 0


def test_branches_lie_on_several_ranks() -> None:
    """Else the tests above would show little."""
    batch = fixed_batch(1, branches=True)
    assert batch.branched is not None and batch.branches.size > batch.size
    case = Case(ALGORITHMS["stare"], parallel={"data": 2}, budget=64)
    plan = plan_of(case.config(str(ROOT / "assets/tiny-adder")), batch)
    ranks = [{int(batch.branches.samples[i]) for i in plan.branches_of(r)} for r in range(2)]
    assert ranks[0] & ranks[1]


@pytest.mark.parametrize("name", COUPLED)
def test_a_method_that_couples_tokens_is_refused(name: str) -> None:
    assert {"gspo", "grpo_s"} <= METHODS.keys()
    with pytest.raises(DataError, match="several branches"):
        build_method(ALGORITHMS[name]).judge(fixed_batch(1, branches=True))


def rewritten() -> RolloutBatch:
    """A response whose second branch has a history of its own, and one of a single branch."""
    prompt = Prompt(3, "p", "", "", (1, 2, 3))
    first = sampled_trajectory(prompt, 0, [10, 11, 12, 13, 14, 15, 16], [-0.5] * 7)
    first.branches = [Branch(3, (1, 2, 50)), Branch(5, (60,)), Branch(7, (70, 71))]
    first.versions = ((1, 4), (2, 3))
    first.loss_mask[4] = False
    second = sampled_trajectory(prompt, 1, [20, 21], [-0.5] * 2)
    for reward, each in enumerate((first, second)):
        each.reward, each.reward_status = float(reward), "ok"
    return RolloutBatch.from_trajectories([second, first], step=2)


def test_each_token_is_in_one_branch_after_its_own_context() -> None:
    """The last branch has no tokens and is left out."""
    batch = rewritten()
    first = [1, 2, 3, 10, 11, 12], [1, 2, 50, 13, 14], [60, 15, 16]
    assert batch.tokens.tolist() == [token for part in first for token in part] + [1, 2, 3, 20, 21]
    branches = batch.branches
    assert branches.samples.tolist() == [0, 0, 0, 1]
    assert branches.contexts.tolist() == [3, 3, 1, 3]
    assert branches.responses.tolist() == [3, 2, 2, 2]
    assert branches.starts.tolist() == [0, 3, 5, 0]
    assert batch.lengths.tolist() == [6, 5, 3, 5]
    assert batch.response_lengths.tolist() == [7, 2] and batch.prompt_lengths.tolist() == [3, 3]
    assert batch.loss_lengths.tolist() == [6, 2] and batch.size == 2
    assert batch.runs.tolist() == [1, 2, 1, 1]
    assert batch.run_versions.tolist() == [1, 1, 2, 2, 0]
    assert batch.run_lengths.tolist() == [3, 1, 1, 2, 2]


def after_another_context() -> RolloutBatch:
    """Two responses, all of whose tokens come after contexts of their own, which are as long as the
    prompt; one after the prompt; and one without any token."""
    prompt = Prompt(3, "p", "", "", (1, 2, 3))
    made = [
        sampled_trajectory(prompt, number, ids, [-0.5] * len(ids))
        for number, ids in enumerate([[10, 11, 12], [20, 21], [30, 31], []])
    ]
    made[0].branches = [Branch(0, (4, 5, 6)), Branch(2, (7,))]
    made[1].branches = [Branch(0, (8, 9, 40))]
    made[3].branches = [Branch(0, (50, 51))]
    for reward, each in enumerate(made):
        each.reward, each.reward_status = float(reward), "ok"
    return RolloutBatch.from_trajectories(made, step=2)


def test_a_first_branch_without_tokens_is_left_out() -> None:
    """Unless the response has no token at all."""
    batch = after_another_context()
    parts = [[4, 5, 6, 10, 11], [7, 12], [8, 9, 40, 20, 21], [1, 2, 3, 30, 31], [1, 2, 3]]
    assert batch.tokens.tolist() == [token for part in parts for token in part]
    branches = batch.branches
    assert branches.samples.tolist() == [0, 0, 1, 2, 3]
    assert branches.of_prompt.tolist() == [False, False, False, True, True]
    assert branches.starts.tolist() == [0, 2, 0, 0, 0]
    assert batch.runs.tolist() == [1, 1, 1, 1, 0]
    assert batch.first(2).branches.of_prompt.tolist() == [False, False, False]
    # one branch a response, but none after the prompt
    alone = RolloutBatch.from_trajectories([batch.trajectories[1]])
    assert alone.branched is not None and alone.tokens.tolist() == parts[2]
    assert build_method(ALGORITHMS["gspo"]).judge(alone).advantages is not None


@pytest.mark.parametrize("batch", [rewritten, after_another_context])
@pytest.mark.parametrize("shared", [True, False])
def test_a_row_of_shared_prompts_feeds_each_token_its_own_context(batch: Any, shared: bool) -> None:
    """All branches in one micro-batch: tokens that a branch shares with another are those of the
    prompt alone."""
    made = Grpo().judge(batch())
    config = Case(ALGORITHMS["grpo"], packed=True).config(str(ROOT / "assets/tiny-adder"))
    layout = WholeSequences(packed=True, share_prompts=shared)
    here = RankBatch(made.share(range(made.branches.size)), plan_of(config, made), 0, CPU, layout)
    sequences = [part.tolist() for part in made.tokens.split(made.lengths.tolist())]
    fed = sum(int((micro.tokens != 0).sum()) for micro in here.micro_batches)
    prompts = sum(made.branches.of_prompt.tolist())
    assert fed == sum(map(len, sequences)) - (3 * (prompts - 1) if shared else 0)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_a_token_is_predicted_from_its_own_context_and_counted_once(
    packed: bool, shared: bool
) -> None:
    """In micro-batches of two ranks: input, target, sample, place in the response, and the column
    of the engine's log-prob."""
    batch = Grpo().judge(rewritten())
    batch.rollout_log_probs = torch.arange(9.0)
    sequences = [part.tolist() for part in batch.tokens.split(batch.lengths.tolist())]
    contexts, seen = batch.branches.contexts.tolist(), []
    plan = plan_of(
        Case(ALGORITHMS["grpo"], parallel={"data": 2}, packed=packed).config(
            str(ROOT / "assets/tiny-adder")
        ),
        batch,
    )
    for rank in range(2):
        layout = WholeSequences(packed=packed, share_prompts=packed and shared)
        own = plan.branches_of(rank)
        here = RankBatch(batch.share(own), plan, rank, CPU, layout)
        tokens = here.token_batch(torch.zeros(len(here.index)), torch.zeros(len(here.index)))
        assert tokens.num_sequences == 2 and tokens.sequence_lengths.tolist() == [6, 2]
        targets = [int(t) for micro in here.micro_batches for t in micro.targets]
        places = zip(tokens.sequence.tolist(), tokens.position.tolist(), strict=True)
        seen += zip(tokens.index.tolist(), places, targets, strict=True)
        assert tokens.rollout_log_prob.tolist() == tokens.index.tolist()
        for micro in here.micro_batches:
            fed = micro.tokens.flatten()[micro.rows].tolist()
            for before, target in zip(fed, micro.targets.tolist(), strict=True):
                branch = next(i for i, part in enumerate(sequences) if target in part)
                at = sequences[branch].index(target)
                assert before == sequences[branch][at - 1] and at >= contexts[branch]
    wanted = [(0, place, token) for place, token in enumerate(range(10, 17)) if token != 14]
    wanted += [(1, 0, 20), (1, 1, 21)]
    assert sorted((of, place, target) for _, (of, place), target in seen) == wanted
    assert sorted(index for index, *_ in seen) == [0, 1, 2, 3, 5, 6, 7, 8]


def test_the_first_samples_keep_their_branches() -> None:
    batch = rewritten()
    one = batch.first(1)
    assert one.size == 1 and one.branches.samples.tolist() == [0, 0, 0]
    assert one.tokens.tolist() == batch.tokens[:14].tolist() and one.runs.tolist() == [1, 2, 1]
    assert len(one.loss_mask) == 7 and one.response_lengths.tolist() == [7]


def test_a_guarded_batch_and_a_canary_have_the_branches_in_order(tmp_path: Path) -> None:
    batch = Grpo().judge(rewritten())
    write_guarded(tmp_path, batch, torch.arange(9.0), "a test")
    first, second = read_guarded(step_folder(tmp_path, 2)).responses
    assert first.tokens.tolist() == list(range(10, 17)) and second.tokens.tolist() == [20, 21]
    assert first.prompt_tokens == second.prompt_tokens == [1, 2, 3]
    assert first.log_probs.tolist() == list(range(7)) and second.log_probs.tolist() == [7, 8]
    assert canary_of(batch) == [[1, 2, 3, 10, 11, 12]]


@pytest.mark.parametrize(
    "branches", [[Branch(5, (1,)), Branch(3, (1,))], [Branch(9, (1,))], [Branch(3, ())]]
)
def test_branches_out_of_order_are_refused(branches: list[Branch]) -> None:
    made = list(rewritten().trajectories)
    made[0].branches = branches
    with pytest.raises(DataError, match="branches of a trajectory of 7 tokens"):
        RolloutBatch.from_trajectories(made)
