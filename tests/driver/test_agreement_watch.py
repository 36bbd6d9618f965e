"""When a run is stopped because engine and trainer differ, and what it says of each step before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.driver.agreement_watch import AgreementWatch
from megatron_stare.records.log_prob_difference import LogProbDifference, Sizes
from megatron_stare.rollout.agreement.agreement import AgreementError

MODEL = Path(__file__).parents[2] / "assets" / "tiny-adder"


def found(mean: float, p99: float = 0.05, largest: float = 3.0) -> LogProbDifference:
    sizes = Sizes(1000, 0, largest, mean)
    quantiles = {"p50": 0.0, "p90": mean, "p99": p99, "p999": 0.3}
    return LogProbDifference(
        sizes, -3.0, quantiles, {0: sizes}, {0: sizes}, sizes, sizes, Sizes(0, 0, 0.0, 0.0)
    )


class Trainers:
    """Whose comparisons come to what was told."""

    def __init__(self) -> None:
        self.told, self.asked = found(0.006), 0

    def compare(self, temperature: float | None = None) -> LogProbDifference:
        self.asked += 1
        return self.told


def watch(
    trainers: Trainers, dtype: str = "bfloat16", staleness: int | None = None
) -> AgreementWatch:
    config = Config.model_validate(
        {
            "model": {"path": str(MODEL), "dtype": dtype},
            "algorithm": {"name": "grpo"},
            "rollout": {"staleness": staleness},
            "agreement": {"window": 3},
        }
    )
    engines: Any = SimpleNamespace(served=False)
    return AgreementWatch(resolve_run(config), trainers, engines)  # type: ignore[arg-type]


def test_an_engine_in_process_is_watched_in_16_bits_and_only_held_to_its_limit_in_float32() -> None:
    trainers = Trainers()
    trainers.told = found(1e-6, largest=9e-4)
    assert watch(trainers, "float32").after_log_probs(1) == {} and trainers.asked == 1
    assert watch(trainers, "float32", staleness=1).after_log_probs(1) == {}
    trainers.told = found(1e-6, largest=2e-3)
    with pytest.raises(
        AgreementError, match=r"step 3: log-probs of sampled tokens differ by up to 0\.002 nats"
    ):
        watch(trainers, "float32").after_log_probs(3)
    trainers = Trainers()
    metrics = watch(trainers).after_log_probs(1)
    assert (metrics["agreement/mean"], metrics["agreement/max"], metrics["agreement/p999"]) == (
        0.006,
        3.0,
        0.3,
    )
    assert "agreement/unlikely_mean" not in metrics  # there were none
    assert not any("canary" in name for name in metrics)


def test_a_step_past_a_limit_stops_the_run_and_is_named() -> None:
    trainers = Trainers()
    here = watch(trainers)
    trainers.told = found(0.006, p99=0.21)
    with pytest.raises(
        AgreementError,
        match=r"step 4: log-probs of sampled tokens differ by 0\.21 nats in their 99 %",
    ):
        here.after_log_probs(4)


def test_a_run_that_is_continued_remembers_what_it_began_with() -> None:
    trainers = Trainers()
    here = watch(trainers)
    here.restore(
        [{"agreement/mean": 0.002}, {}, {"agreement/mean": 0.002}, {"agreement/mean": 0.002}]
    )
    told = [here.after_log_probs(step).get("agreement/trend") for step in (5, 6, 7)]
    assert told[:2] == [None, None] and told[2] == pytest.approx(3.0)
    trainers.told = found(0.0061)
    here.after_log_probs(8)
    with pytest.raises(AgreementError, match=r"step 9: .* times as far apart"):
        here.after_log_probs(9)
    fresh = watch(Trainers())
    assert all("agreement/trend" not in fresh.after_log_probs(step) for step in range(5))


def test_a_run_that_is_continued_leaves_out_what_older_weights_sampled_as_before() -> None:
    """Every batch is of version 0: the first is of the newest weights, the others are not."""

    def told(step: int, here: AgreementWatch) -> dict[str, float]:
        trainers.told = found(0.5 if step else 0.006)
        return here.after_log_probs(step + 1)

    trainers = Trainers()
    live, resumed = (watch(trainers, staleness=1) for _ in range(2))
    rows = [told(step, live) for step in (0, 1, 1, 1, 1)]
    assert [row["agreement/mean"] for row in rows] == [0.006, *[0.5] * 4]
    resumed.restore(rows)
    for here in (live, resumed):
        trends = [told(0, here).get("agreement/trend") for _ in range(5)]
        assert trends == [*[None] * 4, 1.0]


def test_what_older_weights_sampled_is_shown_and_not_judged() -> None:
    """Its log-probs differ from the trainer's as the policies do. What the newest sampled is
    judged."""
    trainers = Trainers()
    here = watch(trainers, staleness=2)
    trainers.told = found(5.0)  # of version 0
    assert here.after_log_probs(2)["agreement/mean"] == 5.0
    with pytest.raises(AgreementError, match="step 1: log-probs of sampled tokens"):
        here.after_log_probs(1)


def test_the_canary_names_an_engine_by_its_number_while_another_is_lost() -> None:
    trainers: Any = Trainers()
    quiet = Sizes(1000, 0, 0.0, 0.0)
    agreeing = LogProbDifference(
        quiet, 0.0, {}, {0: quiet}, {0: quiet}, quiet, quiet, Sizes(0, 0, 0.0, 0.0)
    )
    trainers.compare_with = lambda batch, engines, temperature: [agreeing, found(0.5, p99=2.0)]
    config = Config.model_validate(
        {"model": {"path": str(MODEL)}, "rollout": {"engine": "sglang", "engines": 3}}
    )

    def prompt_log_probs(sequences: list[list[int]]) -> dict[int, list[list[float]]]:
        return {number: [[0.0] * (len(s) - 1) for s in sequences] for number in (0, 2)}

    engines: Any = SimpleNamespace(served=True, prompt_log_probs=prompt_log_probs)
    with pytest.raises(AgreementError, match="the weights of engine 2 are to blame"):
        AgreementWatch(resolve_run(config), trainers, engines).after_sync()
