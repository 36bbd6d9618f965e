"""How often a run is started again, and when; pure, but for the file that says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from megatron_stare.config.fault_sections import FaultsConfig, RunFaults
from megatron_stare.config.load import dump_yaml, validate
from megatron_stare.process.recovery import (
    RESTARTS_FILE,
    Attempts,
    RecoveryRule,
    note_restart,
    restarts_of,
)


def test_the_wait_doubles_up_to_the_longest_and_the_restarts_end() -> None:
    attempts = Attempts(
        RecoveryRule(attempts=5, window_steps=10, back_off_s=2.0, longest_back_off_s=11.0)
    )
    assert [attempts.lost(7) for _ in range(7)] == [2.0, 4.0, 8.0, 11.0, 11.0, None, None]


def test_steps_that_are_made_again_are_no_progress() -> None:
    """Lost at step 30, continued from 20, and lost at 25, 29, 24: never beyond 30."""
    attempts = Attempts(RecoveryRule(attempts=3, window_steps=5, back_off_s=1.0))
    assert [attempts.lost(step) for step in (30, 25, 29, 24)] == [1.0, 2.0, 4.0, None]


def test_restarts_count_until_the_run_has_come_further() -> None:
    attempts = Attempts(RecoveryRule(attempts=2, window_steps=10, back_off_s=1.0))
    assert attempts.lost(20) == 1.0
    assert attempts.lost(29) == 2.0  # 9 steps further
    assert attempts.lost(30) == 2.0  # 10: the first counts no longer, the second does
    assert attempts.lost(38) is None
    assert attempts.lost(40) == 1.0  # all of them are out, and none was made at 38
    assert attempts.counting == 1


def test_progress_makes_any_number_possible() -> None:
    attempts = Attempts(RecoveryRule(attempts=1, window_steps=4, back_off_s=3.0))
    assert {attempts.lost(4 * n) for n in range(50)} == {3.0}


def test_none_is_none() -> None:
    assert Attempts(RecoveryRule(attempts=0)).lost(5) is None


def test_the_rule_is_that_of_the_section_however_it_is_read() -> None:
    """A supervisor reads what a run wrote down without the configuration's own code."""
    assert RecoveryRule.of(RunFaults()) == RecoveryRule()
    asked = {"attempts": 7, "window_steps": 2, "back_off_s": 0.5, "longest_back_off_s": 9.0}
    config = validate({"model": {"path": "m"}, "faults": {"run": asked}}, "a.yaml")
    assert RecoveryRule.of(config.faults.run) == RecoveryRule(7, 2, 0.5, 9.0)
    assert RecoveryRule.of(yaml.safe_load(dump_yaml(config))["faults"]["run"]) == RecoveryRule(
        7, 2, 0.5, 9.0
    )
    assert RecoveryRule.of({"attempts": 1, "of_a_newer_release": 3}) == RecoveryRule(attempts=1)
    assert "run" in FaultsConfig.model_fields


def test_every_restart_is_a_line(tmp_path: Path) -> None:
    assert restarts_of(tmp_path) == 0
    note_restart(tmp_path, "driver", "a trainer rank\nprocess died", 3, 2.0)
    note_restart(tmp_path, "supervisor", "the driver was killed by SIGKILL", 5, 4.0)
    rows = [json.loads(line) for line in (tmp_path / RESTARTS_FILE).read_text().splitlines()]
    assert [(row["by"], row["step"], row["wait_s"]) for row in rows] == [
        ("driver", 3, 2.0),
        ("supervisor", 5, 4.0),
    ]
    assert restarts_of(tmp_path) == 2


@pytest.mark.parametrize("wrong", [{"attempts": -1}, {"window_steps": 0}, {"back_off_s": -1}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="greater than or equal"):
        RunFaults(**wrong)
