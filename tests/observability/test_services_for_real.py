"""W&B offline and MLflow in a folder, as their packages write them: of runs that are killed and
continued, and of services that die or hang under a run. Needs `pip install wandb mlflow-skinny` in
the environment of the tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import psutil
import pytest
from support.runs import command, environment, model
from test_monitor import log, settings

from megatron_stare.errors import UserError
from megatron_stare.observability.metrics.monitor import Monitor
from megatron_stare.observability.sink import RunOutline, make_sinks
from megatron_stare.observability.sinks import service as service_module
from megatron_stare.observability.sinks.delivery import Delivered
from megatron_stare.observability.sinks.weights_and_biases import WeightsAndBiases, offline_rows
from megatron_stare.process.network import free_port
from megatron_stare.registry import Extension
from megatron_stare.run_dir.run_files import read_metrics

pytestmark = pytest.mark.slow
WANDB = Extension("wandb", {"mode": "offline"})


def mlflow_history(run_dir: Path, metric: str) -> list[tuple[int, float]]:
    """The points of a metric in the one run of its folder."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(run_dir / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("megatron_stare").experiment_id])
    return [
        (point.step, point.value) for point in client.get_metric_history(run.info.run_id, metric)
    ]


def test_a_run_that_is_killed_and_continued_stands_once_in_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    run = tmp_path / "run"
    given = {
        "runtime.runner": "inline",
        "parallel.tensor": 1,
        "run.steps": 8,
        "run.checkpoint_every": 2,
    }
    sinks = (f"observability.sinks=[jsonl,console,{WANDB},mlflow]", f"run.dir={run}", model())
    arguments = command(*sinks, **given | {"eval.prompts": 8, "eval.every": 2})
    process = subprocess.Popen(
        arguments, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    # after a checkpoint of step 2 or 4
    assert process.stdout and any("step 5/8" in line for line in process.stdout)
    process.kill()
    process.wait()
    done = subprocess.run(
        [*arguments, "--resume"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    metrics = {row["step"]: row for row in read_metrics(run / "metrics.jsonl")}
    told = offline_rows(run) or []
    rows = [row for row in told if "reward/mean" in row]
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)), "a step stands twice"
    assert steps == list(range(1, 9)), "what W&B lost with the driver was not given again"
    assert all(row["reward/mean"] == metrics[row["step"]]["reward/mean"] for row in rows)
    evaluations = [row["step"] for row in told if "eval/pass1" in row]
    assert evaluations == [0, 2, 4, 6, 8]
    # for who reads it here; the runs above had to do without
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    points = mlflow_history(run, "reward/mean")
    assert len(points) == len({step for step, _ in points}) and {step for step, _ in points} >= {
        1,
        2,
        3,
        4,
        7,
        8,
    }
    assert all(value == metrics[step]["reward/mean"] for step, value in points)
    results = mlflow_history(run, "eval/avg_at_1")
    assert len(results) == len({step for step, _ in results}) and {0, 8} <= {
        step for step, _ in results
    }
    assert len(list(run.glob("wandb/offline-run-*"))) == 2


def wandb_monitor(folder: Path, after: int = 0) -> tuple[Monitor, psutil.Process]:
    pytest.importorskip("wandb")
    before = {child.pid for child in psutil.Process().children()}
    monitor = Monitor(make_sinks(["jsonl", WANDB]), RunOutline(folder, settings()))
    if after:
        monitor.resume(after)
        monitor.resume_record(after)
    else:
        monitor.start()
    (core,) = [
        child
        for child in psutil.Process().children()
        if child.pid not in before and child.name().startswith("wandb-core")
    ]
    return monitor, core


def test_the_death_of_its_service_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor, core = wandb_monitor(tmp_path)
    log(monitor, 1)
    core.kill()
    core.wait()
    log(monitor, 2, 3, 4)
    monitor.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    said = capsys.readouterr().err
    assert (
        said.count("the sink 'wandb' of observability.sinks failed: ") == 1
        and "Traceback" not in said
    )


def test_a_service_that_stands_still_keeps_neither_steps_nor_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "CLOSE_S", 1.0)
    monitor, core = wandb_monitor(tmp_path)
    core.send_signal(signal.SIGSTOP)
    log(monitor, 1, 2, 3)
    monitor.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert "the service did not take the last reports within 1 s" in capsys.readouterr().err
    core.wait(10)  # ended, or it would keep this process from ending


