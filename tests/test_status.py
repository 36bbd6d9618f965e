"""How a run stands, asked of a live one, a killed one, one that was continued, and of files from
another machine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.runs import ROOT, command, environment, metrics, model
from support.synthetic_runs import synthetic_run

from megatron_stare.cli import main
from megatron_stare.commands import views
from megatron_stare.commands.status import Status, status_of
from megatron_stare.commands.views import as_text
from megatron_stare.config.load import load_config
from megatron_stare.driver.session import Session
from megatron_stare.errors import DataError
from megatron_stare.hangs.driver_side import Watched
from megatron_stare.observability.report.page import write_report
from megatron_stare.observability.report.rollouts_page import stored_responses, write_rollouts
from megatron_stare.process.interruption import ClosingStack
from megatron_stare.run_dir import liveness
from megatron_stare.run_dir.heartbeat import HEARTBEAT_FILE, Beat, read_heartbeat, write_beat
from megatron_stare.run_dir.json_lines import write_atomically
from megatron_stare.run_dir.run_files import LOCK_FILE, Rereading, read_run
from megatron_stare.run_dir.run_state import refuse_busy
from megatron_stare.weights.files.hf_folder import write_folder

INLINE = {
    "runtime.runner": "inline",
    "parallel.tensor": 1,
    "eval.prompts": 8,
    "run.steps": 6,
    "run.checkpoint_every": 2,
}
NOW = 1_800_000_000.0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that planned 300 steps, has made 100 of them, and notes node7 as its host."""
    run = synthetic_run(tmp_path / "run", "held", 300)
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    # as it is being written
    (run / "metrics.jsonl").write_text("".join(rows[:100]) + '{"step": 101, "rewa')
    return run


@contextlib.contextmanager
def held(run: Path) -> Iterator[None]:
    """Holds the run's lock, as a driver does."""
    with (run / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def beat(run: Path, **more: Any) -> None:
    told = {
        "role": "driver",
        "pid": 7,
        "phase": "rollout",
        "since": NOW - 12,
        "moved": 0.0,
        "host": "node7",
    }
    write_beat(
        run / HEARTBEAT_FILE, Beat(**told | {"written": NOW - 3, "step": 101, "steps": 300} | more)
    )


def test_a_run_that_is_held_is_alive_and_asking_takes_nothing_from_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat(run_dir, done=10, total=256, limit_s=600.0)
    before = sorted(path.name for path in run_dir.iterdir())
    with held(run_dir):
        found = status_of(run_dir, NOW, here="elsewhere")
        assert found.state == "running" and found.again == ""
    assert (found.step, found.steps, found.pid, found.beat_age_s) == (100, 300, 7, 3.0)
    assert (found.phase, found.phase_s, found.done, found.total) == ("rollout", 12.0, 10, 256)
    text = as_text(found)
    assert text.startswith(f"{run_dir}: running on node7 (process 7), step 100 of 300\n")
    assert (
        "  phase       rollout for 0:12, 10 of 256 responses; must make progress within 10:00"
        in text
    )
    assert sorted({path.name for path in run_dir.iterdir()} - {LOCK_FILE}) == before
    status_of(run_dir, NOW)
    monkeypatch.setattr(liveness, "SILENT_S", 0.01)  # no next heartbeat of node7 comes
    refuse_busy(run_dir)  # the next driver may have it


def test_rates_time_left_evaluation_and_alerts_are_those_of_the_record(run_dir: Path) -> None:
    record = read_run(run_dir)
    rows = record.metrics[-20:]
    seconds = sum(row["time/step_s"] for row in rows)
    found = status_of(run_dir, NOW)
    assert found.steps_per_h == pytest.approx(3600 * 20 / seconds)
    assert found.samples_per_s == pytest.approx(20 * 32 * 8 / seconds)
    rates = next(line for line in as_text(found).splitlines() if line.startswith("  rates"))
    assert [each.split()[-1] for each in rates.split(" · ")] == ["steps/h", "tokens/s", "samples/s"]
    tokens = sum(row["perf/tokens_per_s"] * row["time/step_s"] for row in rows)
    assert found.tokens_per_s == pytest.approx(tokens / seconds)
    assert found.left_s == pytest.approx(200 * seconds / 20, rel=0.01)
    (evaluation,) = found.evaluations
    assert (evaluation.step, evaluation.value) == (300, record.after["pass1"])
    assert [alert.name for alert in found.alerts] == ["gradient spike"]  # of step 100
    quiet = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)[:99]
    (run_dir / "metrics.jsonl").write_text("".join(quiet))
    assert not status_of(run_dir, NOW).alerts
    assert "  alerts      none" in as_text(status_of(run_dir, NOW))


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({"written": NOW - 3}, "running"),
        ({"written": NOW + 5}, "running"),  # its clock is ahead of ours
        ({"written": NOW - 3, "process": "ended"}, "dead"),  # its watcher outlived it, and says so
        ({"written": NOW - 600}, "silent"),
        (None, "silent"),
    ],
)
def test_of_a_run_on_another_machine_the_heartbeat_says_whether_it_lives(
    run_dir: Path, more: dict[str, Any] | None, state: str
) -> None:
    (run_dir / LOCK_FILE).touch()  # free, as far as this machine can see
    if more is not None:
        beat(run_dir, **more)
    found = status_of(run_dir, NOW, here="elsewhere")
    assert (found.state, found.host) == (state, "node7")
    assert (found.phase == "rollout") == (state == "running")
    assert status_of(run_dir, NOW, here="node7").state == "dead"  # where the lock is the truth


