"""The driver puts every data rank's share where its workers take it from once, and hands each
worker its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models import random_batch
from torch import Tensor

from megatron_stare.cluster.inline import InlineWorkers
from megatron_stare.cluster.trainer_group import TrainerGroup
from megatron_stare.ops.plan import PlanRules, plan_mini_batches
from megatron_stare.records.batch import MicroBatchPlan
from megatron_stare.records.log_prob_difference import LogProbDifference, Sizes
from megatron_stare.records.rollout_batch import RankShare

RULES = PlanRules(data_parallel=2, budget=60, packed=True, mini_batch_prompts=2)
SIZES = Sizes(1, 0, 0.5, 0.5)
FOUND = LogProbDifference(SIZES, 0.5, {}, {}, {}, SIZES, SIZES, SIZES)


class Rank:
    """A trainer rank that remembers what it was given; the last one reports."""

    def __init__(self, data_rank: int, reports: bool) -> None:
        self._data_rank, self._reports = data_rank, reports
        self.given: list[tuple[Any, ...]] = []

    def data_rank(self) -> int:
        return self._data_rank

    def stage(self) -> int:
        return 0

    def compute_log_probs(self, share: RankShare, plan: MicroBatchPlan) -> None:
        self.given.append((share, plan))

    def compare(self, versions: list[int], temperature: float | None) -> LogProbDifference | None:
        self.given.append((versions, temperature))
        return FOUND if self._reports else None

    def compare_with(
        self, share: RankShare, plan: MicroBatchPlan, engines: Tensor, temperature: float
    ) -> list[LogProbDifference] | None:
        self.given.append((engines, temperature))
        return [FOUND] if self._reports else None

    def update(
        self, number: int, dump_to: str | None, watched: Sequence[int], norm_limit: float
    ) -> tuple[dict[str, float], dict[str, float]] | None:
        return ({"update/finite": 1.0}, {"gate": 1.0}) if self._reports else None


class Counting(InlineWorkers):
    """Counts what is put for the workers."""

    shared = 0

    def share(self, value: Any) -> Any:
        self.shared += 1
        return super().share(value)


@dataclass(frozen=True)
class Stored:
    """Handle of a value that is put for the workers."""

    value: Any


class Storing(InlineWorkers):
    """Workers that fetch what is put for them, if its handle is an argument by itself."""

    def __init__(self, workers: Sequence[Any]) -> None:
        super().__init__(workers)
        self.stored: list[Any] = []

    def share(self, value: Any) -> Any:
        self.stored.append(value)
        return Stored(value)

    def start_on(self, worker: int, method: str, *args: Any) -> Any:
        assert not any(isinstance(arg, Tensor) for arg in args), "sent to every worker by itself"
        fetched = (arg.value if isinstance(arg, Stored) else arg for arg in args)
        return super().start_on(worker, method, *fetched)


@pytest.mark.parametrize("data_ranks", [[0, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1]])
def test_each_worker_is_given_its_data_ranks_share(data_ranks: list[int]) -> None:
    ranks = [Rank(each, reports=number == 3) for number, each in enumerate(data_ranks)]
    workers = Counting(ranks)
    trainers = TrainerGroup(workers, RULES)
    batch = random_batch(1, 8)
    batch.run_versions[3] = 4
    trainers.compute_log_probs(batch)
    plan = plan_mini_batches(batch.lengths.tolist(), batch.groups.tolist(), RULES)
    assert workers.shared == 2
    for rank in ranks:
        ((share, given),) = rank.given
        assert given == plan
        assert share.own.tolist() == plan.branches_of(rank.data_rank())
        assert share.tokens.numel() == int(batch.lengths[share.own].sum())
    assert trainers.compare() is FOUND
    assert all(rank.given[1] == ([0, 4], None) for rank in ranks)
    assert workers.shared == 2  # what lies on the ranks is compared, and nothing sent again


def test_a_tensor_for_all_workers_is_put_for_them_once() -> None:
    ranks = [Rank(number // 2, reports=number == 3) for number in range(4)]
    workers = Storing(ranks)
    batch = random_batch(1, 8)
    assert TrainerGroup(workers, RULES).mean_loss(batch) == FOUND.everywhere.mean
    zeros = torch.zeros(1, len(batch.loss_mask))
    assert all(torch.equal(rank.given[0][0], zeros) for rank in ranks)
    assert sum(isinstance(value, Tensor) for value in workers.stored) == 1


def test_the_driver_writes_the_first_mini_batch(tmp_path: Path) -> None:
    trainers = TrainerGroup(Counting([Rank(0, reports=False), Rank(1, reports=True)]), RULES)
    batch = random_batch(1, 8)
    trainers.compute_log_probs(batch)
    trainers.update(1)
    assert not any(tmp_path.iterdir())
    trainers.update(0, str(tmp_path / "dump"))
    found = load_file(tmp_path / "dump" / "batch.safetensors")
    assert found.keys() == {
        *(
            "tokens",
            "prompt_lengths",
            "response_lengths",
            "sampled",
            "rollout_log_probs",
            "weight_versions",
        ),
        *("groups", "rewards", "verified", "truncated", "advantages"),
    }
    first = 4  # two groups of two
    assert found["tokens"].dtype == found["weight_versions"].dtype == torch.int64
    assert torch.equal(found["tokens"], batch.tokens[: int(batch.lengths[:first].sum())].long())
    responses = int(batch.response_lengths[:first].sum())
    assert torch.equal(found["rollout_log_probs"], batch.rollout_log_probs[:responses])
    assert torch.equal(found["weight_versions"], batch.weight_versions[:responses])
    assert batch.advantages is not None and torch.equal(
        found["advantages"], batch.advantages[:first]
    )
