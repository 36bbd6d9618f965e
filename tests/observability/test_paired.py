"""Worked numbers of the interval and of the figures of a run."""

import math

import pytest

from megatron_stare.evaluation.estimates import student_quantile
from megatron_stare.observability.metrics.paired import compared, paired_interval, summary


def test_interval_worked_by_hand():
    # d = 1, 0, 1, 1, -1, 0, 0, 1: mean 3/8; sum of squares 5, so s^2 = (5 - 8 * 9/64) / 7 = 31/56
    before = [0, 1, 0, 0, 1, 0, 1, 0]
    after = [1, 1, 1, 1, 0, 0, 1, 1]
    mean, low, high = paired_interval(before, after)
    half = 2.364624251592784 * math.sqrt(31 / 56 / 8)  # Student's t of 7 degrees of freedom
    assert mean == 0.375
    assert (low, high) == pytest.approx((0.375 - half, 0.375 + half), rel=1e-12)
    assert half == pytest.approx(0.622020, abs=1e-6)


def test_interval_level():
    # s = 1/sqrt(3), s / sqrt(n) = 0.288675
    before, after = [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]
    assert paired_interval(before, after, level=0.99)[2] - 0.5 == pytest.approx(
        5.8409093097333 * 0.2886751345948
    )
    assert paired_interval(before, after, level=0.5)[1] == pytest.approx(
        0.5 - 0.7648923284043 * 0.2886751345948
    )


def test_pairing_is_what_makes_it_narrow():
    hard_and_easy = [0.0, 1.0] * 50
    assert paired_interval(hard_and_easy, hard_and_easy) == (0.0, 0.0, 0.0)
    shuffled = [1.0, 0.0] * 50
    assert paired_interval(hard_and_easy, shuffled)[2] > 0.19


def test_interval_of_one_pair_and_of_none():
    mean, low, high = paired_interval([0], [1])
    assert mean == 1
    assert math.isnan(low)
    assert math.isnan(high)
    with pytest.raises(ValueError, match="no pairs"):
        paired_interval([], [])
    with pytest.raises(ValueError, match="2 results before and 1 after"):
        paired_interval([0, 1], [1])
    with pytest.raises(ValueError, match="level"):
        paired_interval([0, 1], [1, 1], level=95)


DECODING = {"samples": 1, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8}
ASKED = {"problems": "a", "template": "b", "verifier": "math", "environment": "single_turn"}


def evaluation(**more):
    """Returns a record of two problems, whose numbers say nothing about them."""
    return {
        "problem": [0, 1],
        "correct": [0, 1],
        "greedy_correct": [1, 1],
        "decoding": DECODING,
        "asked": ASKED,
        **more,
    }


@pytest.mark.parametrize("name", ASKED)
def test_evaluations_that_ask_otherwise_are_not_paired(name):
    other = evaluation(asked={**ASKED, name: "other"})
    assert compared(evaluation(), other, "correct") == f"different {name}"
    assert compared(evaluation(), other, "greedy_correct") == f"different {name}"
    assert compared(evaluation(), evaluation(), "correct") == (0, 0, 0)


def test_what_an_earlier_release_did_not_record_counts_as_equal():
    earlier = evaluation()
    del earlier["asked"], earlier["decoding"]  # of the run's own task, one response a problem
    assert compared(earlier, earlier, "correct") == (0, 0, 0)
    assert compared(earlier, evaluation(), "correct") == (0, 0, 0)
    assert compared(evaluation(), earlier, "correct") == (0, 0, 0)
    several = evaluation(decoding={**DECODING, "samples": 4})
    assert compared(earlier, several, "correct") == "decoded differently"
    assert compared(several, earlier, "correct") == "decoded differently"


def test_greedy_results_depend_on_no_setting_of_sampling():
    cooler = evaluation(decoding={**DECODING, "samples": 4, "temperature": 0.6, "top_p": 0.9})
    assert compared(evaluation(), cooler, "correct") == "decoded differently"
    assert compared(evaluation(), cooler, "greedy_correct") == (0, 0, 0)
    shorter = evaluation(decoding={**DECODING, "max_new_tokens": 4})
    assert compared(evaluation(), shorter, "greedy_correct") == "decoded differently"


def test_summary_worked_by_hand():
    rows = [
        {
            "step": step,
            "entropy/mean": step / 100,
            "entropy/target": 0.2,
            "stare/gate": float(step < 10),
            "reward/mean": step / 30,
            "time/step_s": 2.0,
            "memory/tree_pss_gb": 3.0 + (step == 7),
            "reward/timeouts": 0.0,
            "reward/crashes": float(step == 4),
        }
        for step in range(1, 31)
    ]
    s = summary(rows)
    assert (s["steps"], s["last_step"], s["wall_s"], s["step_s"]) == (30, 30, 60, 2)
    assert s["entropy_last_share"] == pytest.approx(0.255)  # steps 21 to 30
    assert s["entropy_ratio"] == pytest.approx(1.275)
    assert s["in_band_share"] == pytest.approx(0.5)  # 0.21 to 0.25 lie within 0.2 +- 25 %
    assert s["entropy_last"] == pytest.approx(0.205)  # steps 11 to 30
    assert s["gate_on_share"] == pytest.approx(0.3)
    assert s["reward_first"] == pytest.approx(10.5 / 30)
    assert s["reward_last"] == pytest.approx(20.5 / 30)
    assert s["peak_memory_gb"] == 4
    assert s["reward_failures"] == 1
    assert summary(rows, last_share=0.1)["entropy_last_share"] == pytest.approx(0.29)


def test_summary_of_little_or_nothing():
    assert {key for key, value in summary([]).items() if value is not None} == {"steps"}
    s = summary([{"step": 1, "entropy/mean": 0.5, "reward/mean": math.nan}])
    assert s["entropy_last_share"] == s["entropy_last"] == 0.5
    assert (
        s["entropy_target"]
        is s["entropy_ratio"]
        is s["in_band_share"]
        is s["gate_on_share"]
        is None
    )
    assert s["reward_last"] is None


def test_summary_skips_gaps():
    s = summary(
        [{"step": 1, "entropy/mean": 0.1}, {"step": 2, "entropy/mean": math.nan}, {"step": 3}],
        last_share=1,
    )
    assert s["entropy_last_share"] == 0.1


def test_prompts_of_one_problem_are_not_independent():
    before, after = [0, 1, 0, 0, 1, 0, 1, 0], [1, 1, 1, 1, 0, 0, 1, 1]
    once = paired_interval(before, after)
    twice = paired_interval(before * 2, after * 2, problems=[*range(8)] * 2)
    # asked twice with the same results, nothing more is known
    assert twice == pytest.approx(once, rel=1e-12)
    assert paired_interval(before, after, problems=range(8)) == once
    # d = 1, 0, 1, 1, mean 3/4; problems {0, 2}, {1}, {3}: e = 2/4, -3/4, 1/4, sum of squares 7/8,
    # G = 16/6, so G/(G - 1) = 8/5, and t of 5/3 degrees of freedom
    half = student_quantile(0.95, 5 / 3) * math.sqrt(8 / 5 * 7 / 8) / 4
    assert student_quantile(0.95, 5 / 3) == pytest.approx(5.242265, abs=1e-6)
    got = paired_interval([0, 0, 0, 0], [1, 0, 1, 1], problems=[7, 5, 7, 3])
    assert got == pytest.approx((0.75, 0.75 - half, 0.75 + half), rel=1e-12)
    assert all(math.isnan(x) for x in paired_interval([0, 1], [1, 1], problems=[4, 4])[1:])
