"""A Ray that a run starts for itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._raylet import AuthenticationMode, get_authentication_mode
from support.runs import ROOT, environment, model
from support.waiting_worker import WaitingWorker

from megatron_stare.cluster import ray as on_ray
from megatron_stare.cluster import ray_tokens
from megatron_stare.cluster.ray_runner import RayRunner, preview
from megatron_stare.config.load import load_config, validate
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError, UserError

RECORDED = "RAY_task_events_report_interval_ms"
SECONDS = 60.0


def seconds_until_calls_are_kept(at_most: float) -> float | None:
    """Starts a Ray and measures the seconds until it keeps calls; None where it keeps none."""
    on_ray.start_ray(
        validate({"model": {"path": "m"}, "runtime": {"object_store_mb": 100}}, "a.yaml")
    )
    try:
        workers = on_ray.start_actors([{}], 1, "rank", SECONDS)
        workers.build(WaitingWorker, [()])
        begun = time.monotonic()
        while time.monotonic() - begun < at_most:
            workers.call("pid")
            if ray.timeline():
                return time.monotonic() - begun
        return None
    finally:
        on_ray.leave_ray()


@pytest.mark.slow
def test_its_control_store_keeps_no_record_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """In three times as long as it takes to see that it does where it is told to."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    monkeypatch.setenv(RECORDED, "1000")
    seconds = seconds_until_calls_are_kept(SECONDS)
    assert seconds is not None
    monkeypatch.delenv(RECORDED)
    assert seconds_until_calls_are_kept(3 * seconds) is None


STORE = """
import ray
from megatron_stare.cluster import ray as on_ray
from megatron_stare.config.load import validate
on_ray.start_ray(validate({"model": {"path": "m"}, "runtime": {"object_store_mb": 100}}, "a.yaml"))
print(ray.cluster_resources()["object_store_memory"])
on_ray.leave_ray()
"""


@pytest.mark.wide
def test_its_object_store_is_as_large_as_it_is_told_to_be() -> None:
    """In a process of its own: other tests of this one may hold a Ray."""
    done = subprocess.run(
        [sys.executable, "-c", STORE], env=environment(), capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == 100 * 2**20


@pytest.mark.parametrize(
    "begun", [preview, lambda config: RayRunner(resolve_run(config))], ids=["preview", "run"]
)
def test_a_ray_of_the_users_program_is_left_alone(
    begun: Callable[[Config], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its actors and objects would be lost."""
    ended: list[bool] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    config = load_config(str(ROOT / "configs/quickstart.yaml"), [model()])
    with pytest.raises(ConfigError, match="this process is connected to Ray already"):
        begun(config)
    assert ended == []


def not_started(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], str, str | None]:
    """Starts a Ray that stops where its first process would start. Returns the environment that
    this process would have inherited, Ray's folder, and the advice."""
    found: list[tuple[dict[str, str], str]] = []

    def node(ray_params: Any, **_: object) -> None:
        found.append((dict(os.environ), ray_params.temp_dir))
        raise OSError("as told")

    monkeypatch.setattr("ray._private.node.Node", node)
    with pytest.raises(UserError, match="Ray does not start: as told") as error:
        on_ray.start_ray(validate({"model": {"path": "m"}}, "a.yaml"))
    ((inherited, folder),) = found
    return inherited, folder, error.value.fix


def test_a_cluster_is_asked_for_tokens_after_a_ray_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours has tokens; a driver with tokens would refuse the calls of a cluster without."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    inherited, *_ = not_started(monkeypatch)
    assert inherited["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_MODE" not in os.environ
    assert get_authentication_mode() == AuthenticationMode.DISABLED
    asked: list[str] = []
    monkeypatch.setattr(ray_tokens, "GcsClient", lambda address: asked.append(address))
    ray_tokens.authenticate("127.0.0.1:1")
    assert asked == ["127.0.0.1:1"]


AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def test_a_ray_of_ours_needs_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user may have none. The token is forgotten with its Ray."""
    for name in AUTHENTICATION:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc/none")
    ray_tokens.forget(frozenset())  # Ray may have read the token of another home
    inherited, *_ = not_started(monkeypatch)
    assert len(inherited["RAY_AUTH_TOKEN"]) == 64
    assert os.environ.keys().isdisjoint(AUTHENTICATION)


def test_a_token_of_the_home_is_used_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in AUTHENTICATION:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    ray_tokens.forget(frozenset())
    tokens = []
    for _ in range(2):
        inherited, *_ = not_started(monkeypatch)
        assert "RAY_AUTH_TOKEN" not in inherited
        tokens.append((tmp_path / ".ray" / "auth_token").read_text())
    assert tokens[0] == tokens[1]


LONG = "/" + "a" * 59


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ({}, "/tmp/ray"),
        ({"TMPDIR": "/scratch"}, "/scratch/ray"),
        ({"TMPDIR": LONG[:39]}, f"{LONG[:39]}/ray"),
        ({"TMPDIR": LONG[:40]}, "/tmp/ray"),
        ({"TMPDIR": LONG, "RAY_TMPDIR": "/local"}, "/local/ray"),
        ({"RAY_TMPDIR": LONG}, f"{LONG}/ray"),  # Ray says that it is too long
    ],
)
def test_the_folder_of_a_ray_of_ours(
    given: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sockets fit into it, and the advice names it."""
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    _, chosen, advice = not_started(monkeypatch)
    assert chosen == folder
    assert f"{folder}/session_latest/logs" in str(advice)


HOMELESS = """
import os
from support.waiting_worker import WaitingWorker
from megatron_stare.cluster import ray as on_ray
from megatron_stare.config.load import validate
on_ray.start_ray(validate({"model": {"path": "m"}, "runtime": {"object_store_mb": 100}}, "a.yaml"))
workers = on_ray.start_actors([{}], 1, "rank", 60)
workers.build(WaitingWorker, [()])
print(workers.call("pid")[0] != os.getpid(), len(os.environ["RAY_AUTH_TOKEN"]))
on_ray.leave_ray()
"""


@pytest.mark.wide
def test_it_starts_without_a_home_and_with_a_long_folder(tmp_path: Path) -> None:
    """And its workers are let in."""
    place = tmp_path / ("a" * 60)
    place.mkdir()
    kept = {
        name: value
        for name, value in environment().items()
        if name not in (*AUTHENTICATION, "RAY_TMPDIR")
    }
    own = {"HOME": "/proc/none", "TMPDIR": str(place)}
    done = subprocess.run(
        [sys.executable, "-c", HOMELESS],
        env={**kept, **own, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "True 64\n", done.stderr
    assert list(place.iterdir()) == []
