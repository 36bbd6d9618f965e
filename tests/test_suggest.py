"""`megatron-stare suggest`: weights that meet the demand, within bounds, from a run's metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_stare.cli import main
from megatron_stare.planning.suggestion import (
    AMPLIFY_MAX,
    ATTENUATE_MIN,
    MARGIN,
    TARGET_SHARE,
    Facts,
    suggest,
)


def forecast(facts: Facts, amplify: float, attenuate: float) -> float:
    return facts.plain + (amplify - 1) * facts.plus + (attenuate - 1) * facts.minus


@pytest.mark.parametrize(
    ("plain", "plus", "minus"),
    [
        (-0.001, 0.004, -0.004),  # both, within the bounds
        (-0.001, 0.004, 0.001),  # only L+ is of use
        (-0.001, -0.002, -0.004),  # only L-
        (-0.004, 0.001, -0.009),  # L- meets most of it
        (-0.006, 0.004, -0.006),  # M at its bound, W makes up for it
        (-0.004, 0.003, -0.03),
    ],
)
def test_the_weights_meet_the_demand_with_the_least_change(
    plain: float, plus: float, minus: float
) -> None:
    facts = Facts(1.0, 0.8, plain, plus, minus)
    found = suggest(facts)
    assert found.holds and found.entropy_target == TARGET_SHARE
    reached = forecast(facts, found.amplify, found.attenuate)
    assert reached == pytest.approx(-MARGIN * plain, rel=1e-9)
    assert 1 <= found.amplify <= AMPLIFY_MAX and ATTENUATE_MIN <= found.attenuate <= 1
    if plus <= 0:
        assert found.amplify == 1.0
    if minus >= 0:
        assert found.attenuate == 1.0
    distance = (found.amplify - 1) ** 2 + (found.attenuate - 1) ** 2
    for step in range(-20, 21):  # other pairs on the same line are farther from 1, or out of bounds
        amplify = found.amplify + step / 50
        if minus >= 0 or plus <= 0 or not 1 <= amplify <= AMPLIFY_MAX:
            continue
        attenuate = 1 + (-(1 + MARGIN) * plain - (amplify - 1) * plus) / minus
        if ATTENUATE_MIN <= attenuate <= 1:
            assert (amplify - 1) ** 2 + (attenuate - 1) ** 2 >= distance - 1e-12


def test_what_no_weights_can_hold_is_said() -> None:
    found = suggest(Facts(1.0, 0.5, -0.02, 0.001, -0.001))
    assert not found.holds
    assert (found.amplify, found.attenuate) == (AMPLIFY_MAX, ATTENUATE_MIN)
    assert "entropy_bonus" in found.reasons[-1]
    useless = suggest(Facts(1.0, 0.5, -0.02, -0.0011, 0.001))
    assert (useless.amplify, useless.attenuate, useless.holds) == (1.0, 1.0, False)
    assert sum("does not help" in reason for reason in useless.reasons) == 2


def test_entropy_that_does_not_fall_needs_no_strong_weights() -> None:
    found = suggest(Facts(0.8, 0.9, 0.001, 0.002, -0.002))
    assert (found.amplify, found.attenuate, found.holds) == (1.1, 0.9, True)
    assert found.entropy_target == pytest.approx(0.8 * TARGET_SHARE)


def test_what_cannot_be_told_from_0_is_amplified_if_nothing_else_holds() -> None:
    found = suggest(Facts(1.0, 0.5, -0.02, -0.0009, -0.001))
    assert (found.amplify, found.attenuate) == (AMPLIFY_MAX, ATTENUATE_MIN) and not found.holds
    assert any("too little to tell the sign" in reason for reason in found.reasons)
    holds = suggest(Facts(1.0, 0.5, -0.02, -0.0009, -0.1))
    assert holds.amplify == 1.0 and holds.holds


def written(folder: Path, rows: int, **columns: float) -> Path:
    """A run of so many steps, whose entropy falls from 1 by 0.01 a step."""
    folder.mkdir()
    lines = [
        {"step": step, "entropy/mean": 1.01 - step / 100, "loss/tokens": 2000.0, **columns}
        for step in range(1, rows + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_command_reads_what_stare_selected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(
        tmp_path / "run",
        60,
        **{
            "forecast/plain_change": -0.001,
            "forecast/a_phi_plus": -8.0,  # over 2,000 tokens: 0.004 a unit of W
            "forecast/a_phi_minus": 8.0,
            "forecast/mass_rare_plus": 9.0,
        },
    )
    assert main(["suggest", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == 50
    assert told["facts"] == pytest.approx(
        {"entropy": 0.98, "entropy_now": 0.53, "plain": -0.001, "plus": 0.004, "minus": -0.004}
    )
    assert told["suggested"]["amplify"] == pytest.approx(1.25)
    assert told["suggested"]["attenuate"] == pytest.approx(0.75)
    assert main(["suggest", str(run), "--steps", "20"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "steps 1 to 20: entropy went from 0.98 to 0.83 nats; forecast without reweighting -0.001"
        " nats a unit step"
    )
    assert (
        f"  entropy_target: {0.98 * TARGET_SHARE:.3g}\n  amplify: 1.25\n  attenuate: 0.75\n" in text
    )


def test_of_another_method_the_rare_tokens_stand_for_l_plus_and_l_minus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    masses = {"forecast/mass_rare_plus": 0.004, "forecast/mass_rare_minus": -0.003}
    run = written(tmp_path / "run", 12, **{"forecast/plain_change": -0.001, **masses})
    assert main(["suggest", str(run), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert (facts["plus"], facts["minus"]) == pytest.approx((0.004, -0.003))


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = written(tmp_path / "short", 9, **{"forecast/plain_change": -0.001})
    bare = written(tmp_path / "bare", 20)
    for words, message in (
        ([str(tmp_path / "none")], "this is not a run directory"),
        ([str(short)], "9 steps are too few"),
        ([str(bare)], "the steps have no forecast/plain_change"),
        ([str(bare), "--steps", "3"], "--steps"),
    ):
        assert main(["suggest", *words]) == 2
        assert message in capsys.readouterr().err
