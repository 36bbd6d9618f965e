"""Whole runs that are hung by hanging a real part of them, and what their black box says of it."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from support.cluster import FAKE, simulated
from support.hangs import HANGS, HungEvaluation, HungRun, hung, loaded, sentence_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
MOUNTS = os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)


@pytest.mark.parametrize("name", HANGS)
def test_the_black_box_names_who_holds_the_run_up(name: str, tmp_path: Path) -> None:
    if HANGS[name].rule == "file system" and not MOUNTS:
        pytest.skip("needs root and /dev/fuse")
    with hung(name, tmp_path) as (run, hang):
        hang.begin(run)
        screen, facts = run.told()
        assert re.search(hang.sentence, sentence_of(screen)), screen
        assert len(screen.splitlines()) <= 25
        assert facts["beat"]["step"] >= 3 or facts["beat"]["phase"] == "start"
        assert facts["without_s"] > facts["beat"]["limit_s"]
        roles = {each["role"] for each in facts["processes"]}
        assert {"driver", "raylet", "gcs_server"} <= roles
        assert {"trainer rank 0", "trainer rank 1", "rollout engine 0", "verifier"} <= roles
        if facts["beat"]["phase"] == "rollout" and hang.rule == "stopped":
            (replica,) = facts["replicas"]
            assert (replica["number"], replica["under_way"]) == (0, 16)
            assert [sorted(each) for each in replica["oldest"]] == [
                ["age_s", "prompt", "replica", "sample"]
            ] * 5
        python = [each for each in facts["processes"] if each["phase"] is not None]
        # a stack, or why there is none
        assert all(each["threads"] or each["said"] for each in python)
        assert run.process.poll() is None  # the black box ends nothing


def test_a_driver_whose_interpreter_is_held_is_named(tmp_path: Path) -> None:
    sinks = "[jsonl,console,support.stalling.HeldInterpreter]"
    with HungRun(tmp_path, **{"observability.sinks": sinks}) as run:
        run.step(3)
        run.stall.touch()
        screen, _ = run.told()
        assert "wait for the driver, which is at HeldInterpreter.step (stalling.py:" in sentence_of(
            screen
        )


def test_a_run_whose_hung_rank_is_killed_opens_itself_again(tmp_path: Path) -> None:
    """After a loss like any other: who it was is told, and the run goes on from what it has."""
    layout = {"parallel.tensor": 1, "parallel.data": 2, "algorithm": "support.stalling.StoppedRank"}
    with HungRun(
        tmp_path, **layout, **{"faults.hangs.end_run": True, "faults.run.back_off_s": 0.1}
    ) as run:
        run.step(3)
        run.stall.touch()
        run.told()
        run.stall.unlink()
        run.step(8)
        run.process.send_signal(signal.SIGINT)
        said = run.process.communicate()[1]
        assert run.process.returncode == 130, said
        assert re.search(r"faults.hangs.end_run: killing trainer rank 1 \(pid \d+\)", said)
        # as Ray says it of the call, or as it is found where the other rank misses its peer first
        assert "a trainer rank process died" in said or "trainer rank 1 died" in said
        (restart,) = [
            json.loads(line) for line in (run.dir / "restarts.jsonl").read_text().splitlines()
        ]
        assert restart["by"] == "driver" and restart["step"] >= 3


def test_other_nodes_are_looked_at_by_agents_of_their_own(tmp_path: Path) -> None:
    """A rank a node; the one that is stopped is on another than the driver's, and its node's agent
    sees it."""
    with simulated(2, 1) as nodes:
        layout = {
            "parallel.tensor": 1,
            "parallel.data": 2,
            "algorithm": "support.stalling.StoppedRank",
        }
        joined = {"runtime.ray_address": nodes.address, "runtime.gpu_resource": FAKE}
        stall = tmp_path / "stall"
        with HungRun(
            tmp_path, f"runtime.env={{MEGATRON_STARE_TEST_STALL: {stall}}}", **layout, **joined
        ) as run:
            run.step(3)
            stall.touch()
            screen, facts = run.told()
            assert (
                "rank 0 waits in all_reduce for rank 1, which is stopped (SIGSTOP)"
                in sentence_of(screen)
            )
            of = {each["role"]: each for each in facts["processes"]}
            nodes_of = {of[role]["node"] for role in ("driver", "trainer rank 0", "trainer rank 1")}
            assert len(nodes_of) == 3 and facts["missing"] == {}
            assert "StoppedRank.asks" in [
                f["function"] for t in of["trainer rank 1"]["threads"] for f in t["frames"]
            ]
            assert (
                len({each["node"] for each in facts["processes"] if each["role"] == "raylet"}) >= 2
            )


def test_an_evaluation_that_hangs_is_told_of_like_a_run(tmp_path: Path) -> None:
    """The second of two tasks hangs, once the first has shown how long a task takes. The bundle is
    in the evaluation's own folder."""
    tasks = "eval.tasks=[{name: first, prompts: 16}, {name: second, prompts: 1000}]"
    with HungEvaluation(tmp_path, tasks, **{"rollout.max_batch": 16}) as run:
        run.answered("first")
        run.stop(run.beats()["rollout engine 0"].pid)
        screen, facts = run.told()
        assert "the driver waits for engine 0, which is stopped (SIGSTOP)" in sentence_of(screen)
        assert facts["beat"]["phase"] == "eval"
        assert {"driver", "rollout engine 0", "verifier"} <= {
            each["role"] for each in facts["processes"]
        }
        assert [each.name for each in run.dir.glob("blackbox/*")] == ["step_000000_eval"]
        assert run.process.poll() is None


def test_a_step_five_times_as_long_as_usual_says_nothing(tmp_path: Path) -> None:
    settings = {
        "reward.verifier": "support.stalling_verifier.slow",
        "reward.workers": 1,
        "faults.hangs.floor_s": 0.5,
    }
    with HungRun(tmp_path, **{**settings, "run.steps": 8}) as run:
        run.step(5)
        run.stall.write_text("0.1")
        run.step(6)
        run.stall.unlink()
        run.process.stdout.read()
        assert run.process.wait() == 0
        assert list(run.dir.glob("blackbox/*")) == []
        assert "the black box" not in run.process.stderr.read()


def test_a_machine_that_others_take_says_nothing(tmp_path: Path) -> None:
    """Steps become several times as long from one to the next, longer than a phase's limit would be
    without its factor; that is ten medians. The run is left alone, too, where it is to be ended."""
    settings = {"batch.prompts": 16, "batch.samples_per_prompt": 8, "faults.hangs.end_run": True}
    with HungRun(tmp_path, **settings, **{"faults.hangs.floor_s": 0.5}) as run:
        found = loaded(run, slower=3.0)
        assert sum(seconds >= 3.0 * found.usual_s for seconds in found.loaded_s) == 5
        assert max(found.longest.values()) > 0.5  # the floor alone would have told of it
        assert found.code == 130, found.said
        assert list(run.dir.glob("blackbox/*")) == [] and "the black box" not in found.said
        assert not (run.dir / "restarts.jsonl").exists()
