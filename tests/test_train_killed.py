"""Whole runs of which something is killed (SIGKILL), and which nobody touches afterwards: they end
with the weights of the undisturbed run, bit for bit, with every step once in their record, and
leave nothing. See benchmarks/kill_anywhere.py.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.leftovers import Traces
from support.runs import LOADING, ROOT, command, environment, metrics, model, watched_as

sys.path.insert(0, str(ROOT / "benchmarks"))

import kill_anywhere  # a script

pytestmark = pytest.mark.distributed
BENCHMARK = ROOT / "benchmarks/kill_anywhere.py"
SECONDS = 3600.0  # a busy machine takes several times as long


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of no seeds at all: the runs without a kill, of one process."""
    return killed(tmp_path_factory.mktemp("kill") / "kills.json", "--runner=inline", "--seeds=0")


def killed(out: Path, *arguments: str) -> Path:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *arguments, f"--out={out}"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def outcomes(out: Path) -> dict[str, dict]:
    found: dict[str, dict] = json.loads(out.read_text())["seeds"]
    return found


def settings(**more: object) -> dict[str, object]:
    return {**kill_anywhere.SMALL, **kill_anywhere.RUNNERS["inline"], **more}


def policy(run: Path) -> str:
    return hashlib.sha256((run / "hf/model.safetensors").read_bytes()).hexdigest()


@pytest.mark.wide
def test_three_seeds(undisturbed: Path) -> None:
    """Two drivers and a verifier, in the middle of their runs; what is recorded is not done
    again."""
    killed(undisturbed, "--runner=inline", "--first-seed=18", "--seeds=2")
    killed(undisturbed, "--runner=inline", "--first-seed=19", "--seeds=2")
    found = outcomes(undisturbed)
    assert list(found) == ["18", "19", "20"]
    assert all(each["equal"] and not each["left"] for each in found.values())
    assert len({each["date"] for each in found.values()}) == 3


@pytest.mark.wide
def test_a_driver_that_lost_its_only_engine_opens_the_run_again(
    undisturbed: Path, tmp_path: Path
) -> None:
    """In the process that it was in, from the checkpoint of step 2, though it was lost in step 4:
    step 3 is made twice and recorded once. Nobody supervises it."""
    (tmp_path / "order").write_text("13")  # of step 4: four prompts a step
    told = subprocess.run(
        command(model(), **settings(**{"rollout.engine": "support.engines.LostEngine"})),
        cwd=tmp_path,
        env={**environment(), "LOSE_AT": str(tmp_path / "order")},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert "lost after step 3: rollout.engines: no engine is left" in told.stderr
    assert "continuing after step 2" in told.stdout  # the newest checkpoint, not an older one
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["restarts/run"] for row in rows] == [0, 0, 1, 1, 1, 1]
    (whole,) = json.loads(undisturbed.read_text())["undisturbed"].values()
    assert policy(tmp_path / "run") == whole["sha256"]


@pytest.mark.wide
def test_the_supervisor_is_small_and_its_run_ends_with_it(tmp_path: Path) -> None:
    """The supervisor holds neither torch nor Ray, which would end it with the driver. A supervisor
    that is killed leaves nothing running, and a run that can be continued."""
    traces = Traces()
    with (tmp_path / "said").open("w") as said:
        supervisor = subprocess.Popen(
            [*command(model(), **settings()), "--supervise"],
            cwd=tmp_path,
            env=traces.environment(environment()),
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        try:
            assert any(line.lstrip().startswith("step ") for line in supervisor.stdout)
            (driver,) = psutil.Process(supervisor.pid).children()
            # it therefore kills a driver that hangs, where it would ask another to end
            assert watched_as(driver)["supervised"] is True
            held = [Path(f"/proc/{pid}/maps").read_text() for pid in (supervisor.pid, driver.pid)]
            assert ["libtorch" in each for each in held] == [False, True]
            assert not any(library in held[0] for library in ("_raylet", "numpy"))
            assert (
                psutil.Process(supervisor.pid).num_threads() == 1
            )  # another's would take the signals that it waits for
            traces.look()
            supervisor.kill()
            supervisor.wait()
        finally:
            supervisor.kill()
            supervisor.communicate()
    assert traces.left() == []
    loading, told, *_, last = (tmp_path / "said").read_text().splitlines()
    assert f"{loading}\n" == LOADING
    assert told.startswith("SIGTERM: ")  # what it does then depends on what it was at
    assert last.endswith((" --supervise", " --supervise --resume"))


def test_an_error_of_the_user_is_not_tried_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [*command(**settings(**{"model.path": tmp_path / "gone"})), "--supervise"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1 and "restarts in" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("process", kill_anywhere.PROCESSES["ray"])
def test_any_process_of_a_run_on_ray(
    tmp_path: Path, process: str, on_ray: kill_anywhere.Outcome
) -> None:
    """In the middle of its steps. All but the driver's own death, which its supervisor sees to, the
    driver sees to; of its agent's or control store's death Ray may end the driver first."""
    outcome = kill_anywhere.run("ray", process, after=2)
    assert outcome.code == 0, outcome.said
    assert 2 <= outcome.step < 6 and outcome.killed_s is not None
    assert (outcome.sha256, outcome.steps, outcome.left) == (on_ray.sha256, on_ray.steps, ())
    by = {"driver": [("supervisor",)], "verifier": [()]}
    if process in ("raylet", "gcs"):
        assert outcome.by in [("driver",), ("supervisor",)]
    else:
        assert [outcome.by] == by.get(process, [("driver",)])


@pytest.fixture(scope="module")
def on_ray() -> kill_anywhere.Outcome:
    outcome = kill_anywhere.run("ray")
    assert outcome.code == 0, outcome.said
    return outcome


@pytest.mark.slow
def test_twenty_seeds(tmp_path: Path) -> None:
    out = killed(tmp_path / "kills.json", "--seeds=20", "--first-seed=100")
    found = outcomes(out)
    assert len(found) == 20 and all(each["equal"] and not each["left"] for each in found.values())
    assert {each["runner"] for each in found.values()} == {"inline", "ray"}
