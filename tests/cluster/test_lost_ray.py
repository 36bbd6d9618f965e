"""Ray's own processes, killed: of a cluster that was joined, and of one that was started here."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from support.cluster import QUICK
from support.runs import ROOT, model
from support.waiting_worker import WaitingWorker

from megatron_stare.cluster import ray as on_ray
from megatron_stare.cluster.ray_processes import loss_behind
from megatron_stare.cluster.ray_runner import RayRunner, preview
from megatron_stare.config.load import load_config, validate
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.process.network import LOOPBACK, Listener, free_port
from megatron_stare.process.workers import WorkerLostError

LONG_S = 300.0  # that calls would wait
SAID = "noticed, ended, started again"
TRIES = 4  # Ray ends about one driver in four


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own modules, for actors."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))


def still_there(pids: list[int]) -> list[tuple[int, str, list[str]]]:
    """Processes that still run, each with its status and command."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append((pid, process.status(), process.cmdline()))
    return found


def workers() -> on_ray.RayWorkers:
    found = on_ray.start_actors([{}, {}], 1, "rank", LONG_S)
    found.build(WaitingWorker, [(), ()])
    return found


def broken(kind: str) -> None:
    """Kills this process of Ray's under two ranks that wait."""
    config = validate({"model": {"path": "m"}, "runtime": {"object_store_mb": 100}}, "a.yaml")
    on_ray.start_ray(config)
    try:
        ranks = workers()
        pids = [*ranks.call("pid"), *(p.pid for p in psutil.Process().children(recursive=True))]
        waiting = ranks.start("wait")
        (victim,) = on_ray._own_node().all_processes[kind]
        victim.process.send_signal(signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="on this machine has ended"):
            ranks.wait(waiting)
        ranks.close()
    finally:
        on_ray.leave_ray()
    assert still_there(pids) == []
    on_ray.start_ray(config)
    try:
        assert len(workers().call("pid")) == 2
    finally:
        on_ray.leave_ray()
    print(SAID)


def broken_while_it_starts(kind: str) -> None:
    """Kills this process of Ray's as soon as it is there."""
    config = validate({"model": {"path": "m"}, "runtime": {"object_store_mb": 100}}, "a.yaml")
    started: list[int] = []

    def kill() -> None:
        while not (found := [each for each in psutil.Process().children() if each.name() == kind]):
            pass
        started.extend(each.pid for each in psutil.Process().children(recursive=True))
        found[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerLostError, match="on this machine has ended"):
        on_ray.start_ray(config)
    killer.join()
    assert still_there(started) == []
    assert psutil.Process().children() == []
    on_ray.start_ray(config)
    try:
        assert len(workers().call("pid")) == 2
    finally:
        on_ray.leave_ray()
    print(SAID)


def in_a_driver_of_its_own(function: str, kind: str) -> None:
    """Runs a function of this file in a process of its own. Ray now and then ends the driver itself
    for a process of its own that died, with exit code 1 and without a word of Python, which only
    `train --supervise` outlives (docs/recovery.md); then the function is run again."""
    command = [sys.executable, "-c", f"import test_lost_ray; test_lost_ray.{function}({kind!r})"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests", Path(__file__).parent])),
    }
    for _ in range(TRIES):
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        if run.returncode != 1 or "Traceback" in run.stderr:
            break
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == SAID


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raylet", "gcs_server"])
def test_a_ray_of_ours_that_is_broken_is_noticed_ended_whole_and_started_again(kind: str) -> None:
    in_a_driver_of_its_own("broken", kind)


