"""The watcher beside processes that really hang: what it says, where it writes it, and that it
leaves nothing."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.hangs import sentence_of, silent_server, stall_file_system
from support.runs import environment

from megatron_stare.hangs import node_facts, proc_files, watcher
from megatron_stare.hangs.driver_side import PREFIX, forget_left
from megatron_stare.hangs.hang_facts import ProcessFacts, ServerFacts
from megatron_stare.hangs.nodes import LOCK
from megatron_stare.hangs.verdict import Verdict
from megatron_stare.hangs.watcher import Settings, Watcher
from megatron_stare.rollout.fleet.dispatch import RequestsPage
from megatron_stare.run_dir.heartbeat import (
    DRIVER,
    FOLDER_VARIABLE,
    REQUESTS,
    Beat,
    beat_file,
    read_heartbeat,
    write_beat,
)

STAND_IN = Path(__file__).parents[1] / "support" / "stand_in_run.py"
Begin = Callable[..., "Watched"]


class Watched:
    """A stand-in of a run, and what its watcher says."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        self.folder, self.dir = Path(tempfile.mkdtemp(dir=run_dir.parent)), run_dir
        self.process = subprocess.Popen(
            [sys.executable, str(STAND_IN), str(self.folder), str(run_dir), *arguments],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )

    def told(self) -> str:
        """Waits for the screen."""
        lines = []
        for line in self.process.stderr:
            lines.append(line.rstrip("\n"))
            if line.startswith("  the black box:"):
                return "\n".join(lines)
        raise AssertionError(lines)

    def bundle(self, screen: str) -> Path:
        return Path(screen.splitlines()[-1].partition(": ")[2])

    def close(self) -> None:
        every = []
        with suppress(psutil.Error):
            every = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        # a driver that ended by itself has no children any more, and its ranks hold its stderr
        for each in psutil.process_iter():
            with suppress(psutil.Error):
                if {"rank", str(self.folder)} <= set(each.cmdline()):
                    each.kill()
        self.process.communicate()
        _, left = psutil.wait_procs(every, timeout=30)
        assert left == []  # the watcher by itself, as its driver is gone
        assert not self.folder.exists()


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    runs: list[Watched] = []

    def start(*arguments: str, run_dir: Path = tmp_path / "run") -> Watched:
        run_dir.mkdir(exist_ok=True)
        runs.append(Watched(run_dir, *arguments))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def test_a_stopped_rank_is_named_with_its_stack_and_killed_where_that_is_asked_for(
    begin: Begin,
) -> None:
    """A stopped rank cannot be asked where it stands, and is not woken for its stack. The run goes
    on once the rank is gone."""
    run = begin("stopped", "end_run")
    screen = run.told()
    assert sentence_of(screen) == "the driver waits for rank 1, which is stopped (SIGSTOP)"
    bundle = run.bundle(screen)
    assert bundle.parent == run.dir / "blackbox" and bundle.name == "step_000012_update"
    assert (bundle / "screen.txt").read_text().splitlines()[:2] == screen.splitlines()[:2]
    facts = json.loads((bundle / "facts.json").read_text())
    roles = {each["role"]: each for each in facts["processes"]}
    assert {role: each["state"] for role, each in roles.items()} == {
        "driver": "S",
        "trainer rank 0": "S",
        "trainer rank 1": "T",
    }
    assert {each["phase"] for each in roles.values()} == {"update"}
    assert all(each["pss_bytes"] > 0 for each in roles.values())
    for role, each in roles.items():
        (stack,) = (bundle / "stacks").glob(f"*_{each['pid']}_{role.replace(' ', '_')}.txt")
        assert ("in rank" if "rank" in role else "stop_rank") in stack.read_text().replace(
            "    rank", "in rank"
        )
    assert run.process.wait(60) == 0  # end_run has killed rank 1, for which the driver waited
    assert (
        f"killing trainer rank 1 (pid {roles['trainer rank 1']['pid']})"
        in run.process.stderr.read()
    )
    beat = read_heartbeat(run.dir)
    assert beat is not None and (beat.process, beat.black_box, beat.step) == (
        "ended",
        str(bundle),
        12,
    )


def test_a_driver_whose_interpreter_is_held_is_named(begin: Begin) -> None:
    """No thread of it runs any more, so none could have said this; ranks wait in calls of which the
    driver knows."""
    run = begin("interpreter")
    screen = run.told()
    facts = json.loads((run.bundle(screen) / "facts.json").read_text())
    (driver,) = (each for each in facts["processes"] if each["role"] == "driver")
    (thread,) = driver["threads"]
    assert thread["holds_interpreter"]
    assert "hold_interpreter" in [frame["function"] for frame in thread["frames"]]
    assert len(list(run.dir.glob("blackbox/*"))) == 1