def test_restarts_by_itself_are_counted_and_the_last_is_explained(run_dir: Path) -> None:
    assert "  restarts" not in as_text(status_of(run_dir, NOW))
    losses = [
        {"by": "driver", "step": 40, "why": "rank 0 ended"},
        {"by": "supervisor", "step": 90, "why": "killed"},
    ]
    write_atomically(run_dir / "restarts.jsonl", losses)
    assert "  restarts    2 automatic, the last because: killed" in as_text(status_of(run_dir, NOW))


def test_a_process_that_is_stopped_is_said_to_be(run_dir: Path) -> None:
    beat(run_dir, process="stopped")
    with held(run_dir):
        assert "heartbeat   0:03 old, the driver is stopped" in as_text(status_of(run_dir, NOW))


def test_a_start_without_a_watcher_leaves_no_heartbeat_of_an_earlier_start(run_dir: Path) -> None:
    def status() -> tuple[str, int | None]:
        with held(run_dir):
            found = status_of(run_dir, NOW)
        return found.phase, found.pid

    config = load_config(ROOT / "configs/quickstart.yaml", ["faults.hangs.enabled=false"])
    inputs = SimpleNamespace(sinks={}, metrics={})
    start = SimpleNamespace(resumes=False)
    beat(run_dir)
    assert status() == ("rollout", 7)
    session = SimpleNamespace(
        config=config, dir=SimpleNamespace(path=run_dir), _inputs=inputs, _held=start
    )
    with ClosingStack() as stack:
        Session._open_monitor(session, stack)  # type: ignore[arg-type]
    assert status() == ("", None)
    beat(run_dir)
    Watched(config, run_dir, 0, None).close()  # of `eval`
    assert status() == ("", None)


