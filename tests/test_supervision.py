"""The supervisor and drivers of a few lines, which end as runs do: by signals, aborted, by errors
of either kind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_stare.process.interruption import ENDING

ROOT = Path(__file__).parents[1]

# Runs the supervisor over another program than `train`, and does not wait long for what a driver
# leaves.
SUPERVISOR = """
import os, sys
from megatron_stare.driver import supervision
supervision.LEFT_S = 0.1
limit_s = float(os.environ.get('LIMIT_S', 0)) or None
sys.exit(supervision.supervise(sys.argv[2:], limit_s, [sys.executable, sys.argv[1]]))
"""
DRIVER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from megatron_stare.driver import supervision

SPELT = "faults: {run: %s}"
here = Path.cwd()
with (here / "starts").open("a") as starts:
    starts.write(json.dumps(sys.argv[1:]) + chr(10))
number = len((here / "starts").read_text().splitlines())
supervised = supervision.attach()
run = here / "run"

def begin(recovery="attempts: 3, back_off_s: 0"):
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(SPELT % f"{{{recovery}}}")
    supervision.tell_run_dir(run)

def step(number):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": number}) + chr(10))

def die(number):
    os.kill(os.getpid(), number)

"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    begun: list[subprocess.Popen[str]] = []

    def begin(driver: str, *arguments: str) -> subprocess.Popen[str]:
        (tmp_path / "driver.py").write_text(DRIVER + driver)
        command = [
            sys.executable,
            "-c",
            SUPERVISOR,
            str(tmp_path / "driver.py"),
            *(arguments or ("config.yaml",)),
        ]
        begun.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: [
                    signal.signal(n, signal.SIG_DFL) for n in (signal.SIGINT, signal.SIGTERM)
                ],
            )
        )
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


@pytest.fixture
def done(start) -> Callable[..., tuple[int, str]]:
    def end(driver: str, *arguments: str) -> tuple[int, str]:
        process = start(driver, *arguments)
        _, said = process.communicate(timeout=60)
        return process.returncode, said

    return end


def starts(folder: Path) -> list[list[str]]:
    """The arguments of every start."""
    return [json.loads(line) for line in (folder / "starts").read_text().splitlines()]


def restarts(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run/restarts.jsonl").read_text().splitlines()]


def test_a_driver_that_is_killed_is_continued_and_one_that_ends_is_not(
    done, tmp_path: Path
) -> None:
    driver = """
begin()
if number < 3:
    step(number)
    die(signal.SIGKILL)
print("supervised", supervised, supervision.restarted())
"""
    code, said = done(
        driver, "config.yaml", "run.dir=elsewhere", "batch.prompts=4", "--dump-step=3"
    )
    assert code == 0, said
    first, *again = starts(tmp_path)
    assert first == ["config.yaml", "run.dir=elsewhere", "batch.prompts=4", "--dump-step=3"]
    # the last of several settings of one key counts, so the directory's is the only one
    assert (
        again
        == [
            [
                "config.yaml",
                f"run.dir={tmp_path / 'run'}",
                "batch.prompts=4",
                "--dump-step=3",
                "--resume",
            ]
        ]
        * 2
    )
    assert [(row["by"], row["step"]) for row in restarts(tmp_path)] == [
        ("supervisor", 1),
        ("supervisor", 2),
    ]
    assert (
        "the driver was killed by SIGKILL after step 1; it restarts in 0 s (attempt 1 of 3)" in said
    )


def test_one_that_was_lost_before_it_had_a_directory_begins_anew(done, tmp_path: Path) -> None:
    """So does one whose directory is gone again, as it is after a start that failed."""
    driver = """
if number == 1:
    run.mkdir()
    supervision.tell_run_dir(run)
    run.rmdir()
    die(signal.SIGKILL)
begin()
"""
    code, _ = done(driver, "config.yaml", "run.dir=run")
    assert code == 0
    assert starts(tmp_path) == [["config.yaml", "run.dir=run"]] * 2


@pytest.mark.parametrize(
    ("end", "code", "times"),
    [
        ("sys.exit(2)", 2, 1),  # the user's
        ("sys.exit(130)", 130, 1),  # interrupted, as its own handler says
        ("sys.exit(143)", 143, 1),
        ("sys.exit(0)", 0, 1),
        ("die(signal.SIGTERM)", 143, 1),  # before it had a handler
        ("sys.exit(1)", 1, 3),
        ("raise RuntimeError('of ours')", 1, 3),
        ("os.abort()", 134, 3),
        ("die(signal.SIGKILL)", 137, 3),
    ],
)
def test_what_is_tried_again_is_so_a_bounded_number_of_times(
    done, tmp_path: Path, end, code, times
) -> None:
    found, said = done(f"begin('attempts: 2, back_off_s: 0')\nstep(1)\n{end}\n")
    assert (found, len(starts(tmp_path))) == (code, times), said


def test_progress_makes_more_restarts_possible_and_steps_made_again_do_not(
    done, tmp_path: Path
) -> None:
    driver = """
begin("attempts: 1, window_steps: 2, back_off_s: 0")
if number < 5:
    step(2 * number)
elif number == 5:
    (run / "metrics.jsonl").write_text("")  # as a resume cuts it back
    step(7)