def can_mount() -> bool:
    return os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs root and /dev/fuse")
def test_a_run_directory_that_does_not_answer_gets_its_bundle_elsewhere(
    begin: Begin, tmp_path: Path
) -> None:
    """The watcher's own copies wait for it too, and hold nothing up."""
    place = tmp_path / "stalled"
    place.mkdir()
    end = stall_file_system(place)
    try:
        run = Watched(place, "disk")
        screen = run.told()
        assert (
            f"for the driver, who waits in mkdir of {place}/step_12 (fuse at {place})"
            in sentence_of(screen)
        )
        bundle = run.bundle(screen)
        assert (bundle / "facts.json").exists() and place not in bundle.parents
    finally:
        end()
    run.close()


FAILS = """
import errno, os, sys
from megatron_stare.hangs import bundle, node_facts, watcher

def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def keep(self, *_):
    full() if str(self).endswith("rank_0") else write_bytes(self, *_)

def wrong(*_):
    raise LookupError("what nobody expects")

watcher.COPY_S = 0.1
node_facts.look = lambda *_, **__: []
node_facts.dump_flights = lambda _: ({"rank_0": b"0", "rank_1": b"1"}, "")
write_bytes, make = watcher.Path.write_bytes, watcher.tempfile.mkdtemp
fails = sys.argv[2]
if fails == "bundle":
    bundle.fill = full
elif fails == "memory":
    watcher.tempfile.mkdtemp = lambda prefix, dir=None: full() if dir else make(prefix=prefix)
elif fails == "a dump":
    watcher.Path.write_bytes = keep
elif fails == "verdict":
    watcher.verdict = wrong
else:
    watcher.Watcher.run = wrong
watcher.main(sys.argv[1])
"""


class Failing:
    """A watcher, whose driver this process is, that cannot do what `fails` names."""

    def __init__(self, folder: Path, fails: str) -> None:
        self.dir, beats = folder / "run", folder / "beats"
        self.dir.mkdir()
        beats.mkdir()
        settings = Settings(str(beats), str(self.dir), os.getpid(), tick_s=0.05)
        (beats / watcher.SETTINGS).write_text(json.dumps(asdict(settings)))
        now = time.monotonic()
        beat = Beat(DRIVER, os.getpid(), "update", time.time(), now, limit_s=0.2, step=7)
        write_beat(beat_file(beats, DRIVER), beat)
        self.process = subprocess.Popen(
            [sys.executable, "-c", FAILS, str(beats), fails],
            env={**environment(), "TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, said: str) -> str:
        assert self.process.stderr
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if said in line:
                return "".join(lines)
        raise AssertionError(lines)

    def written(self) -> float:
        beat = read_heartbeat(self.dir)
        return 0.0 if beat is None else beat.written


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("bundle", "the black box could not be written: [Errno 28] No space left on device"),
        ("memory", "NCCL's flight recorder: 0 dumps (folder nccl); 2 could not be written"),
        ("a dump", "NCCL's flight recorder: 1 dumps (folder nccl); 1 could not be written"),
        ("verdict", "the watcher failed: LookupError('what nobody expects')"),
    ],
)
def test_a_watcher_that_cannot_write_says_what_it_found_and_watches_on(
    fails: str, said: str, tmp_path: Path
) -> None:
    failing = Failing(tmp_path, fails)
    screen = failing.until(said)
    assert fails == "verdict" or screen.startswith("step 7, update: ")
    now, deadline = failing.written(), time.monotonic() + 30
    while failing.written() <= now:
        assert failing.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    _, rest = failing.process.communicate()  # which closes its standard input
    assert failing.process.returncode == 0 and "Traceback" not in rest
    assert not (tmp_path / "beats").exists() and not list(tmp_path.glob("megatron-stare-*"))


def test_a_watcher_that_ends_by_an_error_says_which(tmp_path: Path) -> None:
    failing = Failing(tmp_path, "run")
    _, said = failing.process.communicate()
    lines = said.strip().splitlines()
    assert (lines[0], lines[-1], failing.process.returncode) == (
        "Traceback (most recent call last):",
        "LookupError: what nobody expects",
        1,
    )


def test_a_server_is_asked_for_any_word_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "ASK_S", 0.3)
    with silent_server() as url:
        assert watcher.asked(2, url) == ServerFacts(
            2, url, "accepts what it is asked and does not answer"
        )
    assert watcher.asked(0, url).answer.startswith("cannot be asked: ")  # it has ended
    for said, answer in (
        (b"HTTP/1.0 401 Unauthorized\r\n\r\n", ""),
        (b"", "closes the connection without a word"),
    ):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            speaking = threading.Thread(target=answer_one, args=(listener, said))
            speaking.start()
            assert (
                watcher.asked(0, f"http://127.0.0.1:{listener.getsockname()[1]}/").answer == answer
            )
            speaking.join()


