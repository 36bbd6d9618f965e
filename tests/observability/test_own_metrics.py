"""Metrics of a user's own: found by their paths, told to every sink, and no more than missing where
they fail."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from test_monitor import Recorder, batch, settings

from megatron_stare.driver.opening import read_inputs
from megatron_stare.errors import ConfigError
from megatron_stare.observability.metrics.monitor import Monitor
from megatron_stare.observability.metrics.own_metrics import load_metrics
from megatron_stare.observability.sink import RunOutline
from megatron_stare.records.rollout_batch import RolloutBatch

FILE = """
def variety(batch):
    return {"own/texts": len({t.text for t in batch.trajectories}), "own/step": batch.step}


def broken(batch):
    raise RuntimeError("no text")


NUMBER = 3
"""


@pytest.fixture
def functions(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "mine.py").write_text(FILE)
    return load_metrics([f"{tmp_path}/mine.py:variety", f"{tmp_path}/mine.py:broken"])


def logged(monitor: Monitor, calls: list[Any], *steps: int) -> list[dict[str, float]]:
    for step in steps:
        monitor.begin_step()
        monitor.log(step, batch(step), {"x": 1.0})
    return [call[2] for call in calls if call[0] == "step"]


def monitor_of(own: dict[str, Any], calls: list[Any], folder: Path) -> Monitor:
    monitor = Monitor({"seen": Recorder(calls)}, RunOutline(folder, settings()), own)
    monitor.start()
    return monitor


def test_every_sink_is_told_them_of_every_step(
    functions: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    """And of one that fails the run is told once, though it is called again."""
    calls: list[Any] = []
    rows = logged(monitor_of(functions, calls, tmp_path), calls, 1, 2)
    assert [(row["own/texts"], row["own/step"]) for row in rows] == [(1.0, 1.0), (1.0, 2.0)]
    assert type(rows[0]["own/texts"]) is float
    warnings = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")
    ]
    (warning,) = warnings
    assert (
        "mine.py:broken' of observability.metrics failed: RuntimeError: no text; the run goes on"
        in warning
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"reward/mean": 0.0}, "there is a metric 'reward/mean' already"),
        ({"x": 0.0}, "there is a metric 'x' already"),
        ({"mine": 0.0}, "'mine' has no group: call it group/mine"),
        ({"own/x": "much"}, "could not convert"),
        ({"own/x": None}, "TypeError"),
    ],
)
def test_what_would_hide_or_break_the_run_s_own_is_left_out(
    given: dict[str, Any], said: str, tmp_path: Path, capsys: Any
) -> None:
    def fine(batch: RolloutBatch) -> dict[str, float]:
        return {"own/fine": math.pi}

    calls: list[Any] = []
    (row,) = logged(
        monitor_of({"wrong": lambda batch: given, "fine": fine}, calls, tmp_path), calls, 1
    )
    assert row["reward/mean"] == 0.5 and row["x"] == 1.0
    assert row["own/fine"] == math.pi and "own/x" not in row and "mine" not in row
    assert said in capsys.readouterr().err


def test_two_may_not_log_one_name(tmp_path: Path, capsys: Any) -> None:
    calls: list[Any] = []
    own = {"first": lambda batch: {"own/a": 1.0}, "second": lambda batch: {"own/a": 2.0}}
    (row,) = logged(monitor_of(own, calls, tmp_path), calls, 1)
    assert row["own/a"] == 1.0
    assert (
        "'second' of observability.metrics failed: ValueError: there is a metric 'own/a'"
        in capsys.readouterr().err
    )


def test_they_are_found_before_anything_starts(functions: dict[str, Any], tmp_path: Path) -> None:
    inputs = read_inputs(
        settings(f'observability.metrics=["{tmp_path}/mine.py:variety"]', "eval.prompts=0")
    )
    assert [*inputs.metrics] == [f"{tmp_path}/mine.py:variety"]
    with pytest.raises(ConfigError, match="did you mean 'variety'"):
        read_inputs(
            settings(f'observability.metrics=["{tmp_path}/mine.py:varieti"]', "eval.prompts=0")
        )
    with pytest.raises(ConfigError, match="NUMBER' is not a function of a batch"):
        load_metrics([f"{tmp_path}/mine.py:NUMBER"])
    with pytest.raises(ConfigError, match="is named more than once"):
        settings('observability.metrics=["a.b", "a.b"]')