die(signal.SIGKILL)
"""
    code, said = done(driver)
    assert code == 137
    assert len(starts(tmp_path)) == 5, said


@pytest.mark.parametrize("spelt", ["faults: {run: %s}", "recovery: %s"])
def test_the_wait_grows(done, tmp_path: Path, spelt: str) -> None:
    """The settings are spelt as the run wrote them down, or as an earlier release did."""
    done(
        f"SPELT = {spelt!r}\nbegin('attempts: 3, back_off_s: 0.01, longest_back_off_s:"
        " 0.03')\ndie(signal.SIGKILL)\n"
    )
    assert [row["wait_s"] for row in restarts(tmp_path)] == [0.01, 0.02, 0.03]


def test_a_checkpoint_that_was_chosen_is_so_until_the_run_has_come_to_it(
    done, tmp_path, monkeypatch
) -> None:
    """Then later ones are set aside, and those that it makes itself must not be. The time that is
    left is what is given to the next driver."""
    driver = """
begin()
if number == 2:
    supervision.tell_came_up()
if number < 4:
    die(signal.SIGKILL)
"""
    monkeypatch.setenv("LIMIT_S", "5000")
    code, said = done(driver, "config.yaml", "--from-step=4", "--resume")
    assert code == 0, said
    assert [["--from-step=4" in each, "--resume" in each] for each in starts(tmp_path)] == [
        [True, True],
        [True, True],
        [False, True],
        [False, True],
    ]
    left = [int(each[-1].removeprefix("--stop-after=")) for each in starts(tmp_path)]
    assert left == sorted(left, reverse=True) and left[-1] > 4000 and left[0] <= 5000


LOST = "begin('attempts: 3, back_off_s: 600, longest_back_off_s: 600')\ndie(signal.SIGKILL)\n"
WAITING = """
begin()
def tell(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number != signal.SIGUSR1:
        sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, tell)
print("there", os.getpid(), flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("number", ENDING)
def test_signals_come_to_the_driver_and_one_that_ends_it_ends_the_run(
    start, tmp_path: Path, number: int
) -> None:
    process = start(WAITING)
    assert process.stdout.readline().startswith("there")
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "SIGUSR1\n"
    process.send_signal(number)
    assert process.stdout.readline() == f"{signal.Signals(number).name}\n"
    assert process.wait() == 128 + number
    assert len(starts(tmp_path)) == 1


def test_a_driver_that_dies_as_it_closes_is_not_started_again(start, tmp_path: Path) -> None:
    process = start(WAITING.replace("sys.exit(128 + number)", "os.abort()"))
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 134
    assert len(starts(tmp_path)) == 1


def test_a_signal_ends_the_wait_for_a_restart(start, tmp_path: Path) -> None:
    process = start(LOST)
    assert "restarts in 600 s" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert len(starts(tmp_path)) == 1


def test_a_driver_lost_when_its_time_is_up_is_not_started_again(start, tmp_path: Path) -> None:
    """Its job is started again, from the newest checkpoint."""
    process = start(WAITING.replace("if number != signal.SIGUSR1:", "os.abort()\n    if True:"))
    process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    assert process.wait() == 75
    waits = start(LOST)
    assert "restarts in 600 s" in waits.stderr.readline()
    waits.send_signal(signal.SIGUSR1)
    assert waits.wait() == 75
    assert len(starts(tmp_path)) == 2


def test_a_signal_after_the_last_driver_changes_no_exit_code(start) -> None:
    """The signal comes while the supervisor waits for what the driver left behind."""
    process = start(
        "begin()\nchild = subprocess.Popen([sys.executable, '-c', 'import signal;"
        " signal.pause()'], start_new_session=True)\nprint(child.pid, flush=True)\nsys.exit(2)\n"
    )
    child = psutil.Process(int(process.stdout.readline()))
    while child.ppid() != process.pid:  # the driver is gone
        assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    child.kill()
    assert process.wait() == 2


def test_a_driver_does_not_outlive_its_supervisor(start) -> None:
    """The driver is told of its supervisor's end, and ends as by SIGTERM: closing what it holds."""
    process = start(WAITING)
    driver = psutil.Process(int(process.stdout.readline().split()[1]))
    assert os.getpgid(driver.pid) == driver.pid  # a terminal's Ctrl-C would come twice
    process.kill()
    assert process.stdout.readline() == "SIGTERM\n"
    driver.wait(30)


def test_nothing_of_a_driver_that_was_killed_is_left_when_the_next_one_starts(done) -> None:
    """Not what it started in a session of its own, nor what that started, nor what its supervisor
    could not know."""
    driver = """
begin()
pause = "subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])"
program = f"import subprocess, sys; {pause}"
if number == 1:
    child = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    import psutil
    while not (grandchildren := psutil.Process(child.pid).children()):
        pass
    (here / "children").write_text(f"{child.pid} {grandchildren[0].pid}")
    die(signal.SIGKILL)
left = [pid for pid in (here / "children").read_text().split() if os.path.exists(f"/proc/{pid}")]
sys.exit(f"left: {left}" if left else 0)
"""
    code, said = done(driver)
    assert code == 0, said


def test_a_driver_tells_nobody_what_it_was_told(done) -> None:
    """A process that a driver starts is no driver: it would end with the wrong one, and write to a
    pipe not its own."""
    driver = """
begin()
assert supervised and supervision.VARIABLE not in os.environ
fd = supervision._pipe
code = subprocess.run(
    [sys.executable, "-c", f"import os; os.fstat({fd})"], close_fds=False, stderr=subprocess.DEVNULL
)
sys.exit(code.returncode != 1)
"""
    assert done(driver)[0] == 0
