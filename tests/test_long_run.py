"""The benchmark of a long run with faults: what it counts, by worked numbers, and a short one,
disturbed and itself killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.runs import ROOT, environment

sys.path.insert(0, str(ROOT / "benchmarks"))

import long_run  # scripts
import long_run_figures as judge

KINDS = {"driver", "rank", "engine", "verifier", "raylet", "gcs"}
SECONDS = 600.0


def test_what_is_drawn() -> None:
    drawn = long_run.draw(1, 12, 2000)
    assert drawn == long_run.draw(1, 12, 2000) != long_run.draw(2, 12, 2000)
    assert {fault.kind for fault in drawn} == {*KINDS, long_run.STOPPED}
    assert [fault.kind for fault in drawn].count(long_run.STOPPED) == 1
    steps = [fault.step for fault in drawn]
    assert steps == sorted(set(steps)) and steps[0] >= 1 and steps[-1] < 1980
    assert len({fault.kind for fault in long_run.draw(5, 7, 40)}) == 7
    assert len(long_run.draw(1, 3, 40)) == 3


def test_entropy_is_held_in_a_share_of_the_steps_after_300() -> None:
    nats = [0.5] * 300 + [0.0901, 0.1499, 0.12, 0.0899, 0.1501] + [0.12] * 5
    found = judge.entropy(
        [{"step": at, "entropy/mean": each} for at, each in enumerate(nats, start=1)]
    )
    assert (found["held"], found["lowest"], found["highest"]) == (0.8, 0.0899, 0.1501)
    assert found["each_100"] == [0.5, 0.5, 0.5, 0.12]


def test_a_save_costs_what_was_waited_and_what_its_writers_slow_down() -> None:
    """A step of 1 s, of 1.5 s in the two steps after a save, and 0.5 s waited at each."""
    rows = [
        {
            "step": step,
            "time/step_s": 1.5 if step > 20 and step % 20 in (1, 2) else 1.0,
            "perf/save_s": 0.5 if step > 20 and step % 20 == 1 else 0.0,
        }
        for step in range(1, 121)
    ]
    wall = 5 * (20 + 2 * 0.5 + 0.5)
    found = judge.saves(rows)
    assert found["share_waited"] == pytest.approx(5 * 0.5 / wall, abs=1e-5)
    assert found["share_beside"] == pytest.approx(5 * 1.0 / wall, abs=1e-5)
    assert found["share"] == pytest.approx(5 * 1.5 / wall, abs=1e-5)
    assert found["waited_s_a_save"] == 0.5


def events(*those: tuple[str, int, float]) -> list[dict[str, Any]]:
    """Events by name and step, and for a sample with its Pss."""
    return [
        {
            "event": event,
            "step": step,
            "at": float(at),
            "fault": {"kind": "rank", "step": step},
            "kinds": {
                "rank": {"pss": 3 * pss / 4, "number": 2},
                "driver": {"pss": pss / 4, "number": 1},
            },
            "shm": {"entries": 1},
        }
        for at, (event, step, pss) in enumerate(those)
    ]


def rise(noted: list[dict[str, Any]]) -> dict[str, Any]:
    return judge.growth([each for each in noted if each["event"] == "sample"], noted, judge._pss)


def test_memory_is_a_slope_between_faults() -> None:
    """One byte every two steps in each stretch; the levels of stretches are others, what comes
    before step 200 and in the 200 steps after a fault falls."""
    noted = events(
        ("sample", 100, 9000),
        ("sample", 200, 8000),
        *(("sample", step, 1000 + step / 2) for step in range(210, 400, 10)),
        ("fault", 400, 0),
        ("sample", 385, 50000),
        ("sample", 600, 50000),
        *(("sample", step, 500 + step / 2) for step in range(610, 1201, 10)),
    )
    found = rise(noted)
    assert found["rise"] == pytest.approx(500.0)  # over the 1,000 steps after step 200
    first, second = found["levels"]
    assert (first["steps"], second["steps"]) == ([210, 390], [610, 1200])
    assert (first["median"], second["median"], second["most"]) == (1150.0, 952.5, 1100.0)
    mean = (19 * 1150 + 60 * 952.5) / 79
    assert found["over_the_run"] == pytest.approx(500 / mean, abs=1e-5)
    assert found["over_the_run_unsettled"] < 0.0  # the fall of those 200 steps
    kinds = judge.by_kind([each for each in noted if each["event"] == "sample"], noted)
    assert (kinds["rank"]["rise_mb"], kinds["driver"]["rise_mb"]) == (0.0, 0.0)  # bytes


def test_a_start_by_hand_parts_stretches_as_a_fault_does() -> None:
    started = [{"event": "started", "at": 0.0}]
    before = events(*(("sample", step, 1000.0) for step in range(210, 400, 10)))
    after = events(*(("sample", step, 2000.0) for step in range(400, 800, 10)))
    found = rise([*started, *before, *started, *after])
    assert found["rise"] == 0.0
    assert [each["steps"] for each in found["levels"]] == [[210, 390], [600, 790]]


def test_a_run_too_short_for_a_slope_has_none() -> None:
    found = rise(
        events(
            ("sample", 190, 1.0), ("sample", 210, 1.0), ("fault", 220, 0.0), ("sample", 230, 1.0)
        )
    )
    assert found["over_the_run"] is None and found["levels"] == []


def test_a_fault_lasts_until_workers_are_started_again_for_it() -> None:
    """The first start is the run's; the second fault needs none."""
    noted = events(
        ("sample", 5, 1.0), ("fault", 7, 0), ("sample", 5, 1.0), ("fault", 9, 0), ("fault", 11, 0)
    )
    found = judge.faults(noted, [(-5.0, 0), (2.5, 4), (6.0, 8)])
    assert [(each["seconds"], each["back_to_step"]) for each in found] == [
        (2, 4),
        (None, None),
        (2, 8),
    ]
    assert judge.faults(events(("sample", 5, 1.0)), [(-5.0, 0)]) == []


