"""Steps under context parallelism report every number that one rank with whole responses reports.

Losses, gradients and weights are held in test_parity.py, test_methods_in_training.py and
test_check_invariance.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import save_model
from support.ranks import RankPool
from support.steps import log_prob_pass, plan_of
from test_methods_in_training import CORRECTION, batch_of, config_of

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.batching.microbatch import RankBatch
from megatron_stare.megatron.batching.sequence_layout import SplitSequences
from megatron_stare.megatron.batching.zigzag import Zigzag
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.records.batch import MicroBatchPlan
from megatron_stare.records.log_prob_difference import LogProbDifference

pytestmark = pytest.mark.distributed
STARE = {
    "name": "stare",
    "variant": "C2",
    "amplify": 3.0,
    "attenuate": 0.2,
    "share": 0.3,
    "adaptive": True,
}
Reported = tuple[list[dict[str, float]], dict[str, float], LogProbDifference | None]


def updates(rank: int, init: str, config: Config, plan: MicroBatchPlan) -> Reported:
    """Reports of this rank on a rollout batch: updates, the method's state after them, engine
    against trainer."""
    trainer = Trainer(resolve_run(config), rank, init)
    log_prob_pass(trainer, trainer.method.judge(batch_of(1)), plan)
    trainer.measure(trainer.method.initial_state())
    results = [trainer.update(number) for number in range(config.batch.updates)]
    found = trainer.compare([0])
    trainer.close()
    made = [result for result in results if result is not None]
    return [metrics for metrics, _ in made], made[-1][1] if made else {}, found


def reported(results: list[Reported]) -> Reported:
    """Picks the report of the one rank that reports."""
    (one,) = (result for result in results if result[0])
    assert [result[2] is not None for result in results].count(True) == 1
    return one


# of two ranks; all others are slow
QUICK = ("stare by micro-batch", "gspo", "grpo with correction")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stare": (STARE, {}),
    "stare by micro-batch": (STARE, {"scope": "micro_batch"}),
    "stare C3, gate by sample": (
        {**STARE, "variant": "C3", "gate": "sample", "entropy_target": 2.5},
        {},
    ),
    "stare C1 by micro-batch, gate by token": (
        {**STARE, "variant": "C1", "common": "bottom", "gate": "token", "entropy_target": 2.5},
        {"scope": "micro_batch"},
    ),
    "twenty_entropy by micro-batch": (
        {"name": "twenty_entropy", "rule": "quantile"},
        {"scope": "micro_batch"},
    ),
    "gspo": ({"name": "gspo", "clip_low": 0.05, "clip_high": 0.05}, {}),
    "grpo_s": ({"name": "grpo_s", "beta2": 0.5, "ratio": "geometric"}, {}),
    "gtpo": ({"name": "gtpo", "alpha2": 0.5}, {}),
    "grpo with correction": (
        {
            "name": "grpo",
            "correction": {**CORRECTION, "level": "sequence", "low": 1e-6, "veto": 1e-3},
        },
        {"surprisal": "current"},
    ),
}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("case", "context"),
    [
        pytest.param(
            case, context, marks=() if context == 2 and case in QUICK else pytest.mark.slow
        )
        for case in CASES
        for context in (2, 4)
    ],
)
def test_every_number_is_that_of_one_rank(
    ranks: RankPool, tmp_path: Path, case: str, context: int
) -> None:
    save_model(tmp_path, "qwen2")
    algorithm, statistics = CASES[case]
    sections: dict[str, Any] = {
        "statistics": statistics,
        "observability": {"entropy_forecast": True, "measured_every": 1},
    }
    alone = config_of(tmp_path, algorithm, 0.3, **sections)
    config = config_of(tmp_path, algorithm, 0.3, **sections, parallel={"context": context})
    # by which one rank trains as well: `scope: micro_batch` reads the cut
    plan = plan_of(config, batch_of(1))
    assert min(plan.sizes) > 1
    wanted, state, difference = reported(ranks.run(updates, 1, alone, plan))
    metrics, after, found = reported(ranks.run(updates, context, config, plan))
    assert len(metrics) == len(wanted) == config.batch.updates
    for got, want in zip(metrics, wanted, strict=True):
        assert got == pytest.approx(want, rel=1e-4, abs=1e-5)
    assert after == pytest.approx(state)
    assert found is not None and difference is not None
    for of in ("everywhere", "longest"):
        assert vars(getattr(found, of)) == pytest.approx(vars(getattr(difference, of)), abs=1e-5)
    assert found.quantiles == pytest.approx(difference.quantiles, abs=1e-5)
    assert {first: sizes.tokens for first, sizes in found.from_position.items()} == {
        first: sizes.tokens for first, sizes in difference.from_position.items()
    }


@pytest.mark.parametrize("packed", [True, False])
def test_a_micro_batch_keeps_its_budget_with_its_padding(tmp_path: Path, packed: bool) -> None:
    """And ranks hold equal parts of it: the driver's plan knows what sequences are padded to."""
    save_model(tmp_path, "qwen2")
    batch, budget, context = batch_of(1), 32, 2
    config = config_of(
        tmp_path,
        {"name": "grpo"},
        0.3,
        batch={"micro_batch_tokens": budget, "packed": packed},
        parallel={"context": 2},
    )
    plan = plan_of(config, batch)
    share = batch.share(plan.branches_of(0))
    sizes = {"packed": packed, "multiple": 2 * context, "each": 2 * context}
    for rank in range(context):
        layout = SplitSequences(**sizes, place=Zigzag(rank, context))
        for micro in RankBatch(share, plan, 0, torch.device("cpu"), layout).micro_batches:
            assert 0 < context * micro.tokens.numel() <= budget
