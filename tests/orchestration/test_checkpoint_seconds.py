"""What the metric perf/save_s counts, by a clock that only calls move, each by a power of two."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_stare.config.schema import Config
from megatron_stare.driver import checkpoints
from megatron_stare.run_dir.run_state import RunState

STAGE, SAVE, ASKED, WAITED, FINISH, COMPLETE = (2**n for n in range(6))


class Ranks:
    """That write until they are told to have written."""

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


def of(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[checkpoints.Checkpoints, Ranks, Any]:
    clock = SimpleNamespace(now=0)
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: clock.now))
    config = Config.model_validate({"model": {"path": "x"}, "algorithm": "grpo", "checkpoint": settings})
    ranks: Any = Ranks(clock)
    folder: Any = Folder(clock)
    return checkpoints.Checkpoints(config, ranks, folder), ranks, clock


def waited(saves: checkpoints.Checkpoints) -> float:
    return saves.metrics()["perf/save_s"]


def test_a_save_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted are its beginning, each look and its completion; not the steps in between, and nothing twice."""
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
