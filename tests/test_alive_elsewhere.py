"""A run that is alive on another machine is not opened, even if locks are not shared."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.runs import ROOT

from megatron_stare.config.load import load_config
from megatron_stare.errors import UserError
from megatron_stare.run_dir import liveness
from megatron_stare.run_dir.heartbeat import COPY_S, HEARTBEAT_FILE, Beat, write_beat
from megatron_stare.run_dir.run_state import RunDir, refuse_busy

BEAT = Beat("driver", 4711, "update", since=5.0, moved=1.0, host="node7", process="running")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a run with a save in progress. A wait takes 0.6 s."""
    assert liveness.SILENT_S == 3 * COPY_S  # a live watcher writes at least twice
    monkeypatch.setattr(liveness, "SILENT_S", 0.6)
    monkeypatch.setattr(liveness, "LOOK_S", 0.02)
    path = tmp_path / "run"
    RunDir.create(load_config(ROOT / "configs/quickstart.yaml", [f"run.dir={path}"])).close()
    (path / "checkpoints" / "step_000150.abcd1234.tmp").mkdir(parents=True)
    return path


def saving(run: Path) -> bool:
    return any((run / "checkpoints").glob("*.tmp"))


@contextmanager
def beating(run: Path, beat: Beat, then: Beat | None = None) -> Iterator[None]:
    """Writes a heartbeat, and from another thread the next ones: `then`, or later ones whose clock
    is years behind."""
    write_beat(run / HEARTBEAT_FILE, replace(beat, written=10.0))
    ended = threading.Event()

    def write() -> None:
        written = 10.0
        while not ended.wait(0.05):
            written += 0.05
            write_beat(run / HEARTBEAT_FILE, then or replace(beat, written=written))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_run_whose_heartbeat_moves_is_refused_and_keeps_its_save(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with beating(run, BEAT):
        with pytest.raises(UserError, match="alive on node7") as refused:
            RunDir.reopen(run)
        with pytest.raises(UserError, match="alive on node7"):
            refuse_busy(run)
    assert refused.value.where == str(run) and saving(run)
    assert "last on node7: waiting 0.6 s" in capsys.readouterr().err
    opened = RunDir.reopen(run)  # the refusal left the lock free
    opened.close()
    assert not saving(run)


def test_a_heartbeat_that_stands_costs_one_wait(run: Path) -> None:
    """Its writer's clock may be ahead of this machine's."""
    write_beat(run / HEARTBEAT_FILE, replace(BEAT, written=time.time() + 3600))
    begun = time.monotonic()
    RunDir.reopen(run).close()
    assert time.monotonic() - begun >= 0.6 and not saving(run)


@pytest.mark.parametrize(
    "beat",
    [replace(BEAT, process="ended"), replace(BEAT, host=socket.gethostname()), None],
    ids=["ended", "here", "none"],
)
def test_no_wait_if_the_lock_or_the_watcher_tells_enough(
    run: Path, beat: Beat | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "SILENT_S", 1e9)
    if beat is not None:
        write_beat(run / HEARTBEAT_FILE, replace(beat, written=10.0))
    refuse_busy(run)
    RunDir.reopen(run).close()
    assert not saving(run)


def test_a_driver_that_ends_meanwhile_ends_the_wait(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "SILENT_S", 1e9)
    with beating(run, BEAT, then=replace(BEAT, written=11.0, process="ended")):
        RunDir.reopen(run).close()
    assert not saving(run)
