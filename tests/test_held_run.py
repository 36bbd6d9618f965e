"""Sessions end for good or are followed by another. Sessions are functions here; directory, lock
and files are real."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.runs import ROOT, SMALL

from megatron_stare.config.load import load_config
from megatron_stare.driver import held_run
from megatron_stare.driver.held_run import HeldRun
from megatron_stare.driver.opening import Inputs, read_inputs
from megatron_stare.driver.resuming import check_resume
from megatron_stare.errors import ConfigError, NonFiniteError, UserError
from megatron_stare.planning.placement import PlacementError
from megatron_stare.process.interruption import Interruption, on_driver_thread, what_now
from megatron_stare.process.recovery import RESTARTS_FILE
from megatron_stare.process.workers import WorkerLostError, WorkerSilentError
from megatron_stare.rollout.agreement.agreement import AgreementError
from megatron_stare.rollout.engines.engine import EngineLostError
from megatron_stare.rollout.fleet.health import NoEngineError
from megatron_stare.run_dir import heartbeat
from megatron_stare.run_dir.heartbeat import HEARTBEAT_FILE, Beat, read_heartbeat, write_beat
from megatron_stare.run_dir.run_state import RunState

ALONE = {
    **SMALL,
    "runtime.runner": "inline",
    "parallel.tensor": 1,
    "eval.prompts": 0,
    "faults.run.back_off_s": 0,
}
LOST = (
    WorkerLostError("a rank died"),
    EngineLostError("gone"),
    NoEngineError("none is left"),
    WorkerSilentError("late"),
)
FOR_GOOD = (
    UserError("the disk is full"),
    ConfigError("no such setting"),
    NonFiniteError("three in a row"),
    AgreementError("they differ"),
    RuntimeError("a fault of ours"),
)


@contextlib.contextmanager
def held(folder: Path, resume: bool = False, **settings: object):
    overrides = [
        f"{key}={value}" for key, value in {**ALONE, "run.dir": folder / "run", **settings}.items()
    ]
    config = load_config(
        ROOT / "configs/quickstart.yaml", [f"model.path={ROOT / 'assets/tiny-adder'}", *overrides]
    )
    inputs = read_inputs(config)
    with HeldRun(config, inputs, resume=resume, from_step=None, dump_step=None) as run:
        run.first = inputs
        yield run


def sessions(
    run: HeldRun,
    *ends: tuple[int, Exception] | None,
    came_up: bool = True,
    seen: list | None = None,
) -> Callable[[Inputs], list]:
    """A function that plays sessions: the step that each comes to, and what ends it; None: it is
    the last. What it gives says of each whether it was to continue a checkpoint, and what it was
    given."""
    seen = [] if seen is None else seen

    def session(inputs: Inputs) -> list[tuple[bool, Inputs]]:
        seen.append((run.resumes, inputs))
        with pytest.raises(UserError, match="another process is running"):
            check_resume(inputs.config)  # held all the time
        end = ends[len(seen) - 1]
        if end is None:
            return seen
        run.state = RunState(step=end[0])
        if came_up:
            run.opened()
        raise end[1]

    return session


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / RESTARTS_FILE).read_text().splitlines()]


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
def test_what_is_lost_opens_the_run_again(tmp_path: Path, error: Exception, capsys) -> None:
    with held(tmp_path) as run:
        assert run.awaited() is None  # nothing was there before
        seen = run.until_done(run.first, sessions(run, (1, error), (12, error), None))
        awaited = run.awaited()
        assert awaited is not None and (awaited.limit_s, awaited.on_gpus) == (600, False)
        run.dir.record_placement(["placement: 2 GPUs"])
        assert (awaited := run.awaited()) is not None and awaited.on_gpus
        assert run.metrics() == {"restarts/run": 2.0}
    assert [resumes for resumes, _ in seen] == [False, True, True]
    # what has a place in its data, or a file that is closed, is made anew
    assert len({id(inputs.source) for _, inputs in seen}) == 3
    assert len({id(sink) for _, inputs in seen for sink in inputs.sinks.values()}) == 3 * len(
        run.first.sinks
    )
    assert [(row["by"], row["step"], row["why"]) for row in rows(tmp_path)] == [
        ("driver", 1, str(error)),
        ("driver", 12, str(error)),
    ]
    assert "reopens in 0 s (attempt 1 of 3)" in capsys.readouterr().err


@pytest.mark.parametrize("error", FOR_GOOD, ids=lambda error: type(error).__name__)
def test_what_would_come_again_ends_it(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as raised, held(tmp_path) as run:
        run.until_done(run.first, sessions(run, (5, error)))
    assert raised.value is error
    assert not (tmp_path / "run" / RESTARTS_FILE).exists()
    assert (tmp_path / "run/config.yaml").exists()  # it had made steps


@pytest.mark.parametrize(
    ("error", "again"),
    [(WorkerLostError("killed as it started"), True), *((each, False) for each in LOST[1:])],
)
def test_what_never_came_up_is_more_likely_asked_for_wrongly(
    tmp_path: Path, error: Exception, again: bool
) -> None:
    """A process that died is not: it is tried again, a bounded number of times. Then nothing is
    left."""
    played: list[tuple[bool, Inputs]] = []
    with pytest.raises(type(error)), held(tmp_path) as run:
        run.until_done(run.first, sessions(run, *[(0, error)] * 4, came_up=False, seen=played))
    assert len(played) == (4 if again else 1)
    assert not (tmp_path / "run").exists()


def test_the_bound_is_that_of_the_configuration(tmp_path: Path) -> None:
    lost = [(step, WorkerLostError(f"after {step}")) for step in (5, 3, 6, 20, 20, 21)]
    with (
        pytest.raises(WorkerLostError, match="after 21"),
        held(tmp_path, **{"faults.run.attempts": 2}) as run,
    ):
        run.until_done(run.first, sessions(run, *lost[:2], *lost[3:]))
    assert [row["step"] for row in rows(tmp_path)] == [5, 3, 20, 20]
    with (
        pytest.raises(WorkerLostError, match="after 5"),
        held(tmp_path, resume=True, **{"faults.run.attempts": 0}) as run,
    ):
        run.until_done(run.first, sessions(run, lost[0]))
    assert len(rows(tmp_path)) == 4


def test_a_signal_between_two_sessions_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    def body(interruption: Interruption) -> Interruption:
        with pytest.raises(KeyboardInterrupt), held(tmp_path) as run:
            run.until_done(run.first, sessions(run, (7, WorkerLostError("a rank died"))))
        return interruption

    monkeypatch.setattr("megatron_stare.driver.held_run.pause", interrupted)
    interruption = on_driver_thread(body, lambda _: "")
    assert (interruption.standing.step, interruption.standing.run_dir) == (7, tmp_path / "run")


def test_an_interrupted_start_from_an_earlier_step_is_continued_from_it(tmp_path: Path) -> None:
    """Until it has come up, the newest checkpoint is a later one."""

    def interrupted(folder: Path, opens: bool) -> None:
        with held(folder) as run:
            run.from_step, run.state = 2, RunState(step=2)
            if opens:
                run.opened()
            raise KeyboardInterrupt

    def body(interruption: Interruption) -> list[str]:
        told = []
        for opens in (False, True):
            with pytest.raises(KeyboardInterrupt):
                interrupted(tmp_path / str(opens), opens)
            told.append(what_now(interruption, ["train"], ["--supervise"]))
        return told

    before, after = on_driver_thread(body, lambda _: "")
    assert before.endswith("run --supervise --from-step 2")
    assert after.endswith("run --supervise --resume")


def test_a_run_that_is_being_discarded_is_none_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C may come while what a start left is removed, and says what to type."""
    asked = []

    def body(interruption: Interruption) -> int:
        really = shutil.rmtree

        def removing(path: Path, **how: Any) -> None:
            asked.append(interruption.last_words())
            really(path, **how)

        def failing() -> None:
            with held(tmp_path) as run:
                # in whatever order they are removed, none may go before the configuration
                for number in range(8):
                    (run.dir.path / str(number)).mkdir()
                assert interruption.last_words().step == 0
                monkeypatch.setattr(shutil, "rmtree", removing)
                raise UserError("the disk is full")

        with pytest.raises(UserError, match="the disk"):
            failing()
        monkeypatch.undo()
        assert interruption.last_words() is None
        return 0

    assert on_driver_thread(body, lambda interruption: "") == 0
    assert asked == [None] * 8
    assert not (tmp_path / "run").exists()