@pytest.mark.parametrize("what", ["rollout engine", "evaluation engine", "trainer rank"])
def test_engines_have_time_to_free_their_gpus(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(on_ray, "_end", lambda actors, limit_s: given.append(limit_s))
    on_ray.RayWorkers([], what, 1.0).close()
    assert given == [on_ray.ENGINES_LEFT_S if "engine" in what else on_ray.LEFT_S]


def test_a_listener_is_gone_when_every_attempt_has_failed_for_long_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not when one attempt fails after minutes in which nobody tried."""
    listener, now, answers = Listener("head:6379", "here"), [1000.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(listener, "missing", lambda timeout_s: answers[-1])

    def gone(after_s: float, error: Exception | None) -> bool:
        now[0] += after_s
        answers.append(error)
        return listener.gone(20, 1)

    late = TimeoutError("timed out")
    assert not gone(0, None)
    assert not gone(300, late)
    assert not gone(300, late)
    assert not any(gone(1, late) for _ in range(20))
    assert gone(1, late)
    assert not gone(1, None)
    assert not gone(1, late)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raylet", "gcs_server"])
def test_a_ray_that_breaks_while_it_starts_is_a_loss_and_nothing_of_it_stays(kind: str) -> None:
    """Ray waits for half a minute, speaks of a node that is late, and leaves the others where they
    are."""
    in_a_driver_of_its_own("broken_while_it_starts", kind)


@pytest.mark.slow
def test_a_cluster_whose_control_store_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Ray ends the driver for it, which takes a minute; and it is left in a fraction of
    that."""
    from ray.cluster_utils import Cluster

    monkeypatch.setattr(on_ray, "HEAD_S", 2.0)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": QUICK})
    try:
        address = cluster.address
        on_ray.start_ray(
            validate({"model": {"path": "m"}, "runtime": {"ray_address": address}}, "a.yaml")
        )
        ranks = workers()
        waiting = ranks.start("wait")
        cluster.head_node.kill_gcs_server(check_alive=False)
        begun = time.monotonic()
        with pytest.raises(
            UserError, match=rf"the control store \(GCS\) of {address} is gone"
        ) as gone:
            ranks.wait(waiting)
        assert not isinstance(gone.value, WorkerLostError)  # the run is not opened again
        assert gone.value.exit_code == 75  # but its job may be, on a new cluster
        ranks.close()
        on_ray.leave_ray()
        assert time.monotonic() - begun < 50  # Ray's own limit is 60
    finally:
        on_ray.leave_ray()
        cluster.shutdown()


@pytest.mark.slow
def test_an_error_of_a_rank_whose_peer_died_is_the_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo tells a rank that its peer is gone before Ray tells the driver."""
    on_ray.start_ray(
        validate({"model": {"path": "m"}, "runtime": {"object_store_mb": 100}}, "a.yaml")
    )
    try:
        ranks = workers()
        with pytest.raises(ray.exceptions.RayTaskError) as failed:
            ranks.wait([ranks.start_on(0, "fail")])
        monkeypatch.setattr("megatron_stare.cluster.ray_processes.DEATH_S", 0.0)
        assert on_ray.find_lost(failed.value, ranks, "rank") is None  # nobody has died
        monkeypatch.undo()
        psutil.Process(ranks.call("pid")[1]).kill()
        assert "rank 1 died" in str(on_ray.find_lost(failed.value, ranks, "rank"))
        assert on_ray.find_lost(WorkerLostError("said"), ranks, "rank") is None
    finally:
        on_ray.leave_ray()


class Node:
    """Stand-in for what Ray keeps of the processes that it started."""

    def __init__(self, *dead: str) -> None:
        self._dead = dead

    def dead_processes(self) -> list[tuple[str, Any]]:
        return [(kind, None) for kind in self._dead]


def later(times: int, number: int) -> Callable[[], int | None]:
    """Ray knows of the death of a worker after it was asked so often."""
    asked = iter([None] * times)
    return lambda: next(asked, number)


@pytest.mark.parametrize(
    ("error", "node", "died", "said"),
    [
        (RuntimeError("gloo"), None, later(3, 2), "rank 2 died"),
        (
            RuntimeError("gloo"),
            Node("log_monitor", "raylet"),
            later(0, 2),
            r"agent \(raylet\) on this machine",
        ),
        (UserError("the checkpoint could not be written"), None, later(0, 1), "rank 1 died"),
        (UserError("the disk is full"), None, later(1, 1), None),  # the user does not wait
        (UserError("the disk is full"), Node("log_monitor"), lambda: None, None),
    ],
)
def test_what_is_behind_an_error(error: Exception, node: Any, died: Any, said: str | None) -> None:
    found = loss_behind(error, node, died, "rank")
    if said is None:
        assert found is None
    else:
        with pytest.raises(WorkerLostError, match=said):
            raise found


@pytest.mark.parametrize(
    "begun", [preview, lambda config: RayRunner(resolve_run(config))], ids=["preview", "run"]
)
def test_a_cluster_is_joined_before_anything_is_placed(begun: Callable[[Config], object]) -> None:
    address = f"{LOOPBACK}:{free_port(LOOPBACK, [0])}"
    config = load_config(
        str(ROOT / "configs/quickstart.yaml"), [model(), f"runtime.ray_address={address}"]
    )
    with pytest.raises(UserError, match=f"no Ray cluster can be reached at {address}"):
        begun(config)
