"""A checkpoint that all ranks have written counts during the evaluation or rollout that follows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.runs import ROOT

from megatron_stare.config.load import load_config
from megatron_stare.driver import checkpoints
from megatron_stare.driver.checkpoints import Checkpoints
from megatron_stare.driver.parts import HeldOut
from megatron_stare.driver.training_source import TrainingSource
from megatron_stare.errors import UserError
from megatron_stare.process.workers import WorkerLostError
from megatron_stare.run_dir.run_state import RunDir, RunState

LOST = WorkerLostError("a rank died")


class Ranks:
    """Ranks that write until they are told to have written, and that one thread may call at once.

    Args:
        error: what `finish_save` raises; None: nothing.
    """

    last_batch = None

    def __init__(self, error: Exception | None = None) -> None:
        self.written, self.error, self.asked = False, error, 0

    def save(self, folder: str, timeout_s: float | None) -> None:
        self.written = False

    def saved(self) -> bool:
        self.asked += 1
        return self.written

    def wait_saved(self, timeout_s: float | None) -> None:
        assert self.written

    def finish_save(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {}


class Run:
    """A run whose save of step 2 has begun."""

    def __init__(self, folder: Path, ranks: Ranks, runner: str = "ray") -> None:
        settings = ["run.dir=" + str(folder / "run"), f"runtime.runner={runner}", "run.steps=2"]
        settings += ["parallel.tensor=1", "run.keep_checkpoints=1"]
        config = load_config(ROOT / "configs/quickstart.yaml", settings)
        self.dir, self.ranks, self.state = RunDir.create(config), ranks, RunState(step=2)
        self.checkpoints = Checkpoints(config, ranks, self.dir)  # type: ignore[arg-type]
        self.checkpoints.save(RunState(step=1))
        ranks.written = True
        self.checkpoints.finish()
        self.checkpoints.save(self.state)
        self.config = config

    def steps(self) -> list[str]:
        return [path.name for path in self.dir.checkpoints()]

    def written(self, progress: Callable[[int, int], None] = lambda *_: None) -> None:
        """Lets the ranks end their writing, and waits for the checkpoint, at most 5 s."""
        progress(1, 8)
        self.state.step = 99  # a checkpoint is of its own step
        self.ranks.written = True
        until = time.monotonic() + 5
        while "step_000002" not in self.steps() and time.monotonic() < until:
            time.sleep(0.01)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Stands for the end of a phase, which calls the ranks."""
    try:
        yield
    finally:
        assert "checkpoint" not in [thread.name for thread in threading.enumerate()]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "LOOK_S", 0.02)


def test_an_evaluation_that_loses_a_rank_leaves_the_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, Ranks())

    class Evaluator:
        def evaluate(self, evaluation: Any, step: int, version: int, progress: Any) -> None:
            run.written(progress)
            raise LOST

    evaluation: Any = SimpleNamespace(task=SimpleNamespace(name="held out"))
    samples: Any = SimpleNamespace(quiet=nullcontext, version=2)
    training: Any = Evaluator()
    monitor: Any = None
    part = HeldOut(
        run.config,
        [evaluation],
        run.state,
        run.dir,
        monitor,
        phase,
        samples=samples,
        training=training,
        own=None,
        weights=dict,  # type: ignore[arg-type]
        looking=run.checkpoints.looking,
        synced=lambda: None,
        progress=lambda done, wanted: None,
    )
    with pytest.raises(WorkerLostError):
        part.after_step()
    run.dir.forget_unfinished()
    assert "step_000002" in run.steps()
    assert RunState.read(run.dir.checkpoints()[-1]).step == 2


def test_a_rollout_that_loses_a_rank_leaves_the_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, Ranks())

    class Source:
        def next(self, step: int) -> None:
            run.written()
            raise LOST

    source: Any = TrainingSource(
        Source(),  # type: ignore[arg-type]
        lambda batch: batch,
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        phase,
        lambda version: None,
        run.checkpoints.looking,
    )
    with pytest.raises(WorkerLostError):
        source.next(3)
    run.dir.forget_unfinished()
    assert "step_000002" in run.steps()


def test_older_checkpoints_go_at_the_next_look_and_the_caller_has_the_ranks(tmp_path: Path) -> None:
    run = Run(tmp_path, Ranks())
    threads = threading.active_count()
    with run.checkpoints.looking():
        run.written()
    assert threading.active_count() == threads
    assert run.steps() == ["step_000001", "step_000002"] and run.checkpoints.newest == 2
    run.checkpoints.look()
    assert run.steps() == ["step_000002"]
    run.checkpoints.save(RunState(step=3))
    with run.checkpoints.looking():
        time.sleep(0.1)
    asked = run.ranks.asked
    time.sleep(0.1)
    assert run.ranks.asked == asked > 1 and run.steps() == ["step_000002"]
    run.ranks.written = True
    run.checkpoints.finish()
    assert run.steps() == ["step_000003"]


@pytest.mark.parametrize("later", [None, LOST], ids=["alone", "with another error"])
def test_a_save_that_fails_ends_the_run_after_the_block(
    tmp_path: Path, later: Exception | None
) -> None:
    run = Run(tmp_path, Ranks())
    run.ranks.error = UserError("the disk is full")
    run.ranks.written = True

    def block() -> None:
        with run.checkpoints.looking():
            time.sleep(0.1)
            if later is not None:
                raise later

    with pytest.raises(UserError, match="died" if later else "disk is full"):
        block()
    assert run.steps() == ["step_000001"]


def test_a_rank_of_this_process_is_called_by_no_thread(tmp_path: Path) -> None:
    run = Run(tmp_path, Ranks(), runner="inline")
    run.ranks.written = True
    with run.checkpoints.looking():
        time.sleep(0.1)
    assert run.ranks.asked == 0 and run.steps() == ["step_000001"]
    run.checkpoints.look()
    assert run.steps() == ["step_000002"]
