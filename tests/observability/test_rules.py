"""Every alert at its threshold, and none in a healthy run; what windows of earlier steps measure,
by worked numbers."""

import math
from typing import Any

import pytest

from megatron_stare.config.rollout_sections import coarsest_dtype
from megatron_stare.observability.metrics.conditions import Spike, Window
from megatron_stare.observability.metrics.rules import LEAST_AGREEMENT, QUIET_STEPS, RULES, Watch

HEALTHY = {
    "entropy/mean": 0.1,
    "entropy/target": 0.1,
    "reward/timeouts": 0.0,
    "reward/crashes": 0.0,
    "response/truncated": 0.2,
    "rollout/logprob_diff_max": 1e-5,
    "optimizer/grad_norm": 1.0,
    "update/finite": 1.0,
    "update/empty": 0.0,
    "group/degenerate": 0.9,
    "agreement/trend": 2.0,
    "agreement/mean": 0.02,
    "rollout/retried": 0.0,
    "rollout/retried_late": 0.0,
    "engine/dead": 0.0,
    "engine/serving": 1.0,
}
GRPO = {key: value for key, value in HEALTHY.items() if key != "entropy/target"}


def follow(rows, first=1, **settings):
    """Alerts that are announced, as (step, line)."""
    watch = Watch(**settings)
    return [
        (step, a.announce()) for step, row in enumerate(rows, first) for a in watch.add(step, row)
    ]


def test_a_healthy_run_has_none():
    assert follow([HEALTHY] * 60) == []
    assert follow([{}] * 60) == []
    assert follow([dict.fromkeys(HEALTHY, math.nan)] * 60) == []


@pytest.mark.parametrize(
    ("change", "begins", "name"),
    [
        ({"reward/timeouts": 3.0}, "verifying answers: 3 timed out", "reward failures"),
        (
            {"reward/timeouts": 1.0, "reward/crashes": 2.0},
            "1 timed out and 2 crashed",
            "reward failures",
        ),
        ({"response/truncated": 0.25}, "25% of the responses are cut off", "responses cut off"),
        ({"rollout/logprob_diff_max": 2e-3}, "differ by 0.002 nats", "engine and trainer differ"),
        (
            {"optimizer/grad_norm": 10.5},
            "gradient norm 10.5 is 10 times the median of earlier steps, 1",
            "gradient spike",
        ),
        (
            {"update/finite": 0.0, "optimizer/grad_norm": math.inf},
            "gradient norm inf, no optim",
            "no finite gradient",
        ),
        (
            {"update/finite": 0.0, "update/count": 3.0},
            "3 of this step's optimizer steps",
            "no finite gradient",
        ),
        (
            {"update/empty": 2.0},
            "no token had a loss in 2 of this step's mini-batches",
            "nothing to learn",
        ),
        (
            {"agreement/trend": 2.1},
            "differ 2.1 times as much as at the start, 0.02 nats",
            "engine and trainer drift apart",
        ),
        (
            {"rollout/retried": 3.0, "rollout/retried_late": 1.0},
            "3 requests for responses were lost",
            "requests lost",
        ),
        ({"engine/dead": 2.0}, "engine losses: 2; engines that serve now: 1", "engines lost"),
        (
            {"group/degenerate": 0.95},
            "95% of the groups have equal rewards",
            "groups without signal",
        ),
    ],
)
def test_it_begins_once_and_is_over_once(change, begins, name):
    rows = [HEALTHY] * 20 + [HEALTHY | change] * 3 + [HEALTHY] * 20
    (begin, text), (end, over) = follow(rows)
    assert begin == 21
    assert text.startswith("step 21: ")
    assert begins in text
    assert (end, over) == (23 + QUIET_STEPS, f"over: {name} (steps 21 to 23)")


def test_a_value_that_comes_and_goes_is_one_alert():
    rows = [HEALTHY | {"response/truncated": 0.15 + 0.1 * (step % 2)} for step in range(40)]
    assert [step for step, _ in follow(rows)] == [2]


def test_the_way_to_the_target_is_no_alert():
    rows = [HEALTHY | {"entropy/mean": 2.5 - 0.02 * step} for step in range(100)]
    assert follow(rows) == []


def test_leaving_the_band_for_long_is():
    out = HEALTHY | {"entropy/mean": 0.07}
    assert follow([HEALTHY] * 5 + ([out] * 9 + [HEALTHY]) * 3) == []
    ((step, text),) = follow([HEALTHY] * 5 + [out] * 30)
    assert step == 15
    assert "entropy 0.07 is below its target's band, 0.075 to 0.125" in text
    # stepped over the band
    assert follow([HEALTHY | {"entropy/mean": 0.2}] * 5 + [out] * 30)[0][0] == 16


def test_collapse_without_a_target():
    def falling(halving, steps=120, **row):
        return [
            GRPO | {"entropy/mean": 0.8 * 2 ** (-step / halving)} | row for step in range(steps)
        ]

    (step, text), *_ = follow(falling(30))
    assert step >= 30  # not before half of it is gone
    assert "halves every 30 steps" in text
    assert follow(falling(80, 200)) == []  # slow sharpening
    assert follow(falling(30, 28)) == []  # the fast first steps
    assert not any("halves" in text for _, text in follow(falling(30, **{"entropy/target": 0.1})))