def answer_one(listener: socket.socket, said: bytes) -> None:
    with listener.accept()[0] as line:
        line.recv(4096)
        line.sendall(said)


def test_requests_are_told_with_their_ages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of each engine by name, the others by number; ages are those of the moment at
    which it is asked."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    page, now = RequestsPage(), time.monotonic()
    assert page.wait_s() == 0.0
    given = {f"r{n}": (1, now - 100 + n, 40 + n, 3) for n in range(12)}
    page.write(["healthy", "suspect"], given)
    idle, busy = watcher.read_requests(tmp_path / REQUESTS)
    assert (idle.number, idle.state, idle.under_way, idle.oldest) == (0, "healthy", 0, ())
    assert (busy.number, busy.state, busy.under_way) == (1, "suspect", 12)
    assert [(each.replica, each.prompt, each.sample) for each in busy.oldest] == [
        (1, 40 + n, 3) for n in range(5)
    ]
    assert busy.oldest[0].age_s >= 100 > busy.oldest[0].age_s - 60
    assert (page.wait_s() or 0) > 0  # not again at once
    page.write(["healthy", "suspect"], {})
    assert [each.under_way for each in watcher.read_requests(tmp_path / REQUESTS)] == [0, 0]


def test_where_nobody_watches_no_page_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    page = RequestsPage()
    page.write(["healthy"], {})
    assert page.wait_s() is None
    assert watcher.read_requests(tmp_path / REQUESTS) == ()


def test_folders_of_watchers_that_were_killed_are_removed_and_no_others(tmp_path: Path) -> None:
    left, held, young, other = (
        tmp_path / name for name in (*(f"{PREFIX}{n}" for n in "abc"), "not-ours")
    )
    for folder in (left, held, young, other):
        folder.mkdir()
        (folder / LOCK).touch()
    for folder in (left, held, other):
        os.utime(folder, (1.0, 1.0))
    with (held / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        forget_left(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([held, young, other])


def test_the_watcher_and_its_agents_import_neither_torch_nor_ray() -> None:
    """So they start in a blink, take little memory, and no lock of theirs is in their way."""
    names = "megatron_stare.hangs.watcher, megatron_stare.hangs.nodes"
    code = (
        f"import sys, {names}; print(*sorted({{'torch', 'ray', 'numpy', 'pydantic'}} &"
        " sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("supervised", "number"), [(False, signal.SIGTERM), (True, signal.SIGKILL)]
)
def test_a_driver_that_somebody_starts_again_is_not_asked_to_end(
    tmp_path: Path, supervised: bool, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervised driver is killed: after SIGTERM it would end as by its user's wish, and the run
    with it."""
    monkeypatch.setattr(Watcher, "_driver_ended", lambda self: True)
    driver = subprocess.Popen(["sleep", "600"])
    settings = Settings(
        str(tmp_path), str(tmp_path), driver.pid, end_run=True, supervised=supervised
    )
    hangs = ProcessFacts(node_facts.here(), driver.pid, DRIVER, "S")
    beat = Beat(role=DRIVER, pid=driver.pid, phase="update", since=0.0, moved=0.0, limit_s=1.0)
    Watcher(settings)._end(beat, Verdict("driver", "the driver hangs", (hangs,)))
    assert driver.wait(30) == -number


def test_what_a_process_started_is_killed_with_it() -> None:
    """A child that hangs keeps its parent's sockets, so nobody would be told of the parent's
    end."""
    parent = subprocess.Popen(
        ["bash", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    proc_files.kill(parent.pid)
    assert parent.wait(30) == -signal.SIGKILL
    _, left = psutil.wait_procs([child], timeout=30)
    assert left == [] or child.status() == psutil.STATUS_ZOMBIE


def test_processes_of_two_hosts_may_have_one_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray nodes of one host see the same processes."""

    def process(node: str, pid: int) -> dict[str, Any]:
        return {"node": node, "pid": pid, "role": "rank", "state": "S", "threads": []}

    said = [
        [process("a/01", 7), process("a/01", 8)],
        [process("a/02", 8), process("b/03", 7)],
    ]

    class Nodes:
        def ask(self) -> Any:
            return lambda: ([{"processes": each, "dumps": {}} for each in said], {})

    monkeypatch.setattr(node_facts, "look", lambda *_, **__: [process("a", 7)])
    watcher = Watcher(Settings(str(tmp_path), str(tmp_path / "run"), 1))
    monkeypatch.setattr(watcher, "_nodes", Nodes())
    facts = watcher.collect(Beat("driver", os.getpid(), "update", 0.0, 0.0), tmp_path)
    assert [(each.node, each.pid) for each in facts.processes] == [
        ("a", 7),
        ("a/01", 8),
        ("b/03", 7),
    ]
