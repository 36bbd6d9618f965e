"""When a phase counts as one that hangs: limits that follow what phases took, beats, and the watch
over them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_stare.config.fault_sections import HangsConfig
from megatron_stare.hangs.driver_side import DriverBeats
from megatron_stare.hangs.vigil import MOST, Starvation, Vigil, of_the_run
from megatron_stare.run_dir.heartbeat import (
    BETWEEN,
    DRIVER,
    IDLE,
    Beat,
    CallBeats,
    beat_file,
    beats_of,
    read_beat,
    read_heartbeat,
    write_beat,
)

RULE = HangsConfig(first_s=900, factor=10, floor_s=60, cap_s=1800)


@pytest.mark.parametrize(
    ("recent", "limit"),
    [
        ([], 900.0),  # none has ended yet
        ([0.05, 0.04, 0.06], 60.0),  # not ten times a blink
        ([10.0, 12.0, 11.0], 110.0),
        ([10.0, 12.0, 11.0, 4000.0, 9.0], 110.0),  # one that stalled and went on does not count
        ([10.0, 14.0], 120.0),
        ([300.0], 1800.0),  # a tenfold would be 50 minutes
        ([600.0], 3000.0),  # five times as long as usual is slow, and not hung
    ],
)
def test_a_limit_is_some_medians_but_neither_below_the_floor_nor_above_the_cap(
    recent: list[float], limit: float
) -> None:
    assert RULE.limit_s(recent) == limit


@pytest.mark.parametrize("usual", [0.2, 3.0, 7.0, 100.0, 359.0, 361.0, 5000.0])
def test_a_phase_that_takes_five_times_as_long_as_usual_never_hangs(usual: float) -> None:
    """Whatever the section says, as long as it says anything that is allowed for the factor."""
    for rule in (RULE, HangsConfig(floor_s=0.1, cap_s=1), HangsConfig(factor=5, floor_s=0.1)):
        assert rule.limit_s([usual] * 20) >= 5 * usual


def test_a_floor_above_the_cap_holds() -> None:
    assert HangsConfig(floor_s=100, cap_s=50).limit_s([1.0]) == 100


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def driver(folder: Path) -> tuple[DriverBeats, Clock]:
    clock = Clock()
    return DriverBeats(folder, HangsConfig(first_s=900, floor_s=2), clock), clock


def beat_in(folder: Path) -> Beat:
    found = read_beat(beat_file(folder, DRIVER))
    assert found is not None
    return found


def phase(beats: DriverBeats, clock: Clock, name: str, seconds: float) -> None:
    beats.begin_phase(name)
    clock.now += seconds
    beats.end_phase(name)


def test_each_phase_gets_the_limit_of_its_own_name(tmp_path: Path) -> None:
    beats, clock = driver(tmp_path)
    assert (beat_in(tmp_path).phase, beat_in(tmp_path).limit_s) == (BETWEEN, 900)
    phase(beats, clock, "start", 50)
    # weights are loaded now; nothing is known of how long that takes
    assert beat_in(tmp_path).limit_s == 900
    beats.begin_step(7)
    phase(beats, clock, "rollout", 30)
    phase(beats, clock, "update", 1)
    clock.now += 0.5  # a line is logged
    beats.begin_step(8)
    beats.begin_phase("update")
    assert (beat_in(tmp_path).step, beat_in(tmp_path).phase, beat_in(tmp_path).limit_s) == (
        8,
        "update",
        10,
    )
    assert beat_in(tmp_path).moved == clock.now
    beats.end_phase("update")
    beats.begin_phase("rollout")
    assert beat_in(tmp_path).limit_s == 300
    beats.end_phase("rollout")
    beats.last_phase("export")
    assert (beat_in(tmp_path).phase, beat_in(tmp_path).limit_s) == ("export", 900)


def test_the_time_of_a_phase_inside_another_is_not_the_other_s(tmp_path: Path) -> None:
    beats, clock = driver(tmp_path)
    beats.begin_step(1)
    beats.begin_phase("eval")
    clock.now += 2
    outer = beat_in(tmp_path)
    phase(beats, clock, "sync", 40)
    again = beat_in(tmp_path)
    assert (again.phase, again.since, again.moved) == ("eval", outer.since, outer.moved + 40)
    clock.now += 3
    beats.end_phase("eval")
    beats.begin_phase("eval")
    assert beat_in(tmp_path).limit_s == 50  # ten times 2 + 3


def test_a_response_that_is_finished_moves_a_phase(tmp_path: Path) -> None:
    beats, clock = driver(tmp_path)
    beats.begin_phase("rollout")
    begun = beat_in(tmp_path)
    clock.now += 5
    beats.progress(3, 16)
    assert (beat_in(tmp_path).done, beat_in(tmp_path).total, beat_in(tmp_path).moved) == (
        3,
        16,
        begun.moved + 5,
    )
    assert beat_in(tmp_path).since == begun.since
    clock.now += 0.1
    beats.progress(4, 16)  # too soon to be put down
    assert beat_in(tmp_path).done == 3
    beats.progress(16, 16)  # but the last
    assert beat_in(tmp_path).done == 16
    beats.end_phase("rollout")
    assert beat_in(tmp_path).total == 0


def test_rates_and_steps_are_told(tmp_path: Path) -> None:
    beats, _ = driver(tmp_path)
    for step in (1, 2):
        beats.begin_step(step)
        beats.step(step, {"time/step_s": 2.0 * step, "perf/tokens_per_s": 70.0}, None)  # type: ignore[arg-type]
    assert (beat_in(tmp_path).step_s, beat_in(tmp_path).tokens_per_s) == ((2.0, 4.0), 70.0)


BEAT = Beat(DRIVER, 1, "update", since=5.0, moved=100.0, limit_s=10.0)


def looks(vigil: Vigil, beat: Beat, *times: float) -> list[float]:
    """Times at which the run is said to hang."""
    return [now for now in times if vigil.hangs(beat, now)]


def test_a_hang_is_told_once_and_not_before_its_limit() -> None:
    assert looks(Vigil(1.0), BEAT, *(100.0 + n for n in range(40))) == [111.0]


def test_a_phase_that_gets_on_is_given_its_limit_anew() -> None:
    vigil = Vigil(1.0)
    assert looks(vigil, BEAT, *(100.0 + n for n in range(9))) == []
    moved = replace(BEAT, moved=108.0)
    assert looks(vigil, moved, *(109.0 + n for n in range(15))) == [119.0]


def test_the_same_phase_of_a_later_step_is_another_hang() -> None:
    vigil = Vigil(1.0)
    assert looks(vigil, BEAT, *(100.0 + n for n in range(20))) == [111.0]
    later = replace(BEAT, since=40.0, moved=140.0)
    assert looks(vigil, later, *(120.0 + n for n in range(40))) == [151.0]


def test_time_in_which_the_watcher_did_not_run_is_not_the_run_s() -> None:
    """The machine slept, or gave nobody a CPU: whoever looks late knows that others were late
    too."""
    vigil = Vigil(1.0)
    assert looks(vigil, BEAT, 101.0, 102.0, 500.0, 501.0) == []
    assert vigil.without_s(BEAT, 501.0) == pytest.approx(501 - 100 - 397)
    assert looks(vigil, BEAT, *(502.0 + n for n in range(20))) == [508.0]


def test_time_in_which_others_had_the_cpus_is_not_the_run_s_for_a_while() -> None:
    """A run that waits for a CPU hangs once the rest of its time exceeds the limit, or after nine
    limits more. Here it waits three quarters of the time, from half of its limit on; then all of
    the time."""
    vigil = Vigil(1.0)
    assert not vigil.near(BEAT, 105.0)  # nothing was looked at yet
    for now in range(101, 106):
        assert not vigil.hangs(BEAT, now) and not vigil.near(BEAT, now)
    assert vigil.near(BEAT, 105.5) and not vigil.near(replace(BEAT, moved=105.2), 111.0)
    told = [now for now in range(106, 300) if vigil.hangs(BEAT, now, starved_s=0.75)]
    assert told == [126]  # 5 s, and a quarter of 21 s, are more than 10

    vigil = Vigil(1.0)
    # of processes together
    told = [now for now in range(101, 400) if vigil.hangs(BEAT, now, starved_s=7.0)]
    assert told == [201]  # 10 limits: no tick counts as more than it took
    later = replace(BEAT, since=203.0, moved=203.0)
    # what it was given is another phase's
    assert looks(vigil, later, *(204.0 + n for n in range(20))) == [214.0]


def test_a_process_waits_for_a_cpu_where_others_have_it_and_not_where_it_sleeps(
    tmp_path: Path,
) -> None:
    """Two programs on one CPU, which neither leaves; and one that waits for nothing to be said."""
    cpu = min(os.sched_getaffinity(0))
    words = [
        sys.executable,
        "-c",
        f"import os; os.sched_setaffinity(0, [{cpu}]); print(flush=True)\nwhile True: pass",
    ]
    asleep = [sys.executable, "-c", "print(flush=True); input()"]
    processes = [
        subprocess.Popen(each, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for each in (words, words, asleep)
    ]
    try:
        for each in processes:
            each.stdout.readline()
        together, sleeping = Starvation(), Starvation()
        pids = [each.pid for each in processes]
        assert together.since(pids[:2]) == 0.0  # of the past nothing counts
        sleeping.since(pids[2:])
        waited = 0.0
        while waited < 0.1:
            waited += together.since(pids[:2])
        assert sleeping.since(pids[2:]) < waited / 2
        processes[1].kill()
        processes[1].wait()
        together.since(pids[:2])  # one that is gone waits for nothing
        together.forget()
        assert together.since(pids[:1]) == 0.0
    finally:
        for each in processes:
            each.kill()
            each.communicate()


def test_who_may_need_a_cpu_for_a_phase_to_end(tmp_path: Path) -> None:
    """The driver, workers in a call or not yet, and what a worker has started; not what else the
    driver has."""
    program = (
        "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True);"
        " p.wait()"
    )
    words = [sys.executable, "-c", program]
    workers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    children = [int(each.stdout.readline()) for each in workers]
    try:
        for each, role, phase in zip(
            workers, ("rollout engine 0", "trainer rank 0"), ("advance", IDLE), strict=True
        ):
            write_beat(
                beat_file(tmp_path, role), replace(BEAT, role=role, pid=each.pid, phase=phase)
            )
        write_beat(beat_file(tmp_path, DRIVER), replace(BEAT, pid=os.getpid()))
        # the driver's, as Ray's processes are
        beside = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        workers.append(beside)
        children.append(int(beside.stdout.readline()))
        assert of_the_run(tmp_path) == {
            os.getpid(),
            *(each.pid for each in workers[:2]),
            *children[:2],
        }
    finally:
        for pid in (*children, *(each.pid for each in workers)):
            os.kill(pid, signal.SIGKILL)
        for each in workers:
            each.communicate()


def test_a_run_whose_limits_are_wrong_does_not_fill_the_disk() -> None:
    vigil = Vigil(1.0)
    found = [
        vigil.hangs(replace(BEAT, since=float(n), moved=float(n)), n + 500.0)
        for n in range(3 * MOST)
    ]
    assert sum(found) == MOST


def test_what_has_no_limit_never_hangs() -> None:
    assert looks(Vigil(1.0), replace(BEAT, limit_s=None), 1e9) == []


def test_a_beat_is_read_as_it_was_written_and_by_another_release(tmp_path: Path) -> None:
    full = replace(
        BEAT,
        step=3,
        steps=9,
        step_s=(1.0, 2.5),
        tokens_per_s=7.0,
        black_box="/x",
        process="stopped",
    )
    write_beat(tmp_path / "heartbeat.json", full)
    assert read_heartbeat(tmp_path) == full
    told = json.loads((tmp_path / "heartbeat.json").read_text())
    (tmp_path / "heartbeat.json").write_text(json.dumps(told | {"of_a_later_release": 1}))
    assert read_heartbeat(tmp_path) == full
    for broken in ("", "{", "[]", "{}"):
        (tmp_path / "heartbeat.json").write_text(broken)
        assert read_heartbeat(tmp_path) is None
    assert read_heartbeat(tmp_path / "nothing") is None


def test_a_worker_says_which_call_it_is_in_and_that_it_is_in_none(tmp_path: Path) -> None:
    beats = CallBeats(tmp_path, "trainer rank 1")
    with beats.call("update"):
        assert [(beat.role, beat.phase) for beat in beats_of(tmp_path)] == [
            ("trainer rank 1", "update")
        ]
    assert [beat.phase for beat in beats_of(tmp_path)] == [IDLE]
    with CallBeats(None, "trainer rank 2").call("update"):
        assert len(beats_of(tmp_path)) == 1


def test_a_folder_that_is_gone_ends_no_call(tmp_path: Path) -> None:
    beats = CallBeats(tmp_path / "gone", "trainer rank 1")
    with beats.call("update"):
        done = True
    assert done
