"""A checkpoint under way when a run ends gets the time that the end leaves."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace

import pytest

from megatron_stare.driver.parts import INTERRUPTED_S, Saves
from megatron_stare.errors import (
    GuardError,
    NonFiniteError,
    RewardFailureError,
    RollBack,
    UserError,
)
from megatron_stare.process import interruption
from megatron_stare.process.interruption import Interruption
from megatron_stare.process.workers import WorkerLostError
from megatron_stare.rollout.agreement.agreement import AgreementError
from megatron_stare.rollout.engines.engine import EngineLostError
from megatron_stare.run_dir.run_state import RunState


class UnderWay:
    """Stands for checkpoints of which one is being written, and notes how long it is waited for."""

    newest = 3

    def __init__(self) -> None:
        self.waits: list[float | None] = []

    def finish(self, timeout_s: float | None = None) -> None:
        self.waits.append(timeout_s)


@pytest.mark.parametrize(
    ("number", "deadline_s", "gave_up", "longest"),
    [
        (signal.SIGUSR1, None, False, None),  # Slurm's early signal: no limit of ours
        (None, None, False, None),  # --stop-after
        (signal.SIGTERM, 25.0, False, 25.0),
        (signal.SIGTERM, None, True, INTERRUPTED_S),  # the update did not end in time
    ],
)
def test_a_save_under_way_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
    number: int | None,
    deadline_s: float | None,
    gave_up: bool,
    longest: float | None,
) -> None:
    current = Interruption()
    current.number, current.gave_up, current.grace_s = number, gave_up, 30.0
    current.time_is_up = number is None
    current.deadline = None if deadline_s is None else time.monotonic() + deadline_s
    monkeypatch.setattr(interruption, "_current", current)
    checkpoints = UnderWay()
    state, guards = SimpleNamespace(step=3), SimpleNamespace(ends=False)
    saves = Saves(None, checkpoints, state, guards, None, None, None, None)  # type: ignore[arg-type]
    saves.close(KeyboardInterrupt, KeyboardInterrupt(), None)
    (waited,) = checkpoints.waits
    if longest is None:
        assert waited is None
    else:
        assert waited is not None and longest - 5 < waited <= longest


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (RollBack(3, "entropy", ()), [None]),
        (GuardError("collapsed"), [None]),
        (NonFiniteError("three in a row"), [None]),
        (RewardFailureError("too many"), [INTERRUPTED_S]),
        (EngineLostError("gone"), [INTERRUPTED_S]),
        (AgreementError("they differ"), [INTERRUPTED_S]),
        (RuntimeError("a fault of ours"), [INTERRUPTED_S]),
        (WorkerLostError("a rank died"), []),
        (None, []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_that_leaves_the_ranks_leaves_the_save_under_way(
    error: Exception | None, waits: list[float | None]
) -> None:
    """A step later it would be the newest, and the steps up to it would not be made again."""

    class FailsToo(UnderWay):
        def finish(self, timeout_s: float | None = None) -> None:
            super().finish(timeout_s)
            raise UserError("the disk is full")

    for checkpoints in (UnderWay(), FailsToo()):
        saves = Saves(None, checkpoints, None, None, None, None, None, None)  # type: ignore[arg-type]
        saves.close(type(error), error, None)
        assert checkpoints.waits == waits


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (WorkerLostError("rank 0 died\nlong"), "step 4 could not be saved: rank 0 died\n"),
        (RuntimeError("at ...\nOutOfMemoryError: CUDA"), "saved: OutOfMemoryError: CUDA\n"),
        (RuntimeError(), "saved: RuntimeError\n"),
        (UserError("the disk is full"), None),
    ],
)
def test_a_last_save_that_fails_leaves_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    said: str | None,
) -> None:
    """The job goes on from an earlier checkpoint. A full disk has to be seen to first."""
    current = Interruption()
    current.number, current.grace_s = signal.SIGUSR1, 30.0
    monkeypatch.setattr(interruption, "_current", current)

    class Fails(UnderWay):
        def save(self, state: object, timeout_s: float | None) -> None:
            raise error

    config = SimpleNamespace(sglang=SimpleNamespace(colocated=False))
    state, guards = RunState(step=4), SimpleNamespace(ends=False)
    saves = Saves(config, Fails(), state, guards, None, None, None, dict)  # type: ignore[arg-type]
    if said is None:
        with pytest.raises(UserError, match="full"):
            saves.close(KeyboardInterrupt, KeyboardInterrupt(), None)
        return
    saves.close(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err.endswith(said)
