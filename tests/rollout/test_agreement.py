"""How much engine and trainer differ, and who is blamed for it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.char_tokenizer import char_tokenizer
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import log_prob_pass, plan_of
from torch import Tensor

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.driver.agreement_watch import canary_sequences, require_steady
from megatron_stare.megatron.batching.microbatch import RankBatch
from megatron_stare.megatron.batching.sequence_layout import WholeSequences
from megatron_stare.megatron.step.differences import UNLIKELY, Compared
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.ops.plan import PlanRules, plan_micro_batches
from megatron_stare.records.log_prob_difference import LogProbDifference
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.rollout.agreement.agreement import (
    AgreementError,
    agreement_metrics,
    canary_batch,
    canary_verdict,
    require_agreement,
    rollout_verdict,
    summary,
)
from megatron_stare.rollout.agreement.limits import Limits

LIMIT = Limits(1e-3)
IN_BF16 = Limits(None, {"mean": 0.025, "p99": 0.2, "p999": 1.0}, trend=3.0)
SPELLS = char_tokenizer()
CANARY = canary_batch(canary_sequences(SPELLS, 42, 4, 32))
POSITIONS = torch.cat([torch.arange(n) for n in CANARY.response_lengths.tolist()])
SEQUENCES = torch.repeat_interleave(torch.arange(4), CANARY.response_lengths)
FIRSTS, QUANTILES = (
    (0, 1, 8, 64, 512, 4096),
    {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0},
)


def difference(
    values: Tensor, versions: Tensor | None = None, unlikely: Tensor | None = None
) -> LogProbDifference:
    versions = torch.zeros_like(POSITIONS) if versions is None else versions
    unlikely = torch.zeros_like(POSITIONS, dtype=torch.bool) if unlikely is None else unlikely
    all_versions = versions.unique().tolist()
    return Compared(
        values, POSITIONS, SEQUENCES == 0, unlikely, versions, all_versions, len(values)
    ).summary(None)


def noise(scale: float, seed: int = 0) -> Tensor:
    return scale * torch.randn(POSITIONS.numel(), generator=torch.Generator().manual_seed(seed))


def same(found: dict[str, float], want: dict[str, float]) -> bool:
    """To the last bit, but for means, whose sums are taken in another order."""
    means = {name for name in want if name.endswith("mean")}
    return {n: x for n, x in found.items() if n not in means} == {
        n: x for n, x in want.items() if n not in means
    } and {name: found[name] for name in means} == pytest.approx(
        {name: want[name] for name in means}, rel=1e-12
    )


def metrics_by_sorting(
    values: Tensor, positions: Tensor, versions: Tensor, step: int, trainer: Tensor
) -> dict[str, float]:
    """Metrics of all tokens in one place, by sorting them. `trainer` has the trainer's
    log-probs."""
    size = values.abs().double()
    ordered = size.sort().values
    unlikely = trainer < math.log(1e-3)
    metrics = {
        f"agreement/{name}": float(ordered[round(q * (size.numel() - 1))])
        for name, q in QUANTILES.items()
    }
    metrics["agreement/mean"] = float(size.mean())
    for name, part in (("likely", ~unlikely), ("unlikely", unlikely)):
        if part.any():
            metrics[f"agreement/{name}_mean"] = float(size[part].mean())
    for first, end in zip(FIRSTS, (*FIRSTS[1:], 2**62), strict=True):
        inside = (positions >= first) & (positions < end)
        if inside.any():
            metrics[f"agreement/max_from_position_{first}"] = float(size[inside].amax())
    for version in versions.unique().tolist():
        metrics[f"agreement/max_of_age_{step - version}"] = float(size[versions == version].amax())
    return metrics


QUIET = difference(noise(1e-7))


def test_the_canary_is_the_same_in_every_run_and_ragged():
    again = canary_batch(canary_sequences(SPELLS, 42, 4, 32))
    assert torch.equal(again.tokens, CANARY.tokens)
    assert CANARY.lengths.tolist() == [32, 24, 16, 8]
    assert int(CANARY.loss_mask.sum()) == 32 + 24 + 16 + 8 - 4


def alone(batch: RolloutBatch) -> RankBatch:
    """The whole batch on one rank."""
    plan = plan_micro_batches(
        batch.lengths.tolist(), PlanRules(data_parallel=1, budget=64, packed=True)
    )
    return RankBatch(
        batch.share(plan.branches_of(0)), plan, 0, torch.device("cpu"), WholeSequences(packed=True)
    )


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
        st.tuples(
            st.floats(-9, 9, width=32),
            st.integers(0, 70) | st.just(5000),
            st.integers(3, 5),
            st.sampled_from([-0.5, -6.9, -6.91]),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_metrics_equal_those_by_sorting(rows):
    """Bit for bit; of even and odd numbers of tokens, for between two the quantile is the even
    place."""
    values, positions, versions, trainer = (
        torch.tensor(column) for column in zip(*rows, strict=True)
    )
    everyone = torch.ones(len(rows), dtype=torch.bool)
    compared = Compared(
        values.float(), positions, everyone, trainer < UNLIKELY, versions, (3, 4, 5), len(rows)
    )
    want = metrics_by_sorting(values.float(), positions, versions, 6, trainer)
    assert same(agreement_metrics(compared.summary(None), 6), want)


def test_tokens_that_were_not_sampled_are_left_out():
    batch = canary_batch(canary_sequences(SPELLS, 42, 2, 8))
    batch.loss_mask[0] = False
    here = alone(batch)
    trainer = torch.zeros(batch.loss_mask.numel())
    trainer[0] = 9.0
    found = Compared.of(
        here, batch.rollout_log_probs[here.index], trainer[here.index], (0,)
    ).summary(None)
    assert found.largest == 0.0
    assert found.everywhere.tokens == batch.loss_mask.numel() - 1


def test_a_token_that_nobody_compared_is_not_a_number():
    values = noise(1e-7)
    likely = torch.zeros_like(POSITIONS, dtype=torch.bool)
    lost = Compared(
        values,
        POSITIONS,
        SEQUENCES == 0,
        likely,
        torch.zeros_like(POSITIONS),
        (0,),
        len(values) + 1,
    )
    found = lost.summary(None)
    assert found.largest != found.largest and found.everywhere.mean != found.everywhere.mean
    for limits in (LIMIT, IN_BF16):
        assert limits.passed(found) and limits.canary_passed(found)


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


def test_an_engine_is_named_by_its_number_though_others_are_lost():
    verdict = canary_verdict([QUIET, difference(noise(0.1))], LIMIT, engines=[0, 3])
    assert verdict is not None and "weights of engine 3" in verdict


@pytest.mark.parametrize(
    ("blamed", "sampled", "unscaled", "temperature"),
    [
        ("the temperature is", noise(0.3), noise(1e-7), 0.7),
        ("sampling support", noise(0.3).abs(), noise(0.3), 1.0),
        ("cache or batching", noise(0.3) * (POSITIONS > 0), noise(0.3), 1.0),
        ("a penalty or a bias", noise(0.3), noise(0.3), 1.0),
        (
            "a penalty or a bias",
            noise(0.3).masked_fill(POSITIONS == 3, torch.nan),
            noise(0.3),
            1.0,
        ),
    ],
)
def test_what_sampled_tokens_show(blamed, sampled, unscaled, temperature):
    assert blamed in rollout_verdict(difference(sampled), difference(unscaled), temperature, LIMIT)


@pytest.mark.parametrize(("limits_", "scale"), [(LIMIT, 1e-7), (IN_BF16, 0.02)])
def test_nan_alone_is_blamed_on_the_side_that_computed_it(limits_: Limits, scale: float) -> None:
    here, trainer = alone(CANARY), -noise(1.0).abs()
    engine = trainer + noise(scale, 1)
    engine[:2], trainer[1:4] = torch.nan, torch.nan
    found = Compared.of(here, engine[here.index], trainer[here.index], (0,)).summary(None)
    assert limits_.passed(found)
    verdict = rollout_verdict(found, found, 0.7, limits_)
    assert "NaN is to blame, in 2 log-probs of the engine and 2 of the trainer alone" in verdict


ROUNDED = noise(0.02)  # as 16 bits round tokens that a policy samples


@pytest.mark.parametrize(
    ("blamed", "servers"),
    [
        (None, [ROUNDED, 2 * ROUNDED]),
        (None, [ROUNDED.where(POSITIONS != 28, 3.0)]),  # one token by nats
        ("weights of engine 0", [noise(0.5), ROUNDED]),
        ("positions", [torch.where(POSITIONS > 0, noise(0.5), ROUNDED)]),
        ("padding", [torch.where(SEQUENCES > 0, noise(0.5), ROUNDED)]),
        ("the weights are", [noise(0.5)]),
        ("the weights are", [ROUNDED.masked_fill(POSITIONS == 0, torch.nan)]),
        ("positions", [ROUNDED.masked_fill(POSITIONS == 3, torch.nan)]),
    ],
)
def test_what_the_canary_shows_in_16_bits(blamed, servers):
    verdict = canary_verdict([difference(values) for values in servers], IN_BF16)
    assert (verdict is None) if blamed is None else (verdict is not None and blamed in verdict)


def test_clipped_keys_of_a_cache_of_eight_bits_look_like_wrong_positions():
    """A response's first token attends to itself alone, whatever its key; seen on a server with
    keys of 600."""
    apart = [difference(torch.where(POSITIONS > 0, noise(0.5), ROUNDED))]
    verdict = canary_verdict(apart, replace(IN_BF16, cache="fp8_e4m3"))
    assert verdict is not None and "or keys are too large for a cache of fp8_e4m3: the" in verdict
    assert "keys" not in str(canary_verdict(apart, IN_BF16))
    assert limits("float32", cache="fp8_e4m3").cache == "fp8_e4m3"


def test_of_a_canary_in_16_bits_the_likely_tokens_are_judged():
    unlikely = torch.arange(len(POSITIONS)) >= 20
    apart = torch.where(unlikely, 0.8, 0.02)
    assert IN_BF16.canary_passed(difference(apart, unlikely=unlikely)) == ""
    reverse = IN_BF16.canary_passed(difference(0.82 - apart, unlikely=unlikely))
    assert reverse == "by 0.8 nats in their mean, the limit is 0.1"
    few = torch.arange(len(POSITIONS)) >= 4  # too few likely ones to say anything
    assert IN_BF16.canary_passed(difference(torch.where(few, 0.8, 0.02), unlikely=few))
    found = summary(
        [difference(apart, unlikely=unlikely), difference(2 * apart, unlikely=unlikely)]
    )
    assert found == pytest.approx(
        {
            "agreement/canary_max": 1.6,
            "agreement/canary_likely_mean": 0.04,
            "agreement/canary_unlikely_mean": 1.6,
        }
    )


@pytest.mark.parametrize(
    ("blamed", "sampled", "unscaled", "temperature"),
    [
        ("the temperature is", noise(0.8), ROUNDED, 0.7),
        ("sampling support", noise(0.8).abs() - 0.01, noise(0.3), 1.0),
        ("cache or batching", torch.where(POSITIONS > 0, noise(0.8), ROUNDED), noise(0.3), 1.0),
        ("a penalty or a bias", noise(0.8), noise(0.3), 1.0),
    ],
)
def test_what_sampled_tokens_show_in_16_bits(blamed, sampled, unscaled, temperature):
    assert IN_BF16.passed(difference(sampled))
    assert blamed in rollout_verdict(
        difference(sampled), difference(unscaled), temperature, IN_BF16
    )


@pytest.mark.parametrize(
    ("share", "size", "words"),
    [
        (1.0, 0.03, "by 0.03 nats in their mean, the limit is 0.025"),
        (0.04, 0.25, "by 0.25 nats in their 99 % quantile, the limit is 0.2"),
        (0.01, 1.2, "by 1.2 nats in their 99.9 % quantile, the limit is 1"),
    ],
)
def test_mean_and_quantiles_decide_in_16_bits_and_the_maximum_does_not(share, size, words):
    """Each of the three by itself; the largest of a thousand tokens may be what it is."""
    values = torch.full((2000,), 1e-3)
    values[: int(share * 2000)] = size
    apart, zeros = torch.zeros(2000, dtype=torch.bool), torch.zeros(2000, dtype=torch.int64)
    found = Compared(values, zeros, apart, apart, zeros, (0,), 2000).summary(None)
    assert IN_BF16.passed(found) == words
    values = torch.full((2000,), 1e-3)
    values[0] = 20.0
    assert (
        IN_BF16.passed(Compared(values, zeros, apart, apart, zeros, (0,), 2000).summary(None)) == ""
    )


def test_a_run_whose_difference_grows_stops():
    require_steady({"agreement/mean": 0.04}, IN_BF16, "step 3")
    require_steady({"agreement/trend": 2.9, "agreement/mean": 0.04}, IN_BF16, "step 30")
    # nearly nothing still
    require_steady({"agreement/trend": 8.0, "agreement/mean": 0.004}, IN_BF16, "step 30")
    require_steady({"agreement/trend": 8.0, "agreement/mean": 0.04}, LIMIT, "step 30")
    with pytest.raises(
        AgreementError,
        match=r"lie 3\.1 times as far apart .* \(0\.04 nats on average; the limit is 3",
    ):
        require_steady({"agreement/trend": 3.1, "agreement/mean": 0.04}, IN_BF16, "step 30")


def test_a_run_stops_past_the_limit_and_at_nan():
    assert LIMIT.passed(difference(noise(1e-5))) == ""
    require_agreement("x", "", "", "step 3")
    for bad in (2e-3, float("nan")):
        passed = LIMIT.passed(difference(torch.where(POSITIONS == 3, bad, 0.0)))
        with pytest.raises(AgreementError, match=r"the limit is 0\.001; weights"):
            require_agreement("x", passed, "weights", "step 3")


def limits(
    trained: str,
    served: str | None = None,
    own: float | None = None,
    cache: str | None = None,
    weights: str | None = None,
    **agreement: float,
) -> Limits:
    return Limits.of(
        Config.model_validate(
            {
                "model": {"path": "m", "dtype": trained},
                "rollout": {"engine": "sglang"},
                "sglang": {
                    "dtype": served,
                    "agreement_limit": own,
                    "kv_cache_dtype": cache,
                    "quantization": weights,
                },
                "agreement": agreement,
            }
        )
    )


def test_the_limits_are_those_of_the_coarser_dtype():
    assert limits("float32") == LIMIT
    assert limits("float32", own=0.2) == Limits(0.2)
    in_16 = limits("bfloat16")
    assert in_16.largest is None and in_16.bounds == IN_BF16.bounds and in_16.trend == IN_BF16.trend
    for pair in (
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("float16", "bfloat16"),
        ("bfloat16", "float16"),
    ):
        assert limits(*pair) == in_16
    finer = limits("float32", "float16")
    assert finer == limits("float16") and all(
        finer.bounds[name] < bound for name, bound in in_16.bounds.items()
    )
    mine = limits("bfloat16", own=0.3, p99=0.25, trend=2.0)
    assert (mine.largest, mine.bounds["p99"], mine.bounds["mean"], mine.trend) == (
        0.3,
        0.25,
        in_16.bounds["mean"],
        2.0,
    )


def test_a_cache_of_eight_bits_is_coarser_than_any_dtype():
    found = limits("float32", cache="fp8_e4m3")
    assert found == limits("bfloat16", "float16", cache="fp8_e4m3")
    assert found.largest is None and found.coarse and found.trend == IN_BF16.trend
    assert found.bounds == {name: pytest.approx(4 * x) for name, x in IN_BF16.bounds.items()}


def test_weights_of_eight_bits_are_coarser_than_a_cache():
    found = limits("bfloat16", cache="fp8_e4m3", weights="fp8")
    assert found.bounds == {name: pytest.approx(8 * x) for name, x in IN_BF16.bounds.items()}
    assert limits("float32", weights="fp8").bounds == found.bounds


VERSIONS = (3, 5)  # of the weights that sampled the tokens, one after the other in every response
STEP = 6


def engine_batch() -> RolloutBatch:
    """Log-probs of an engine, some tokens that no policy sampled, and two versions of the
    weights."""
    batch = random_batch(5, 10)
    total = len(batch.loss_mask)
    draw = torch.Generator().manual_seed(3)
    lengths = torch.stack(
        [batch.response_lengths // 2, batch.response_lengths - batch.response_lengths // 2], 1
    )
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
    """Compares in every way. Returned are what this rank tells of the comparisons, and the
    log-probs they rest on."""
    trainer = Trainer(resolve_run(config), rank, init)
    batch, canary = engine_batch(), canary_batch(canary_sequences(SPELLS, 37, 3, 16))
    log_prob_pass(trainer, batch)
    measured = trainer.step.measured
    plan = plan_of(config, canary)
    share = canary.share(plan.branches_of(trainer.data_rank()))
    here = trainer._batch_of(share, plan)
    found = {
        "run": trainer.compare(VERSIONS),
        "at 1": trainer.compare(VERSIONS, 1.0),
        "canary": trainer.compare_with(share, plan, servers_of(canary), 1.0),
        "scores": None
        if measured is None
        else (measured.tokens.index, measured.tokens.old_log_prob),
        "kept": measured is None or trainer.step.measured is measured,
        "unscaled": trainer._log_probs(trainer.step.batch, 1.0),
        "canary_scores": (here.index, trainer._log_probs(here, 1.0)),
    }
    trainer.close()
    return found


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(
    "parallel",
    [{"tensor": 2}, {"data": 2}, {"tensor": 2, "data": 2}, {"data": 4}, {"pipeline": 2}],
    ids=["tp2", "dp2", "tp2-dp2", "dp4", "pp2"],
)
def test_ranks_find_what_one_process_finds(
    ranks: RankPool, tmp_path: Path, parallel: dict[str, int]
) -> None:
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
        want = metrics_by_sorting(
            values, position[kept], batch.weight_versions[kept], STEP, trainer[kept]
        )
        assert same(agreement_metrics(found, STEP), want)
        assert want.keys() >= {
            "agreement/max_of_age_3",
            "agreement/max_of_age_1",
            "agreement/max_from_position_8",
        }
        assert found.lowest == float(values.amin())
        assert found.everywhere.tokens == int(kept.sum())
        first = torch.repeat_interleave(torch.arange(batch.size), batch.response_lengths)[kept]
        assert found.longest.largest == float(
            values[first == batch.response_lengths.argmax()].abs().amax()
        )
    # the canary and the other temperature leave the step as it was
    assert all(each["kept"] for each in results)
    (canary,) = [each["canary"] for each in results if each["canary"] is not None]
    sequences = canary_batch(canary_sequences(SPELLS, 37, 3, 16))
    servers, trainer = servers_of(sequences), torch.full((len(sequences.loss_mask),), torch.nan)
    for index, log_probs in (each["canary_scores"] for each in results):
        if log_probs is not None:
            trainer[index] = log_probs
    place = torch.cat([torch.arange(n) for n in sequences.response_lengths.tolist()])
    for server, found in zip(servers, canary, strict=True):
        want = metrics_by_sorting(server - trainer, place, torch.zeros_like(place), STEP, trainer)
        assert same(
            agreement_metrics(found, STEP),
            {name: x for name, x in want.items() if "age" not in name},
        )
