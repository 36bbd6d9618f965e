"""How much engine and trainer differ, and who is blamed for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import log_prob_pass, plan_of
from torch import Tensor

from megatron_stare.config.schema import Config
from megatron_stare.megatron.batching.microbatch import RankBatch
from megatron_stare.megatron.batching.sequence_layout import WholeSequences
from megatron_stare.megatron.differences import Compared
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.ops.plan import PlanRules, plan_micro_batches
from megatron_stare.records.log_prob_difference import LogProbDifference
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.resolved import resolve_run
from megatron_stare.rollout.agreement import (
    AgreementError,
    agreement_metrics,
    canary_batch,
    canary_verdict,
    limit_of,
    require_agreement,
    rollout_verdict,
)

LIMIT = 1e-3
CANARY = canary_batch(vocab_size=37, sequences=4, longest=32)
POSITIONS = torch.cat([torch.arange(n) for n in CANARY.response_lengths.tolist()])
SEQUENCES = torch.repeat_interleave(torch.arange(4), CANARY.response_lengths)
FIRSTS, QUANTILES = (0, 1, 8, 64, 512, 4096), {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def difference(values: Tensor, versions: Tensor | None = None) -> LogProbDifference:
    versions = torch.zeros_like(POSITIONS) if versions is None else versions
    all_versions = versions.unique().tolist()
    return Compared(values, POSITIONS, SEQUENCES == 0, versions, all_versions, len(values)).summary(None)


def noise(scale: float, seed: int = 0) -> Tensor:
    return scale * torch.randn(POSITIONS.numel(), generator=torch.Generator().manual_seed(seed))


def metrics_by_sorting(values: Tensor, positions: Tensor, versions: Tensor, step: int) -> dict[str, float]:
    """Of all tokens in one place, by sorting them."""
    size = values.abs().double()
    ordered = size.sort().values
    metrics = {f"agreement/{name}": float(ordered[round(q * (size.numel() - 1))]) for name, q in QUANTILES.items()}
    for first, end in zip(FIRSTS, (*FIRSTS[1:], 2**62), strict=True):
        inside = (positions >= first) & (positions < end)
        if inside.any():
            metrics[f"agreement/max_from_position_{first}"] = float(size[inside].amax())
    for version in versions.unique().tolist():
        metrics[f"agreement/max_of_age_{step - version}"] = float(size[versions == version].amax())
    return metrics


QUIET = difference(noise(1e-7))


def test_the_canary_is_the_same_in_every_run_and_ragged():
    again = canary_batch(vocab_size=37, sequences=4, longest=32)
    assert torch.equal(again.tokens, CANARY.tokens)
    assert CANARY.lengths.tolist() == [32, 24, 16, 8]
    assert int(CANARY.tokens.max()) < 37
    assert canary_batch(37, 0, 32).size == 0


def alone(batch: RolloutBatch) -> RankBatch:
    """The whole batch on one rank."""
    plan = plan_micro_batches(batch.lengths.tolist(), PlanRules(data_parallel=1, budget=64, packed=True))
    return RankBatch(batch.share(plan.samples_of(0)), plan, 0, torch.device("cpu"), WholeSequences(packed=True))


def test_differences_are_taken_token_by_token():
    here = alone(CANARY)
    trainer = noise(1.0)
    found = Compared.of(here, (trainer + 0.25)[here.index], trainer[here.index], (0,))
    torch.testing.assert_close(found.values, torch.full_like(trainer, 0.25), atol=1e-6, rtol=0)
    assert torch.equal(found.positions, POSITIONS[here.index])
    assert torch.equal(found.longest, SEQUENCES[here.index] == 0)
    assert found.expected == len(POSITIONS)


def test_metrics_by_quantile_position_and_age():
    values = torch.zeros(POSITIONS.numel())
    values[POSITIONS == 9] = 0.5
    values[0] = -0.25
    versions = torch.full(POSITIONS.shape, 6)
    versions[0] = 5
    metrics = agreement_metrics(difference(values, versions), step=7)
    assert metrics["agreement/max"] == 0.5
    assert metrics["agreement/p50"] == 0.0
    assert metrics["agreement/max_from_position_0"] == 0.25
    assert metrics["agreement/max_from_position_1"] == 0.0
    assert metrics["agreement/max_from_position_8"] == 0.5
    assert (metrics["agreement/max_of_age_1"], metrics["agreement/max_of_age_2"]) == (0.5, 0.25)
    assert "agreement/max_from_position_64" not in metrics


@given(
    st.lists(
        st.tuples(st.floats(-9, 9, width=32), st.integers(0, 70) | st.just(5000), st.integers(3, 5)),
        min_size=1,
        max_size=40,
    )
)
def test_metrics_equal_those_by_sorting(rows):
    """Bit for bit; of even and odd numbers of tokens, for between two the quantile is the even place."""
    values, positions, versions = (torch.tensor(column) for column in zip(*rows, strict=True))
    everyone = torch.ones(len(rows), dtype=torch.bool)
    compared = Compared(values.float(), positions, everyone, versions, (3, 4, 5), len(rows))
    assert agreement_metrics(compared.summary(None), 6) == metrics_by_sorting(values.float(), positions, versions, 6)


def test_tokens_that_were_not_sampled_are_left_out():
    batch = canary_batch(37, 2, 8)
    batch.loss_mask[0] = False
    here = alone(batch)
    trainer = torch.zeros(batch.loss_mask.numel())
    trainer[0] = 9.0
    found = Compared.of(here, batch.rollout_log_probs[here.index], trainer[here.index], (0,)).summary(None)
    assert found.largest == 0.0
    assert found.everywhere.tokens == batch.loss_mask.numel() - 1


def test_a_token_that_nobody_compared_is_not_a_number():
    values = noise(1e-7)
    lost = Compared(values, POSITIONS, SEQUENCES == 0, torch.zeros_like(POSITIONS), (0,), len(values) + 1)
    assert lost.summary(None).largest != lost.summary(None).largest
    assert not lost.summary(None).agrees(LIMIT)


@pytest.mark.parametrize(
    ("blamed", "servers"),
    [
        (None, [QUIET, QUIET]),
        ("weights of engine 1", [QUIET, difference(noise(0.1))]),
        ("the weights are", [difference(noise(0.1)), difference(noise(0.1, 1))]),
        ("positions", [difference(noise(0.1) * (POSITIONS > 0))]),
        ("padding", [difference(noise(0.1) * (SEQUENCES > 0))]),
        ("the weights are", [difference(torch.full(POSITIONS.shape, torch.nan))]),
        ("the weights are", [difference(noise(1e-7).masked_fill(POSITIONS == 0, torch.nan))]),
        ("positions", [difference(noise(1e-7).masked_fill(POSITIONS == 3, torch.nan))]),
    ],
)
def test_what_the_canary_shows(blamed, servers):
    verdict = canary_verdict(servers, LIMIT)
    assert (verdict is None) if blamed is None else (verdict is not None and blamed in verdict)


@pytest.mark.parametrize(
    ("blamed", "sampled", "unscaled", "temperature"),
    [
        ("the temperature is", noise(0.3), noise(1e-7), 0.7),
        ("sampling support", noise(0.3).abs(), noise(0.3), 1.0),
        ("cache or batching", noise(0.3) * (POSITIONS > 0), noise(0.3), 1.0),
        ("a penalty or a bias", noise(0.3), noise(0.3), 1.0),
        ("a penalty or a bias", noise(1e-7).masked_fill(POSITIONS == 3, torch.nan), noise(0.3), 1.0),
    ],
)
def test_what_sampled_tokens_show(blamed, sampled, unscaled, temperature):
    assert blamed in rollout_verdict(difference(sampled), difference(unscaled), temperature, LIMIT)


def test_a_run_stops_past_the_limit_and_at_nan():
    require_agreement("x", 1e-4, LIMIT, "", "step 3")
    for bad in (2e-3, float("nan")):
        with pytest.raises(AgreementError, match=r"the limit is 0\.001; weights"):
            require_agreement("x", bad, LIMIT, "weights", "step 3")
    assert limit_of(None, "float32") < limit_of(None, "bfloat16")
    assert limit_of(None, "float32", "bfloat16") == limit_of(None, "bfloat16", "float32") == limit_of(None, "bfloat16")
    assert limit_of(0.2, "float32") == limit_of(0.2, "float32", "bfloat16") == 0.2


VERSIONS = (3, 5)  # of the weights that sampled the tokens, one after the other in every response
STEP = 6


def engine_batch() -> RolloutBatch:
    """Log-probs of an engine, some tokens that no policy sampled, and two versions of the weights."""
    batch = random_batch(5, 10)
    total = len(batch.loss_mask)
    draw = torch.Generator().manual_seed(3)
    lengths = torch.stack([batch.response_lengths // 2, batch.response_lengths - batch.response_lengths // 2], 1)
    return replace(
        batch,
        rollout_log_probs=-4 * torch.rand(total, generator=draw),
        loss_mask=torch.arange(total) % 7 != 2,
        run_versions=torch.tensor(VERSIONS).repeat(batch.size),
        run_lengths=lengths.flatten(),
        runs=torch.full((batch.size,), 2),
    )


def config_of(path: Path, parallel: dict[str, int]) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(path)},
            "parallel": parallel,
            "batch": {"prompts": 5, "samples_per_prompt": 2, "micro_batch_tokens": 40},
            "rollout": {"temperature": 0.7},
            "algorithm": {"name": "grpo"},
            "optimizer": {"distributed": False},
            "observability": {"entropy_forecast": False},
        }
    )


def servers_of(canary: RolloutBatch) -> Tensor:
    """[2, N] what two servers say of the canary."""
    return -3 * torch.rand(2, len(canary.loss_mask), generator=torch.Generator().manual_seed(9))


def _compared(rank: int, init: str, config: Config) -> dict[str, Any]:
    """What this rank tells of the comparisons, and the log-probs they rest on."""
    trainer = Trainer(resolve_run(config), rank, init)
    batch, canary = engine_batch(), canary_batch(37, 3, 16)
    log_prob_pass(trainer, batch)
    measured = trainer.step.measured
    plan = plan_of(config, canary)
    share = canary.share(plan.samples_of(trainer.data_rank()))
    here = trainer._batch_of(share, plan)
    found = {
        "run": trainer.compare(VERSIONS),
        "at 1": trainer.compare(VERSIONS, 1.0),
        "canary": trainer.compare_with(share, plan, servers_of(canary), 1.0),
        "scores": None if measured is None else (measured.tokens.index, measured.tokens.old_log_prob),
        "kept": measured is None or trainer.step.measured is measured,
        "unscaled": trainer._log_probs(trainer.step.batch, 1.0),
        "canary_scores": (here.index, trainer._log_probs(here, 1.0)),
    }
    trainer.close()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    "parallel",
    [{"tensor": 2}, {"data": 2}, {"tensor": 2, "data": 2}, {"data": 4}, {"pipeline": 2}],
    ids=["tp2", "dp2", "tp2-dp2", "dp4", "pp2"],
)
def test_ranks_find_what_one_process_finds(ranks: RankPool, tmp_path: Path, parallel: dict[str, int]) -> None:
    save_model(tmp_path, "qwen2_tied")
    config = config_of(tmp_path, parallel)
    results = ranks.run(_compared, config.parallel.world_size, config)
    batch = engine_batch()
    position = torch.cat([torch.arange(n) for n in batch.response_lengths.tolist()])
    for name, column in (("run", 1), ("at 1", None)):
        trainer = torch.full((len(batch.loss_mask),), torch.nan)
        for each in results:
            if each["scores"] is not None:
                trainer[each["scores"][0]] = each["scores"][column] if column else each["unscaled"]
        kept = batch.loss_mask
        values = (batch.rollout_log_probs - trainer)[kept]
        (found,) = [each[name] for each in results if each[name] is not None]
        want = metrics_by_sorting(values, position[kept], batch.weight_versions[kept], STEP)
        assert agreement_metrics(found, STEP) == want
        assert want.keys() >= {"agreement/max_of_age_3", "agreement/max_of_age_1", "agreement/max_from_position_8"}
        assert found.lowest == float(values.amin())
        assert found.everywhere.tokens == int(kept.sum())
        first = torch.repeat_interleave(torch.arange(batch.size), batch.response_lengths)[kept]
        assert found.longest.largest == float(values[first == batch.response_lengths.argmax()].abs().amax())
    assert all(each["kept"] for each in results)  # the canary and the other temperature leave the step as it was
    (canary,) = [each["canary"] for each in results if each["canary"] is not None]
    sequences = canary_batch(37, 3, 16)
    servers, trainer = servers_of(sequences), torch.full((len(sequences.loss_mask),), torch.nan)
    for index, log_probs in (each["canary_scores"] for each in results):
        if log_probs is not None:
            trainer[index] = log_probs
    place = torch.cat([torch.arange(n) for n in sequences.response_lengths.tolist()])
    for server, found in zip(servers, canary, strict=True):
        want = metrics_by_sorting(server - trainer, place, torch.zeros_like(place), STEP)
        assert agreement_metrics(found, STEP) == {name: x for name, x in want.items() if "age" not in name}
