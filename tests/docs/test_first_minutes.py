"""README alone leads to a run on data and with a reward of one's own: its commands are run as they
stand, and the committed transcript is of these commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.runs import ROOT, metrics

sys.path.insert(0, str(ROOT / "benchmarks"))

import first_minutes

TRANSCRIPT = ROOT / "benchmarks/results/first_minutes.json"


def test_the_transcript_is_of_readmes_commands_and_took_less_than_ten_minutes() -> None:
    told = json.loads(TRANSCRIPT.read_text())
    assert [each["command"] for each in told["commands"]] == first_minutes.commands()
    assert told["seconds"] < 600
    assert told["seconds"] == pytest.approx(sum(each["seconds"] for each in told["commands"]))


@pytest.mark.slow
def test_readmes_commands_lead_to_a_trained_policy_and_a_figure(tmp_path: Path) -> None:
    told = first_minutes.run(tmp_path)
    assert [each["command"] for each in told] == first_minutes.commands()
    folder = tmp_path / "mine/runs/first"
    rows = metrics(folder)
    assert len(rows) == 60
    for row in rows:  # README's reward is 1 or 0; that of `init` would give parts of it
        assert row["reward/mean"] * 256 == pytest.approx(round(row["reward/mean"] * 256), abs=1e-6)
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"]
    assert (folder / "hf/model.safetensors").is_file()
