"""Seconds of the metric perf/save_s, by a clock that only calls move, each by a power of two; and
what is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_stare.config.schema import Config
from megatron_stare.driver import checkpoints
from megatron_stare.run_dir.run_state import RunState

STAGE, SAVE, ASKED, WAITED, FINISH, COMPLETE = (2**n for n in range(6))


class Ranks:
    """Ranks that write until they are told to have written."""

    last_batch = None

    def __init__(self, clock: Any) -> None:
        self.clock, self.written = clock, False

    def save(self, folder: str, timeout_s: float | None) -> None:
        self.clock.now += SAVE

    def saved(self) -> bool:
        self.clock.now += ASKED
        return self.written

    def wait_saved(self, timeout_s: float | None) -> None:
        self.clock.now += WAITED

    def finish_save(self) -> dict[str, Any]:
        self.clock.now += FINISH
        return {}


class Folder:
    path = Path("run")

    def __init__(self, clock: Any) -> None:
        self.clock = clock

    def stage(self, state: RunState, beside: dict[str, bytes]) -> Any:
        self.clock.now += STAGE
        return SimpleNamespace(folder=Path("x"), final=Path("step_000001"))

    def complete(self, staged: Any, files: Any) -> None:
        self.clock.now += COMPLETE

    def checkpoints(self) -> list[Path]:
        return []

    def forget(self, steps: Any) -> None:
        pass


def of(
    monkeypatch: pytest.MonkeyPatch, note: Callable[[str], None] = print, **settings: Any
) -> tuple[checkpoints.Checkpoints, Ranks, Any]:
    clock = SimpleNamespace(now=0)
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: clock.now))
    config = Config.model_validate(
        {"model": {"path": "x"}, "algorithm": "grpo", "checkpoint": settings}
    )
    ranks: Any = Ranks(clock)
    folder: Any = Folder(clock)
    return checkpoints.Checkpoints(config, ranks, folder, note), ranks, clock


def waited(saves: checkpoints.Checkpoints) -> float:
    return saves.metrics()["perf/save_s"]


def test_a_save_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted are its beginning, each look and its completion; not the steps in between, and
    nothing twice."""
    saves, ranks, clock = of(monkeypatch)
    saves.look()
    assert waited(saves) == 0
    saves.save(RunState(step=1))
    clock.now += 1000
    assert waited(saves) == STAGE + SAVE
    saves.look()
    clock.now += 1000
    assert waited(saves) == ASKED
    ranks.written = True
    saves.look()
    assert waited(saves) == ASKED + WAITED + FINISH + COMPLETE
    saves.look()
    assert waited(saves) == 0


def test_a_save_that_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    saves, _, clock = of(monkeypatch)
    saves.save(RunState(step=1))
    clock.now += 1000
    saves.look()
    saves.save(RunState(step=2))
    assert waited(saves) == 2 * (STAGE + SAVE) + ASKED + WAITED + FINISH + COMPLETE


def test_a_save_in_the_foreground(monkeypatch: pytest.MonkeyPatch) -> None:
    saves, _, _ = of(monkeypatch, background=False)
    saves.save(RunState(step=1))
    assert waited(saves) == STAGE + SAVE + WAITED + FINISH + COMPLETE


@pytest.mark.parametrize(
    ("settings", "logged", "told"),
    [
        ({}, {}, False),
        ({"best_by": "reward/mean", "keep_best": 1}, {"reward/mean": 0.5}, False),
        ({"best_by": "reward/mean", "keep_best": 1}, {}, True),
    ],
    ids=["by nothing", "by what is logged", "by what is not"],
)
def test_who_keeps_the_best_by_what_nothing_logs_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: dict[str, Any],
    logged: dict[str, float],
    told: bool,
) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **logged}) + "\n")
    monkeypatch.setattr(Folder, "path", tmp_path)
    notes: list[str] = []
    saves, _, _ = of(monkeypatch, notes.append, background=False, **settings)
    for step in (1, 2):
        saves.save(RunState(step=step))
    wanted = (
        "checkpoint.best_by: nothing was logged as reward/mean so far, so no checkpoint is kept"
        " for it"
    )
    assert notes == [wanted] * told