def fails(folder: Path, error: BaseException, *said: str) -> list[str]:
    """The files that a run leaves whose first step ends by `error`, after processes have written
    the files `said`."""
    files = {name: folder / "run" / name for name in (*said, "logs/rank_1.log", "placement.txt")}

    def session(inputs: Inputs) -> None:
        for name, file in files.items():
            file.parent.mkdir(exist_ok=True)
            file.write_text("its last words" * (name in said))
        raise error

    settings = {"faults.run.attempts": 0}
    with pytest.raises(type(error)), held(folder, **settings) as run:
        run.until_done(run.first, session)
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


def test_the_words_that_say_why_a_first_step_failed_stay(tmp_path: Path) -> None:
    """Another run may begin in the folder."""
    lost = WorkerLostError("a rank died: read the end of its log in logs/ of the run directory")
    said = ["logs/rank_0.log", "blackbox/step_1/screen.txt"]
    (tmp_path / "run/blackbox/step_1").mkdir(parents=True)
    kept = ["run/blackbox/step_1/screen.txt", "run/logs/rank_0.log", "run/logs/rank_1.log"]
    assert fails(tmp_path, lost, *said) == kept
    shutil.rmtree(tmp_path / "run/blackbox")
    assert fails(tmp_path, lost) == kept[1:]  # what was there before stays in any case
    shutil.rmtree(tmp_path / "run")
    assert fails(tmp_path, KeyboardInterrupt(), "logs/rank_0.log") == []
    assert not (tmp_path / "run").exists()
    assert fails(tmp_path, lost) == []  # no process had said anything


