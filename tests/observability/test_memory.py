"""The memory of a process tree, measured on real processes."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from test_monitor import log, settings

from megatron_stare.observability.metrics import step_metrics
from megatron_stare.observability.metrics.monitor import Monitor
from megatron_stare.observability.sink import RunOutline
from megatron_stare.process import memory
from megatron_stare.process.memory import tree_pss_bytes

MB = 2**20
pytestmark = pytest.mark.skipif(tree_pss_bytes() is None, reason="only Linux tells")

# Writes to every page, for untouched memory takes no room; then holds it until stdin closes.
HOLD = "import sys; x = b'x' * ({mb} << 20); print('ready', flush=True); sys.stdin.read()"
# Leaves a process behind, whose parent is another.
ORPHAN = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {inner!r}],"
    " start_new_session=True, stdout=subprocess.PIPE); p.stdout.readline();"
    " print('ready'); print(p.pid, flush=True)"
)
NEST = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {inner!r}]); p.wait()"


@pytest.fixture
def start():
    children = []

    def run(code):
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        children.append(child)
        assert child.stdout.readline() == "ready\n"
        return child

    yield run
    for child in children:
        child.communicate()  # closes stdin, which lets it end


def test_grandchildren_count(start):
    before = tree_pss_bytes()
    child = start(NEST.format(inner=HOLD.format(mb=64)))
    assert tree_pss_bytes() - before > 60 * MB
    assert 64 * MB < tree_pss_bytes(child.pid) < 128 * MB


def test_extra_roots_count_once(start):
    first, second = start(HOLD.format(mb=32)), start(HOLD.format(mb=32))
    alone = tree_pss_bytes(first.pid)
    both = tree_pss_bytes(first.pid, extra_pids=[second.pid])
    assert both - alone > 30 * MB
    assert tree_pss_bytes(
        first.pid, extra_pids=[first.pid, second.pid, second.pid]
    ) == pytest.approx(both, rel=0.02)


def test_workers_that_do_not_descend_from_the_driver_count_in_its_metric(start, monkeypatch):
    parent = start(ORPHAN.format(inner=HOLD.format(mb=64)))
    orphan = psutil.Process(int(parent.stdout.readline()))
    parent.wait()
    assert orphan not in psutil.Process().children(recursive=True)
    monitor = Monitor({}, RunOutline(Path(), settings()))
    monitor.pids_here = lambda: [orphan.pid]
    logged = []
    monkeypatch.setattr(monitor._watch, "add", lambda step, metrics: logged.append(metrics) or [])
    monkeypatch.setattr(step_metrics, "_memory", step_metrics._MemoryProbe())
    log(monitor, 1)
    (found,) = logged
    assert found["memory/tree_pss_gb"] * 1e9 > tree_pss_bytes() + 60 * MB


def test_a_pid_is_valid_in_the_space_of_its_process_alone(monkeypatch):
    here = memory.own_home()
    code = "from megatron_stare.process.memory import own_home as h; print(h().space, h().pid)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    space, pid = child.stdout.rstrip().rsplit(" ", 1)
    assert (here.space, here.pid) == (space, os.getpid()) and int(pid) != here.pid
    monkeypatch.setattr(memory, "_PID_SPACE", "/proc/self/ns/net")  # as in another namespace
    assert memory.own_home().space != here.space


def test_shared_pages_are_not_counted_twice():
    everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]
    assert tree_pss_bytes() <= sum(p.memory_info().rss for p in everyone) * 1.02


def test_processes_that_are_gone_count_as_nothing(start):
    child = start(HOLD.format(mb=1))
    child.stdin.close()
    child.wait()
    child.stdin = None
    assert tree_pss_bytes(child.pid) == 0
    assert tree_pss_bytes(2**22 + 1) == 0  # above the largest pid there can be


def test_a_process_that_vanishes_between_listing_and_reading(start, monkeypatch):
    child = start(HOLD.format(mb=1))
    listed = {psutil.Process(), psutil.Process(child.pid)}
    child.stdin.close()
    child.wait()
    child.stdin = None
    monkeypatch.setattr(memory, "_tree", lambda pid: listed)
    assert tree_pss_bytes() > MB


def test_none_where_the_kernel_does_not_tell(monkeypatch):
    # as psutil has it there
    monkeypatch.setattr(psutil.Process, "memory_full_info", psutil.Process.memory_info)
    assert tree_pss_bytes() is None