def run(**more: Any) -> dict[str, Any]:
    """Figures of a run that has shown all that is asked for."""
    level = {"over_the_run": 0.0099, "levels": [{"median": 7.0}, {"median": 7.0}]}
    faults = [{"kind": kind} for kind in [*sorted(KINDS), *["rank"] * 4]]
    return {
        "code": 0,
        "left": [],
        "commands": 1,
        "steps": 2000,
        "steps_once": True,
        "entropy": {"held": 0.9, "end": 0.12},
        "memory": {"over_the_run": 0.049},
        "descriptors": level,
        "processes": level,
        "shm": level,
        "saves": {"share": 0.0299},
        "faults": faults,
        **more,
    }


GRPO = {"entropy": {"held": 0.0, "end": 0.0899}}


def test_everything_is_shown() -> None:
    assert set(judge.judged({"stare": run(), "grpo": run(**GRPO)}, 2000).values()) == {True}
    assert set(judge.judged({}, 2000).values()) == {False}


@pytest.mark.parametrize(
    ("line", "stare", "grpo"),
    [
        ("completes", {"code": 1}, {}),
        ("completes", {"code": None}, {}),
        ("completes", {"steps": 1999}, {}),
        ("completes", {"steps_once": False}, {}),
        ("untouched", {"commands": 2}, {}),
        ("untouched", {"left": ["process 7"]}, {}),
        ("faults", {"faults": [{"kind": "rank"}] * 12}, {}),
        ("faults", {"faults": [{"kind": kind} for kind in KINDS]}, {}),
        ("entropy_held", {"entropy": {"held": 0.8999}}, {}),
        ("twin_completes", {}, {"code": 2}),
        ("twin_outside", {}, {"entropy": {"end": 0.0901}}),
        ("memory_level", {"memory": {"over_the_run": 0.05}}, {}),
        ("memory_level", {"memory": {"over_the_run": None}}, {}),
        (
            "descriptors_level",
            {"descriptors": {"over_the_run": 0.01, "levels": [{"median": 7}, {"median": 7}]}},
            {},
        ),
        (
            "processes_level",
            {"processes": {"over_the_run": None, "levels": [{"median": 7}, {"median": 7}]}},
            {},
        ),
        (
            "processes_level_over_restarts",
            {"processes": {"over_the_run": 0.0, "levels": [{"median": 7}, {"median": 8}]}},
            {},
        ),
        ("shm_level_over_restarts", {"shm": {"over_the_run": 0.0, "levels": []}}, {}),
        ("saves_cheap", {"saves": {"share": 0.03}}, {}),
    ],
)
def test_each_line_is_judged_by_itself(
    line: str, stare: dict[str, Any], grpo: dict[str, Any]
) -> None:
    found = judge.judged({"stare": run(**stare), "grpo": run(**{**GRPO, **grpo})}, 2000)
    assert [name for name, well in found.items() if not well] == [line]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_short_one_that_is_itself_killed(tmp_path: Path) -> None:
    """40 steps, in which the engine and the driver are killed; in between the command is, its run
    ends with it, and the same command goes on and does nothing again."""
    out = tmp_path / "out.json"
    small = ["batch.prompts=4", "batch.samples_per_prompt=4", "eval.prompts=0"]
    which = [
        "--only=stare",
        "--steps=40",
        "--faults=2",
        "--seed=3",
        f"--runs={tmp_path}",
        f"--out={out}",
    ]
    command = [sys.executable, str(ROOT / "benchmarks/long_run.py"), *which, *small]
    first = subprocess.Popen(command, env=environment())
    until = time.monotonic() + SECONDS
    while not any(each["event"] == "fault" for each in noted(tmp_path)):
        assert first.poll() is None and time.monotonic() < until
        psutil.wait_procs([psutil.Process(first.pid)], timeout=0.2)
    first.send_signal(signal.SIGKILL)
    first.wait()
    done = subprocess.run(
        command, env=environment(), timeout=SECONDS, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr  # it cannot show what 2,000 steps show
    found = json.loads(out.read_text())["runs"]["stare"]
    assert (found["code"], found["left"], found["steps"], found["steps_once"]) == (0, [], 40, True)
    assert found["commands"] == 2
    assert sorted(each["kind"] for each in found["faults"]) == sorted(
        f.kind for f in long_run.draw(3, 2, 40)
    )
    assert all(each["back_to_step"] < each["after_step"] for each in found["faults"])
    assert found["restarts"] == {"driver": 1, "supervisor": 1}
    again = subprocess.run(
        command, env=environment(), timeout=SECONDS, capture_output=True, text=True
    )
    # nothing is run a third time
    assert json.loads(out.read_text())["runs"]["stare"] == found, again.stderr


def noted(runs: Path) -> list[dict[str, Any]]:
    return long_run.read_jsonl(long_run.events_of(runs, "stare"))
