"""Every alert at its threshold, and none in a healthy run."""

import math

import pytest

from megatron_stare.observability.metrics.alerts import CHECKS, QUIET_STEPS, Watch

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
    """What is announced, as (step, line)."""
    watch = Watch(**settings)
    return [(step, a.announce()) for step, row in enumerate(rows, first) for a in watch.add(step, row)]


def test_a_healthy_run_has_none():
    assert follow([HEALTHY] * 60) == []
    assert follow([{}] * 60) == []
    assert follow([dict.fromkeys(HEALTHY, math.nan)] * 60) == []


@pytest.mark.parametrize(
    ("change", "begins", "name"),
    [
        ({"reward/timeouts": 3.0}, "verifying answers: 3 timed out", "reward failures"),
        ({"reward/timeouts": 1.0, "reward/crashes": 2.0}, "1 timed out and 2 crashed", "reward failures"),
        ({"response/truncated": 0.25}, "25% of the responses are cut off", "responses cut off"),
        ({"rollout/logprob_diff_max": 2e-3}, "differ by 0.002 nats", "engine and trainer differ"),
        ({"optimizer/grad_norm": 10.5}, "gradient norm 10.5 is 10 times the median 1", "gradient spike"),
        ({"update/finite": 0.0, "optimizer/grad_norm": math.inf}, "gradient norm inf, no optim", "no finite gradient"),
        ({"update/finite": 0.0, "update/count": 3.0}, "3 of this step's optimizer steps", "no finite gradient"),
        ({"update/empty": 2.0}, "no token had a loss in 2 of this step's mini-batches", "nothing to learn"),
        ({"agreement/trend": 2.1}, "differ 2.1 times as much as at first, 0.02 nats", "engine and trainer drift apart"),
        ({"rollout/retried": 3.0, "rollout/retried_late": 1.0}, "3 requests for responses were lost", "requests lost"),
        ({"engine/dead": 2.0}, "engines were lost 2 times, 1 serve", "engines lost"),
        ({"group/degenerate": 0.95}, "95% of the groups have equal rewards", "groups without signal"),
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
    assert "entropy 0.07 is below its band 0.075 to 0.125" in text
    assert follow([HEALTHY | {"entropy/mean": 0.2}] * 5 + [out] * 30)[0][0] == 16  # stepped over the band


def test_collapse_without_a_target():
    def falling(halving, steps=120, **row):
        return [GRPO | {"entropy/mean": 0.8 * 2 ** (-step / halving)} | row for step in range(steps)]

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


def test_bfloat16_differs_by_more_and_may():
    rows = [HEALTHY | {"rollout/logprob_diff_max": 0.2}] * 3
    assert follow(rows, dtype="bfloat16") == []
    assert len(follow(rows)) == 1


def test_a_mean_that_is_nearly_nothing_may_grow():
    assert follow([HEALTHY | {"agreement/trend": 9.0, "agreement/mean": 4e-3}] * 3) == []


def test_a_resumed_run_remembers_and_says_again_what_still_holds():
    out = HEALTHY | {"entropy/mean": 0.07, "reward/crashes": 1.0}
    watch = Watch()
    watch.restore([HEALTHY] * 5 + [out] * 20)
    assert watch.active == {}
    assert [a.first_step for a in watch.add(26, out)] == [26, 26]
    assert sorted(watch.active) == ["entropy off target", "reward failures"]


def test_names_tell_checks_apart():
    assert len(CHECKS) == len({check.__doc__ for check in CHECKS.values()})