def test_a_log_that_a_process_still_writes_on_nfs_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS renames a file that is removed while a process has it open."""
    really = os.unlink

    def renames(path: Any, *, dir_fd: int | None = None) -> None:
        if Path(path).name == "rank_1.log":
            os.rename(path, ".nfs0001", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        elif Path(path).name != ".nfs0001":
            really(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", renames)
    assert fails(tmp_path, UserError("the server did not answer")) == ["run/logs/.nfs0001"]


def test_a_run_that_losses_end_is_to_be_continued(tmp_path: Path) -> None:
    """Its job may be started again, and finds other nodes; an error of the run is the user's."""

    def code(error: UserError, *before: tuple[int, Exception], came_up: bool = True) -> int:
        settings = {"faults.run.attempts": 1, "run.dir": tmp_path / str(len(codes))}
        with (
            pytest.raises(type(error)) as raised,
            held(tmp_path, **settings) as run,
        ):
            run.until_done(run.first, ended(run, [*before, (1, error)], came_up))
        codes.append(raised.value.exit_code)
        return codes[-1]

    def ended(run: HeldRun, ends: list, came_up: bool) -> Callable[[Inputs], None]:
        ends = iter(ends)

        def session(inputs: Inputs) -> None:
            step, error = next(ends)
            run.state = RunState(step=step)
            if came_up or isinstance(error, WorkerLostError):
                run.opened()
            raise error

        return session

    codes: list[int] = []
    lost = (1, WorkerLostError("a rank died"))
    assert code(WorkerLostError("again"), lost) == 75  # no attempt is left
    gone = {"where": "runtime.ray_address"}
    assert code(PlacementError("no node came back"), lost, came_up=False) == 75
    assert code(ConfigError("no cluster", **gone), lost, came_up=False) == 75
    assert code(UserError("the disk is full"), lost, came_up=False) == 2
    assert code(UserError("the disk is full"), lost) == 2
    assert code(PlacementError("no node is there"), came_up=False) == 2


@pytest.mark.parametrize("end", [None, KeyboardInterrupt()], ids=["restarts", "interrupted"])
def test_other_machines_see_a_driver_that_waits_to_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException | None
) -> None:
    """The watcher of the lost session has said that the driver ended."""
    seen: list[Beat | None] = []
    run_dir = tmp_path / "run"
    monkeypatch.setattr(heartbeat, "COPY_S", 0.02)

    def pause(wait_s: float) -> None:
        for _ in range(2):
            time.sleep(0.3)
            seen.append(read_heartbeat(run_dir))
        if end is not None:
            raise end

    monkeypatch.setattr(held_run, "pause", pause)
    ended = Beat("driver", os.getpid(), "update", since=5.0, moved=1.0, step=3, limit_s=600.0)
    with contextlib.suppress(KeyboardInterrupt), held(tmp_path) as run:
        write_beat(run_dir / HEARTBEAT_FILE, replace(ended, written=9.0, process="ended"))
        run.until_done(run.first, sessions(run, (3, WorkerLostError("a rank died")), None))
    first, second = seen
    assert first is not None and second is not None
    assert (first.process, first.phase, first.step) == ("running", "restart", 3)
    assert first.limit_s is None and first.host == ended.host
    assert 9.0 < first.written < second.written
    last = read_heartbeat(run_dir)
    assert last is not None and last.process == ("running" if end is None else "ended")


def test_a_heartbeat_of_another_process_stays(tmp_path: Path) -> None:
    """Without faults.hangs.enabled, nothing writes one for this driver."""
    with held(tmp_path) as run:
        file = run.dir.path / HEARTBEAT_FILE
        run.until_done(run.first, sessions(run, (3, WorkerLostError("a rank died")), None))
        assert not file.exists()
        of_another = Beat("driver", 1, "update", since=5.0, moved=1.0, process="ended")
        write_beat(file, of_another)
        run.until_done(run.first, sessions(run, (4, WorkerLostError("a rank died")), None))
        assert read_heartbeat(run.dir.path) == of_another