def test_all_steps_are_not_all_of_a_run(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run", "held", 20)
    assert status_of(run, NOW).state == "dead"  # it was killed before its last checkpoint
    (run / "checkpoints/step_000020").mkdir(parents=True)
    (run / "checkpoints/step_000020/run_state.json").write_text("{}")
    os.utime(run / "checkpoints/step_000020/run_state.json", (NOW - 90, NOW - 90))
    assert status_of(run, NOW).state == "dead"  # or before its policy was exported
    (run / "hf").mkdir()
    (run / "hf/model.safetensors").touch()
    found = status_of(run, NOW)
    assert (found.state, found.again, found.left_s, found.checkpoint_age_s) == (
        "finished",
        "",
        None,
        90.0,
    )
    assert as_text(found).startswith(f"{run}: finished, step 20 of 20\n")


@pytest.mark.parametrize(("step", "state"), [(20, "finished"), (10, "dead"), (None, "dead")])
def test_a_run_without_checkpoints_is_finished_if_its_last_step_is_exported(
    tmp_path: Path, step: int | None, state: str
) -> None:
    run = synthetic_run(tmp_path / "run", "held", 20)
    write_folder(run / "hf", {"w": torch.ones(1)}, ROOT / "assets/tiny-adder", step=step)
    found = status_of(run, NOW)
    assert (found.state, found.again == "") == (state, state == "finished")


def test_a_report_of_a_run_that_goes_on_says_so_and_when_it_was_drawn(
    run_dir: Path, tmp_path: Path
) -> None:
    beat(run_dir)
    with held(run_dir):
        page = write_report([run_dir], tmp_path / "live.html").read_text()
    line = r"Written \d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}"
    running = ", while the run was running: step 100 of 300 done, phase rollout\\."
    assert re.search(line + running, page)
    (run_dir / HEARTBEAT_FILE).unlink()
    write_atomically(run_dir / "starts.jsonl", [])
    page = write_report([run_dir], tmp_path / "dead.html").read_text()
    ended = "\\. The run is not running; it ended after step 100 of 300\\."
    assert re.search(line + ended, page)
    finished = synthetic_run(tmp_path / "finished", "held", 20)
    assert "Written" not in write_report([finished], tmp_path / "whole.html").read_text()


def test_the_command_line(
    run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["status", str(run_dir)]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "  resume it with",
        f"    megatron-stare train {run_dir}/config.yaml run.dir={run_dir} --resume",
    ]
    with held(run_dir):
        assert main(["status", str(run_dir), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["step"], told["checkpoint"]) == ("running", 100, None)
    assert set(told) == set(Status.__dataclass_fields__)
    for arguments, said in (
        ([str(tmp_path / "none")], "there is no such directory"),
        ([str(tmp_path)], "not a run directory"),
        ([str(run_dir), "--watch", "0"], "the interval must be above 0 s"),
    ):
        assert main(["status", *arguments]) == 2
        assert said in capsys.readouterr().err


def test_watching_looks_anew_until_it_is_interrupted(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:  # a step is made meanwhile; then somebody presses Ctrl-C
        waits.append(seconds)
        lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)[:100]
        (run_dir / "metrics.jsonl").write_text(
            "".join([*lines, lines[-1].replace('"step": 100', '"step": 101')])
        )
        if len(waits) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(views.time, "sleep", wait)
    with held(run_dir):
        assert main(["status", str(run_dir), "--watch", "7", "--json"]) == 0
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines() if line] == [
        100,
        101,
    ]
    assert waits == [7.0, 7.0]


def ask(run: Path, *options: str, cwd: Path) -> tuple[int, dict[str, Any]]:
    """The real command, in a process of its own."""
    arguments = [sys.executable, "-m", "megatron_stare.cli", "status", str(run), "--json", *options]
    done = subprocess.run(
        arguments, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def test_a_terminal_that_lacks_some_characters_gets_the_others(run_dir: Path) -> None:
    run = run_dir.rename(run_dir.with_name("läuft"))
    with held(run):
        done = subprocess.run(
            [sys.executable, "-m", "megatron_stare.cli", "status", str(run)],
            env={**environment(), "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{run_dir.parent}/l?uft: running on ")


def until_its_watcher_says(run: Path, process: str) -> None:
    """Waits until the heartbeat in the run directory has this of the driver."""
    for _ in range(300):
        beat = read_heartbeat(run)
        if beat and beat.process == process:
            return
        threading.Event().wait(0.1)
    raise AssertionError(f"its heartbeat is {read_heartbeat(run)}")


def steps_stored(run: Path) -> Counter[int]:
    """How many training responses of each step the page has."""
    stored = stored_responses(read_run(run))
    training = stored.tasks["training"]
    return Counter(
        s
        for s, task in zip(stored.rows["step"], stored.rows["task"], strict=True)
        if task == training
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_a_live_a_killed_and_a_continued_run(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    options = ("observability.sinks=[jsonl,console]", "run.rollouts_every=1", "run.rollouts_kept=4")
    process = subprocess.Popen(
        command(model(), f"run.dir={run}", *options, **INLINE),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and any(re.match(r"\s*step\s+5/", line) for line in process.stdout)
    process.send_signal(
        signal.SIGSTOP
    )  # so that it is still alive when it is asked for; the checkpoint of step 2 is whole
    until_its_watcher_says(run, "stopped")
    code, live = ask(run, cwd=tmp_path)
    assert (code, live["state"], live["again"]) == (0, "running", "")
    assert (live["pid"], live["process"]) == (process.pid, "stopped") and live["phase"]
    assert live["step"] == 5 and live["steps"] == 6 and live["steps_per_h"] > 0
    page = write_report([run], tmp_path / "live.html").read_text()
    assert f"while the run was running: step {live['step']} of 6 done" in page
    assert steps_stored(run) == dict.fromkeys(range(1, 6), 4)
    process.kill()
    process.wait()
    until_its_watcher_says(run, "ended")
    # also where nobody can ask for the lock
    assert status_of(run, here="elsewhere").state == "dead"
    code, dead = ask(run, cwd=tmp_path)
    assert (code, dead["state"], dead["starts"]) == (1, "dead", 1)
    assert dead["checkpoint"] in (2, 4) and dead["checkpoint_age_s"] < 60
    again = shlex.split(dead["again"])
    assert again[:2] == ["megatron-stare", "train"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_stare.cli", *again[1:]],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    code, ended = ask(run, cwd=tmp_path)
    assert (code, ended["state"], ended["step"], ended["again"]) == (0, "finished", 6, "")
    assert (ended["starts"], ended["resumed_after"]) == (2, dead["checkpoint"])
    assert [each["step"] for each in ended["evaluations"]] == [6]
    assert [row["step"] for row in metrics(run)] == list(range(1, 7))
    # those that were made again stand once
    assert steps_stored(run) == dict.fromkeys(range(1, 7), 4)
    assert write_rollouts([run], tmp_path / "rollouts.html").stat().st_size > 10_000


def test_a_run_is_read_again_only_after_a_file_has_changed(tmp_path: Path) -> None:
    read = Rereading()
    with pytest.raises(DataError, match="not a run directory"):
        read(tmp_path)
    for name, text in (
        ("metrics.jsonl", '{"step": 1, "reward/mean": 0.5}\n'),
        ("eval.jsonl", '{"step": 1, "weights": "base"}\n'),
        ("config.yaml", "run: {name: told}\n"),
        ("starts.jsonl", '{"step": 0}\n'),
    ):
        (tmp_path / name).write_text(text)
        run = read(tmp_path)
        assert vars(run) == vars(read_run(tmp_path))
        assert read(tmp_path) is run
    with (tmp_path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 2, "reward/mean": 0.75}\n')
    assert [row["step"] for row in read(tmp_path).metrics] == [1, 2]