def test_a_spike_needs_a_history_and_zero_is_none():
    spike = HEALTHY | {"optimizer/grad_norm": 50.0}
    assert follow([HEALTHY] * 5 + [spike]) == []
    assert follow([HEALTHY | {"optimizer/grad_norm": 0.0}] * 30 + [HEALTHY]) == []


def test_the_coarsest_dtype_of_both_sides_decides():
    assert coarsest_dtype() == coarsest_dtype("float32", None, None) == "float32"
    assert coarsest_dtype("float32", "float16", None) == "float16"
    assert coarsest_dtype("bfloat16", "float16", None) == "bfloat16"
    assert coarsest_dtype("bfloat16", None, "fp8_e4m3") == "fp8_e4m3"
    assert coarsest_dtype("bfloat16", None, "fp8_e4m3", "fp8") == "fp8"
    assert LEAST_AGREEMENT.keys() == {"fp8", "fp8_e4m3", "bfloat16", "float16", "float32"}


def test_bfloat16_differs_by_more_and_may():
    rows = [HEALTHY | {"rollout/logprob_diff_max": 0.2}] * 3
    assert follow(rows, dtype="bfloat16") == []
    assert len(follow(rows)) == 1


def test_a_mean_that_is_nearly_nothing_may_grow():
    assert follow([HEALTHY | {"agreement/trend": 9.0, "agreement/mean": 4e-3}] * 3) == []


def test_a_resumed_run_remembers_what_still_holds_and_ends_it_as_if_it_had_not_stopped():
    out = HEALTHY | {"entropy/mean": 0.07, "reward/crashes": 1.0}
    rows = [row | {"step": step} for step, row in enumerate([HEALTHY] * 5 + [out] * 20, 1)]
    resumed, undisturbed = Watch(), Watch()
    resumed.restore(rows)
    for row in rows:
        undisturbed.add(int(row["step"]), row)
    assert sorted(resumed.active) == ["entropy off target", "reward failures"]
    assert resumed.add(26, out) == undisturbed.add(26, out) == []
    for step in range(27, 27 + QUIET_STEPS):
        changed = resumed.add(step, HEALTHY)
        assert changed == undisturbed.add(step, HEALTHY)
    assert sorted((a.name, a.first_step, a.last_step, a.over) for a in changed) == [
        ("entropy off target", 15, 26, True),
        ("reward failures", 6, 26, True),
    ]
    assert resumed.active == {}


def test_names_tell_rules_apart():
    assert len(RULES) == len({(rule.when, rule.flag) for rule in RULES.values()})
    assert [*RULES] == [rule.name for rule in RULES.values()]


# 1, 2, 3, 4, 100: median 3, absolute deviations 2, 1, 0, 1, 97, whose median is 1
FIVE = (1.0, 2.0, 3.0, 4.0, 100.0)
SPREAD = 1.4826


def window(values: tuple[float, ...] = FIVE) -> Window:
    found = Window(5, 5)
    for value in values:
        found.add(value)
    return found


def distance(figure: float, values: tuple[float, ...] = FIVE, **more: Any) -> Any:
    """In spreads, from the median of `values`; None where there is nothing to compare with."""
    return (
        Spike(("a/b",), steps=5, known=5, **more)
        .judge({"a/b": figure}, window(values))
        .measured.get("away")
    )


def test_a_distance_is_measured_in_median_absolute_deviations() -> None:
    assert window().scale() == (3.0, SPREAD)
    assert distance(3.0 + 4 * SPREAD) == pytest.approx(4)  # one odd step before it has no say
    assert distance(3.0 - 4 * SPREAD) == 0.0
    assert distance(3.0 - 4 * SPREAD, both_ways=True) == pytest.approx(4)
    assert distance(50.0, least=50.0) == 0.0
    assert distance(51.0, least=50.0) == pytest.approx(48 / SPREAD)


def test_there_is_no_distance_without_anything_to_compare_with() -> None:
    assert distance(1e9, FIVE[:4]) is None
    assert distance(1e9, (0.0,) * 5) is None
    # at least a twentieth of the median
    assert distance(3.0, (2.0,) * 5) == pytest.approx(1 / (0.05 * 2))
    assert distance(math.nan) is None and distance(math.inf) is None
    # passed over: the five are still there
    assert window((*FIVE, math.nan, math.inf)).scale() == (3.0, SPREAD)
    assert window((7.0, *FIVE)).scale() == (3.0, SPREAD)  # the oldest has left the window


def growths(steps: int, values: tuple[float, ...]) -> list[float | None]:
    found, told = Window(steps, first=steps), []
    for value in values:
        found.add(value)
        told.append(found.growth())
    return told


def test_growth_is_that_of_the_newest_median_over_the_first() -> None:
    told = growths(3, (0.02, 9.0, 0.01, 0.02, 0.04, 0.03, 0.08, 7.0, 0.06))
    # 9.0 and 7.0 are single steps
    assert told[:5] == [None] * 5 and told[5:] == pytest.approx([1.5, 2.0, 4.0, 4.0])
    assert growths(2, (0.0,) * 6) == [None] * 6