def test_a_run_is_opened_again_in_the_process_whose_service_was_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "CLOSE_S", 1.0)
    monitor, core = wandb_monitor(tmp_path)
    log(monitor, 1, 2, 3)
    with monkeypatch.context() as patched:
        # as with a full queue of reports, the run is never ended in the service
        patched.setattr(WeightsAndBiases, "end", lambda *_: threading.Event().wait())
        monitor.close()
    core.wait(10)
    assert "the service did not take the last reports within 1 s" in capsys.readouterr().err
    monitor, _ = wandb_monitor(tmp_path, after=3)
    log(monitor, 4)
    monitor.close()
    assert "warning" not in capsys.readouterr().err
    told = [row["step"] for row in offline_rows(tmp_path) or [] if "reward/mean" in row]
    assert told == [1, 2, 3, 4]


def test_a_copied_offline_run_has_rows_of_its_own(tmp_path: Path) -> None:
    """The rows of the original do not count as the copy's, whose own were lost."""
    wandb = pytest.importorskip("wandb")
    original, copy = RunOutline(tmp_path / "a", settings()), RunOutline(tmp_path / "b", settings())
    original.dir.mkdir()
    monitor = Monitor(make_sinks(["jsonl", WANDB]), original)
    monitor.start()
    log(monitor, 1, 2, 3)
    monitor.close()
    wandb.teardown()  # waits until its files are whole
    shutil.copytree(original.dir, copy.dir)
    monitor = Monitor(make_sinks(["jsonl", WANDB]), copy)
    monitor.resume(2)
    monitor.resume_record(2)
    log(monitor, 3)
    monitor.close()
    wandb.teardown()
    file = "wandb_delivered.json"
    theirs, ours = Delivered.read(original.dir / file), Delivered.read(copy.dir / file)
    for told in (theirs, ours):
        rows = offline_rows(copy.dir, told.id) or []
        assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2, 3]
    (own,) = copy.dir.glob(f"wandb/offline-run-*/run-{ours.id}-*.wandb")
    own.write_bytes(own.read_bytes()[:7])
    WeightsAndBiases().look(copy, ours)
    assert ours.step == 0


def test_a_tracking_server_that_is_not_there_is_named_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    port = free_port("127.0.0.1", range(19600, 19700))
    sinks = make_sinks(["jsonl", Extension("mlflow", {"uri": f"http://127.0.0.1:{port}"})])
    monitor = Monitor(sinks, RunOutline(tmp_path, settings()))
    with pytest.raises(UserError, match=r"'mlflow' cannot start: MlflowException"):
        monitor.start()
    monitor.close()


def test_a_folder_of_mlflow_that_is_gone_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")
    monitor = Monitor(make_sinks(["jsonl", "mlflow"]), RunOutline(tmp_path, settings()))
    monitor.start()
    log(monitor, 1)
    subprocess.run(["rm", "-rf", str(tmp_path / "mlflow")], check=True)
    log(monitor, 2, 3)
    monitor.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert capsys.readouterr().err.count("the sink 'mlflow' of observability.sinks failed: ") == 1


def test_checks_of_a_run_open_nothing(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    sinks = "observability.sinks=[jsonl,wandb]"
    done = subprocess.run(
        [
            *command(sinks, f"run.dir={tmp_path / 'run'}", model(), **{"eval.prompts": 0}),
            "--dry-run",
        ],
        cwd=tmp_path,
        env=environment() | {"WANDB_MODE": "online"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == []
