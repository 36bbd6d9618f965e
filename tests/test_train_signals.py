"""Signals to real runs: what they say they leave, what they leave, and that what they say to type
next works."""

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
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.leftovers import Traces
from support.runs import ROOT, command, environment, metrics, model, watched_as

from megatron_stare.process.interruption import SAME_S, TO_BE_CONTINUED
from megatron_stare.run_dir.run_files import METRICS_FILE
from megatron_stare.run_dir.run_state import complete_checkpoints

sys.path.insert(0, str(ROOT / "benchmarks"))

import signal_anywhere  # a script

pytestmark = pytest.mark.distributed
BENCHMARK = ROOT / "benchmarks/signal_anywhere.py"
INLINE = {"runtime.runner": "inline", "parallel.tensor": 1, "eval.prompts": 0}


class Run:
    """A run in a process of its own, which takes signals as one started in a terminal does."""

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        ignored: tuple[int, ...] = (),
        *,
        apart: bool = False,
    ) -> None:
        def dispositions() -> None:  # those of pytest would be inherited
            if apart:  # a group of its own, as a shell gives to what it starts
                os.setpgrp()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

        self.traces = Traces()
        self.process = subprocess.Popen(
            arguments,
            cwd=folder,
            env=self.traces.environment(environment()),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=dispositions,
        )

    def step(self, number: int) -> None:
        """Waits for the line of the step."""
        assert any(re.match(rf"\s*step\s+{number}/", line) for line in self.process.stdout), (
            self.process.stderr.read()
        )

    def until(self, text: str) -> list[str]:
        """Waits for a line of errors with the text; the lines up to it."""
        seen = []
        for line in self.process.stderr:
            seen.append(line)
            if text in line:
                return seen
        raise AssertionError(f"{text!r} not among {seen}")

    def child(self, name: str) -> None:
        """Waits until the run has started a process of this name."""
        driver = psutil.Process(self.process.pid)
        while not any(name in child for child in names_below(driver)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.02)
                raise AssertionError(self.process.stderr.read())

    def end(self, code: int) -> str:
        """Reads what the run still says on stderr. It must end with the code, and nothing of it may
        stay."""
        self.traces.look()
        self.process.stdout.read()
        # not communicate(), which knows nothing of what `until` has read ahead
        said = self.process.stderr.read()
        assert self.process.wait() == code, said
        assert "Traceback" not in said
        assert self.traces.left() == []
        return said


def names_below(process: psutil.Process) -> Iterator[str]:
    """Names of its descendants, but for those that end meanwhile."""
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            yield child.name()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(arguments: list[str], ignored: tuple[int, ...] = (), *, apart: bool = False) -> Run:
        runs.append(Run(arguments, tmp_path, ignored, apart=apart))
        return runs[-1]

    yield begin
    for run in runs:
        run.process.kill()
        run.process.communicate()


def to_type(said: str) -> list[str]:
    """The command of the last line, as a shell would split it, for this Python."""
    words = shlex.split(said.splitlines()[-1])
    assert words[:2] == ["megatron-stare", "train"]
    return [sys.executable, "-m", "megatron_stare.cli", *words[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("supervised", [False, True])
def test_a_closed_terminal_ends_a_run_as_sigterm_does(tmp_path: Path, supervised: bool) -> None:
    """Writes to the terminal fail from then on. The kernel sends SIGHUP to the session's leader,
    and a shell to all of its job, ranks and processes of Ray among them."""
    settings = {"run.steps": 300, "eval.prompts": 0, "parallel.tensor": 1}
    arguments = command(model(), f"run.dir={tmp_path / 'run'}", **settings)
    traces, (terminal, theirs) = Traces(), os.openpty()
    run = subprocess.Popen(
        [*arguments, *(["--supervise"] if supervised else [])],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=traces.environment(environment()),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    shown, made = b"", tmp_path / "run" / METRICS_FILE
    while not made.exists() or made.read_bytes().count(b"\n") < 2:
        shown += os.read(terminal, 4096)
    traces.look()
    os.close(terminal)
    os.killpg(run.pid, signal.SIGHUP)
    assert run.wait() == 128 + signal.SIGHUP, shown
    assert traces.left() == []
    saved = complete_checkpoints(tmp_path / "run")[-1]
    assert saved.name == f"step_{metrics(tmp_path / 'run')[-1]['step']:06d}"


@pytest.mark.wide
def test_sigterm_after_a_checkpoint_says_how_to_continue_and_that_continues(
    start, tmp_path: Path
) -> None:
    settings = INLINE | {"run.steps": 6, "run.checkpoint_every": 2}
    quoted = "run.dir=a run's dir"
    run = start(command(model(), quoted, **settings))
    run.step(3)  # the checkpoint of step 2 is complete
    run.process.send_signal(signal.SIGTERM)
    said = run.end(128 + signal.SIGTERM)
    found = re.search(
        r"interrupted \(SIGTERM\) after step (\d) of 6; the last checkpoint is of step (\d)", said
    )
    assert found, said
    step, checkpoint = map(int, found.groups())
    assert step == len(metrics(tmp_path / "a run's dir"))
    assert 3 <= step <= 5 and checkpoint == step
    again = to_type(said)
    assert again[-1] == "--resume" and again.count(quoted) == 1
    done = subprocess.run(again, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"continuing after step {checkpoint}" in done.stdout
    assert [row["step"] for row in metrics(tmp_path / "a run's dir")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.wide
def test_ctrl_c_saves_the_last_step_and_an_ignored_signal_stays_ignored(
    start, tmp_path: Path
) -> None:
    arguments = command(
        model(), "run.dir=run", **INLINE | {"run.steps": 50, "run.checkpoint_every": 0}
    )
    run = start(arguments, ignored=(signal.SIGTERM,))
    run.step(1)
    # nobody would start it again
    assert watched_as(psutil.Process(run.process.pid))["supervised"] is False
    run.process.send_signal(signal.SIGTERM)  # as of a shell that a program under nohup has outlived
    run.step(3)
    run.process.send_signal(signal.SIGINT)
    said = run.end(128 + signal.SIGINT)
    found = re.search(
        r"interrupted \(SIGINT\) after step (\d+) of 50; the last checkpoint is of step (\d+)", said
    )
    assert found and found[1] == found[2] and "SIGTERM" not in said, said
    again = to_type(said)
    assert again[-1] == "--resume" and again.count("run.dir=run") == 1
    status = [sys.executable, "-m", "megatron_stare.cli", "status", "run"]
    stands = subprocess.run(status, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert "--resume" in stands.stdout and "run-2" not in stands.stdout  # the same way on
    again[again.index("run.steps=50")] = f"run.steps={int(found[1]) + 1}"
    done = subprocess.run(again, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(tmp_path / "run")] == [*range(1, int(found[1]) + 2)]


@pytest.mark.wide
def test_a_scheduler_s_second_signal_while_ray_is_closed_leaves_nothing(start) -> None:
    run = start(command(model(), "run.dir=run", **{"run.steps": 50, "eval.prompts": 0}))
    run.step(1)
    run.traces.look()
    run.process.send_signal(signal.SIGINT)
    run.until("SIGINT: ")
    run.process.send_signal(signal.SIGTERM)
    run.until("SIGTERM: already closing")
    said = run.end(128 + signal.SIGINT)
    assert re.search(
        r"interrupted \(SIGINT\) after step (\d+) of 50; the last checkpoint is of step \1;", said
    ), said


@pytest.mark.wide
def test_a_second_ctrl_c_ends_a_run_on_ray_at_once_and_leaves_nothing(
    start, tmp_path: Path
) -> None:
    run = start(command(model(), "run.dir=run", **{"run.steps": 50, "eval.prompts": 0}))
    run.child("ray::Actor")
    run.traces.look()
    run.process.send_signal(signal.SIGINT)
    run.until("SIGINT: closing the run")
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.process.wait(SAME_S)
    run.process.send_signal(signal.SIGINT)
    said = run.end(128 + signal.SIGINT)
    assert said.splitlines()[0] == signal_anywhere.AT_ONCE
    begun = "after step 0 of 50; there is no checkpoint yet, so it begins again" in said
    # the directory was discarded in these 0.5 s
    assert begun or "before the run began; start it with" in said
    assert begun == (tmp_path / "run").exists()
    again = to_type(said)
    again[again.index("run.steps=50")] = "run.steps=1"
    done = subprocess.run(again, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1]


@pytest.mark.wide
def test_a_signal_to_the_whole_group_saves_the_last_step_too(start, tmp_path: Path) -> None:
    """The process gets the signal and then its group, as from `timeout`. In that group Ray's
    processes would end before they saved."""
    settings = {"run.steps": 50, "eval.prompts": 0, "run.checkpoint_every": 0}
    run = start(command(model(), "run.dir=run", **settings), apart=True)
    run.step(2)
    started = psutil.Process(run.process.pid).children(recursive=True)
    groups = {
        child.name(): os.getpgid(child.pid)
        for child in started
        if child.name() in ("raylet", "gcs_server")
    }
    assert (
        len(groups) == 2
        and run.process.pid not in groups.values()
        and os.getpgid(run.process.pid) == run.process.pid
    )
    run.process.send_signal(signal.SIGTERM)
    run.until("SIGTERM: ")
    os.killpg(run.process.pid, signal.SIGTERM)
    said = run.end(128 + signal.SIGTERM)
    step = int(re.search(r"the last checkpoint is of step (\d+); continue with", said)[1])  # type: ignore[index]
    assert step == metrics(tmp_path / "run")[-1]["step"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGUSR1, TO_BE_CONTINUED)]
)
def test_two_ranks_of_ray_save_before_they_are_closed(
    start, tmp_path: Path, number: int, code: int
) -> None:
    run = start(
        command(
            model(),
            "run.dir=run",
            **{"run.steps": 50, "eval.prompts": 0, "run.checkpoint_every": 0},
        )
    )
    run.step(2)
    run.traces.look()
    run.process.send_signal(number)
    said = run.end(code)
    found = re.search(
        r"after step (\d+) of 50; the last checkpoint is of step (\d+); continue with", said
    )
    assert found and found[1] == found[2], said
    assert int(found[1]) == len(metrics(tmp_path / "run"))
    again = [*to_type(said), "--stop-after", "1h"]
    again[again.index("run.steps=50")] = f"run.steps={int(found[1]) + 1}"
    done = subprocess.run(again, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"continuing after step {found[1]}" in done.stdout


@pytest.mark.wide
@pytest.mark.parametrize("point", ["gcs_server", "ray::Actor"])
def test_a_signal_while_ray_starts_leaves_nothing(start, tmp_path: Path, point: str) -> None:
    run = start(command(model(), "run.dir=run", **{"eval.prompts": 0}))
    run.child(point)
    run.traces.look()
    run.process.send_signal(signal.SIGTERM)
    said = run.end(128 + signal.SIGTERM)
    assert "interrupted (SIGTERM) before the run began; start it with" in said
    assert "run.dir=run" in to_type(said)
    assert list(tmp_path.iterdir()) == []


def test_a_signal_before_the_run_has_a_directory(start, tmp_path: Path) -> None:
    """The configuration is a pipe that nobody writes to, so the run stands at its very first
    line."""
    os.mkfifo(tmp_path / "config.yaml")
    run = start(command("algorithm=grpo", config="config.yaml"))
    # returns when the run has opened the other end
    with (tmp_path / "config.yaml").open("w") as pipe:
        run.process.send_signal(signal.SIGINT)
        run.until("SIGINT: closing")
        pipe.write((ROOT / "configs/quickstart.yaml").read_text())
    said = run.end(128 + signal.SIGINT)
    assert "interrupted (SIGINT) before the run began" in said
    assert to_type(said)[3:] == command("algorithm=grpo", config="config.yaml")[3:]
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.slow
def test_a_signal_at_any_time_is_answered_in_two_lines(tmp_path: Path) -> None:
    """Six of the moments of benchmarks/signal_anywhere.py, of which some are before the first
    step."""
    done = subprocess.run(
        [
            sys.executable,
            str(BENCHMARK),
            "--seeds=6",
            "--first-seed=4",
            f"--out={tmp_path / 'signals.json'}",
        ],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "6 of 6 in order"
    seeds = json.loads((tmp_path / "signals.json").read_text())["seeds"].values()
    assert {each["signal"] for each in seeds} == {"SIGINT", "SIGTERM", "SIGUSR1"}
    assert {each["steps"] == 0 for each in seeds} == {True, False}


SAVED = """SIGINT: the run is saved and closed after the update under way
interrupted (SIGINT) after step 3 of 50; the last checkpoint is of step 3; continue with
  megatron-stare train configs/quickstart.yaml run.dir=RUN --resume
"""
LOST = SAVED.replace(
    "the last checkpoint is of step 3", "there is no checkpoint yet, so it begins again"
)
BEGUN = "after step 3 of 50; the last checkpoint is of step 3; continue"
EARLY = SAVED.replace(BEGUN, "before the run began; start it")
AT_ONCE = LOST.replace("way\n", f"way\n{signal_anywhere.AT_ONCE}\n")
ALREADY = SAVED.replace("way\n", "way\nSIGTERM: already closing; Ctrl-C ends at once\n")
HURRIED = SAVED.replace("INT", "TERM").replace(
    "SIGTERM: the", "SIGUSR1: after its step\nSIGTERM: the", 1
)


@pytest.mark.parametrize(
    ("numbers", "code", "said", "well"),
    [
        ([signal.SIGINT], 130, SAVED, True),
        ([signal.SIGINT], 1, SAVED, False),
        ([signal.SIGINT], 130, LOST, False),  # it saves first
        ([signal.SIGINT], 130, EARLY, True),
        ([signal.SIGINT], 0, EARLY, False),
        ([signal.SIGTERM], 143, SAVED, False),
        ([signal.SIGTERM], 143, SAVED.replace("SIGINT", "SIGTERM"), True),
        ([signal.SIGINT], 130, SAVED + "RuntimeWarning: coroutine was never awaited\n", False),
        ([signal.SIGINT], 130, SAVED.partition("\n")[2], False),
        ([signal.SIGINT], 130, "", False),
        ([signal.SIGUSR1], 75, SAVED.replace("INT", "USR1"), True),
        ([signal.SIGUSR1], 138, SAVED.replace("INT", "USR1"), False),
        ([signal.SIGINT, signal.SIGINT], 130, AT_ONCE, True),
        ([signal.SIGINT, signal.SIGTERM], 130, AT_ONCE, False),
        ([signal.SIGINT, signal.SIGTERM], 130, ALREADY, True),
        ([signal.SIGINT, signal.SIGTERM], 130, SAVED, True),  # the second came too late
        ([signal.SIGTERM, signal.SIGINT], 130, ALREADY, True),  # both were pending
        ([signal.SIGTERM, signal.SIGINT], 143, ALREADY, False),
        ([signal.SIGINT], 130, ALREADY, False),
        ([signal.SIGUSR1, signal.SIGTERM], 143, HURRIED, True),
        ([signal.SIGUSR1, signal.SIGTERM], 75, HURRIED, False),
    ],
)
def test_what_the_benchmark_takes_for_in_order(
    numbers: list[int], code: int, said: str, well: bool
) -> None:
    assert signal_anywhere.in_order(numbers, code, said) is well
