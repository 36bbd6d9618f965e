"""Every sink receives what a run reports, and one whose file or server fails keeps nothing from the
others."""

from __future__ import annotations

import gc
import io
import json
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_stare.config.load import load_config
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError, UserError
from megatron_stare.observability.metrics.monitor import Monitor
from megatron_stare.observability.sink import RunOutline, Sink, make_sinks
from megatron_stare.observability.sinks.console import Console
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import sampled_trajectory
from megatron_stare.run_dir.json_lines import write_atomically
from megatron_stare.run_dir.run_files import read_metrics

ROOT = Path(__file__).parents[2]
MINE = "my_sink.Chat"
DEFAULT = ("jsonl", "tensorboard", "console", "report")


def settings(*overrides: str) -> Config:
    return load_config(ROOT / "configs/quickstart.yaml", ["run.rollouts_every=1", *overrides])


def batch(step: int) -> RolloutBatch:
    prompt = Prompt(cursor=0, id="p", text="2+2=", answer="4", token_ids=(1, 2))
    samples = [
        sampled_trajectory(prompt, index, [5, 6], [-0.1, -0.2], version=step - 1)
        for index in range(2)
    ]
    for sample, reward in zip(samples, (1.0, 0.0), strict=True):
        sample.text, sample.reward, sample.reward_status = "4", reward, "ok"
    return RolloutBatch.from_trajectories(samples, step)


def monitor_of(folder: Path, names: Sequence[str] = DEFAULT, **given: Sink) -> Monitor:
    return Monitor({**make_sinks(names), **given}, RunOutline(folder, settings()))


def log(monitor: Monitor, *steps: int, **metrics: float) -> None:
    for step in steps:
        monitor.begin_step()
        monitor.log(step, batch(step), {"x": float(step), **metrics})


def events(folder: Path) -> list[tuple[int, float]]:
    found = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in found.Scalars("x")]


class Recorder(Sink):
    """Writes every call down."""

    def __init__(
        self, calls: list[Any], fails: type[BaseException] | None = None, essential: bool = False
    ) -> None:
        self.calls, self.fails = calls, fails
        self.essential = essential  # type: ignore[misc]

    def __getattribute__(self, name: str) -> Any:
        if (
            name.startswith("_")
            or name in ("calls", "fails", "essential")
            or name not in vars(Sink)
        ):
            return super().__getattribute__(name)

        def call(*args: Any) -> None:
            self.calls.append((name, *args))
            if self.fails and name in ("step", "close"):
                raise self.fails(name)

        return call


def test_every_sink_is_told_everything_and_the_record_first(tmp_path: Path) -> None:
    shown: list[Any] = []
    order: list[str] = []

    class Ordered(Sink):
        def __init__(self, name: str, essential: bool = False) -> None:
            self.name, self.essential = name, essential  # type: ignore[misc]

        def step(self, *args: object) -> None:
            order.append(self.name)

    run = RunOutline(tmp_path, settings())
    sinks = {
        "a": Ordered("a"),
        "seen": Recorder(shown),
        "b": Ordered("b"),
        "record": Ordered("record", True),
    }
    monitor = Monitor(sinks, run)
    monitor.start()
    with monitor.phase("start"):
        monitor.note("ready")
    monitor.gauges.append(lambda: {"memory/engines_freed_mb": 3.0})
    monitor.begin_step()
    with monitor.phase("rollout"):
        monitor.progress(1, 2)
    trained = batch(1)
    monitor.log(1, trained, {"x": 1, "update/empty": 1.0})
    monitor.evaluation({"step": 1})
    monitor.finish()
    monitor.close()
    assert order == ["record", "a", "b"]
    (_, step, metrics, seen), (_, changed, active) = shown[7:9]
    assert shown[:7] == [
        ("start", run),
        ("begin_phase", "start"),
        ("note", "ready"),
        ("end_phase", "start"),
        ("begin_phase", "rollout"),
        ("progress", 1, 2),
        ("end_phase", "rollout"),
    ]
    assert shown[9:] == [("evaluation", {"step": 1}), ("finish", run), ("close",)]
    assert (step, seen, type(metrics["x"])) == (1, trained, float)
    assert metrics["memory/engines_freed_mb"] == 3.0
    assert [name for name in metrics if name.startswith("time/")] == [
        "time/rollout_s",
        "time/step_s",
    ]  # not the start's
    assert (
        [alert.name for alert in changed]
        == [alert.name for alert in active]
        == ["nothing to learn"]
    )


def test_a_resumed_run_is_told_once_and_remembers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = monitor_of(tmp_path)
    monitor.start()
    log(monitor, *range(1, 22), **{"optimizer/grad_norm": 1.0})
    log(monitor, 22, **{"optimizer/grad_norm": 50.0})
    monitor.close()
    capsys.readouterr()
    calls: list[Any] = []
    again = monitor_of(tmp_path, seen=Recorder(calls))
    again.resume(20)
    again.resume_record(20)
    log(again, 21, **{"optimizer/grad_norm": 10.5})  # ten times the median of the steps that count
    again.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 22))
    assert rows[-1]["optimizer/grad_norm"] == 10.5
    assert events(tmp_path) == [(step, float(step)) for step in range(1, 22)]
    assert len(list((tmp_path / "rollouts").iterdir())) == 21
    (_, _, step, remembered), *_ = calls
    assert (step, [row["step"] for row in remembered]) == (20, list(range(1, 21)))
    (changed,) = [call[1] for call in calls if call[0] == "alerts"]
    assert [alert.name for alert in changed] == ["gradient spike"]
    out = capsys.readouterr().out
    assert out.count("step  21/300") == out.count("warning: step 21: gradient norm 10.5") == 1
    assert "step  20/300" not in out


def test_no_step_stands_twice_however_often_and_far_back_a_run_is_continued(tmp_path: Path) -> None:
    """The second time from before where the first time began, as after a damaged checkpoint."""
    files = ("jsonl", "tensorboard", "report")
    monitor = monitor_of(tmp_path, files)
    monitor.start()
    log(monitor, *range(1, 7))
    monitor.evaluation({"step": 6, "weights": "trained", "pass1": 0.5})
    monitor.close()
    for step, ahead in ((4, (5, 6, 7)), (2, (3, 4, 5, 6))):
        monitor = monitor_of(tmp_path, files)
        monitor.resume(step)
        monitor.resume_record(step)
        log(monitor, *ahead)
        monitor.evaluation({"step": 6, "weights": "trained", "pass1": 0.5})
        monitor.close()
        steps = list(range(1, ahead[-1] + 1))
        assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == steps
        assert events(tmp_path) == [(each, float(each)) for each in steps]
        assert len((tmp_path / "eval.jsonl").read_text().splitlines()) == 1
        assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
            f"step_{each:06d}.jsonl" for each in steps
        ]
    # TensorBoard reads files in the order of their names, which begin with the second
    seconds = {path.name.split(".")[3] for path in (tmp_path / "tensorboard").iterdir()}
    assert len(seconds) == len(list((tmp_path / "tensorboard").iterdir())) == 3


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_the_panel_of_a_resumed_run_continues_its_charts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", Terminal())
    evaluations = [
        {"step": step, "weights": "trained", "pass1": step / 10} for step in (0, 2, 4)
    ]  # the last is made again
    write_atomically(tmp_path / "eval.jsonl", evaluations)
    console = Console()
    console.resume(
        RunOutline(tmp_path, settings()),
        2,
        [{"step": step, "entropy/mean": 0.5} for step in (1, 2)],
    )
    view = console._display._view()  # type: ignore[attr-defined]
    console.close()
    assert (view.step, list(view.values("entropy/mean"))) == (2, [0.5, 0.5])
    assert view.evaluated == [("pass@1", 0.2, 2)]


# TensorBoard writes in a thread
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_fills_under_tensorboard_stops_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monitor = monitor_of(tmp_path)
    monitor.start()
    log(monitor, 1)
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.unlink()
    file.symlink_to("/dev/full")  # TensorBoard opens it anew for every flush
    log(monitor, 2, 3, 4)
    monitor.evaluation(
        {"step": 4, "weights": "trained", "problems": 1, "pass1": 0.5, "greedy": None}
    )
    monitor.finish()
    monitor.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "eval.jsonl").read_text())["pass1"] == 0.5
    assert (tmp_path / "report.html").exists()
    said = capfd.readouterr()
    assert (
        said.err.count(
            "warning: the sink 'tensorboard' of observability.sinks failed: OSError: [Errno 28]"
        )
        == 1
    )
    assert all(f"step   {step}/300" in said.out for step in (1, 2, 3, 4))
    # the disk has room again for the next file
    assert events(tmp_path)[-1] == (4, 4.0)


class OneError(Sink):
    """Raises the same error at every step, as a library does whose thread has ended by it."""

    def __init__(self) -> None:
        self._error = OSError("it ended")

    def step(self, step: int, metrics: Mapping[str, float], batch: RolloutBatch) -> None:
        raise self._error


# TensorBoard writes in a thread
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_sink_that_fails_keeps_no_batch(tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path, ["jsonl", "tensorboard"], one=OneError())
    monitor.start()
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.unlink()
    file.symlink_to("/dev/full")
    logged = [weakref.ref(log_one(monitor, step)) for step in (1, 2, 3)]
    gc.collect()
    assert [kept() for kept in logged] == [None] * 3
    monitor.close()


def log_one(monitor: Monitor, step: int) -> RolloutBatch:
    monitor.begin_step()
    logged = batch(step)
    monitor.log(step, logged, {"x": float(step)})
    return logged


def test_a_record_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    calls: list[Any] = []
    monitor = monitor_of(tmp_path, ["jsonl"], seen=Recorder(calls))
    monitor.start()
    with pytest.raises(
        UserError, match=r"the record of the run cannot be written \(No space left on device\)"
    ) as caught:
        log(monitor, 1)
    assert f"{tmp_path}: the record" in str(caught.value) and "--resume" in str(caught.value)
    # what could not be written fails once more, and is not told in the place of the first error
    monitor.close()
    # nothing was shown that is not recorded
    assert [call[0] for call in calls] == ["start", "close"]


def test_a_report_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.html").mkdir()
    monitor = monitor_of(tmp_path, ["jsonl", "report"])
    monitor.start()
    log(monitor, 1)
    monitor.finish()
    monitor.close()
    assert (
        "warning: the sink 'report' of observability.sinks failed: DataError: "
        in capsys.readouterr().err
    )


def test_what_cannot_begin_ends_the_run_before_it_costs_anything(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").touch()
    calls: list[Any] = []
    monitor = monitor_of(tmp_path, ["jsonl", "tensorboard"], last=Recorder(calls))
    with pytest.raises(
        UserError, match=r"observability\.sinks: 'tensorboard' cannot start: FileExistsError"
    ):
        monitor.start()
    monitor.close()
    assert calls == []  # what was not started is not closed


def test_only_an_essential_sink_may_stop_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []
    monitor = monitor_of(tmp_path, ["jsonl"], bad=Recorder(calls, ValueError), good=Recorder([]))
    monitor.start()
    log(monitor, 1, 2)
    monitor.close()
    # it is asked again: what failed may have passed
    assert [call[0] for call in calls].count("step") == 2
    assert capsys.readouterr().err.count("warning: ") == 1

    # an error of its code is not one of its disk; a signal is no error of a sink
    for fails, essential in ((ValueError, True), (KeyboardInterrupt, False)):
        monitor = Monitor(
            {"mine": Recorder([], fails, essential)}, RunOutline(tmp_path, settings())
        )
        monitor.start()
        with pytest.raises(fails):
            log(monitor, 1)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["jsonl", "tensorbord"], "did you mean 'tensorboard'"),
        (
            ["jsonl", "collections.OrderedDict"],
            "is not a subclass of megatron_stare.observability.sink.Sink",
        ),
        (["jsonl", "no_such.Sink"], "there is no module 'no_such'"),
        (["console"], "none of these sinks writes the record .*\n.*add jsonl"),
        ([], "none of these sinks writes the record"),
    ],
)
def test_names_that_are_no_sinks(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_sinks(names)
    assert str(caught.value).startswith("observability.sinks: ")


def test_a_sink_is_named_once() -> None:
    with pytest.raises(ConfigError, match="jsonl is named more than once"):
        settings("observability.sinks=[jsonl, console, jsonl]")


class Server(HTTPServer):
    """A chat."""

    said: list[str]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.said.append(
            json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
        )
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.said = []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("CHAT_URL", f"http://127.0.0.1:{server.server_port}/")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_users_own_is_told_by_the_same_calls(
    chat: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = monitor_of(tmp_path, ["jsonl", MINE])
    monitor.start()
    log(monitor, 1, **{"group/degenerate": 1.0})
    monitor.evaluation({"step": 1, "pass1": 0.5})
    assert chat.said == [
        "quickstart, step 1: 100% of the groups have equal rewards and teach nothing",
        "quickstart, after step 1: pass@1 0.500",
    ]
    chat.shutdown()
    chat.server_close()  # nobody is there any more
    monitor.evaluation({"step": 2, "pass1": 0.5})
    monitor.evaluation({"step": 3, "pass1": 0.5})
    monitor.close()
    assert len((tmp_path / "eval.jsonl").read_text().splitlines()) == 3
    assert (
        capsys.readouterr().err.count(
            f"warning: the sink '{MINE}' of observability.sinks failed: URLError"
        )
        == 1
    )


def test_a_users_own_that_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAT_URL", raising=False)
    monitor = monitor_of(tmp_path, ["jsonl", MINE])
    with pytest.raises(UserError, match=f"'{MINE}' cannot start: KeyError: 'CHAT_URL'"):
        monitor.start()
    monitor.close()


def test_the_page_shows_the_file() -> None:
    source = (ROOT / "tests/observability/my_sink.py").read_text()
    assert f"```python\n{source}```" in (ROOT / "docs/sinks.md").read_text()


@pytest.mark.parametrize("held", [None, "kv_cache_dtype=fp8_e4m3", "quantization=fp8"])
def test_a_difference_that_eight_bits_make_is_no_alert(tmp_path: Path, held: str | None) -> None:
    calls: list[Any] = []
    served = ("rollout.engine=sglang", f"sglang.{held or 'quantization=null'}")
    monitor = Monitor({"seen": Recorder(calls)}, RunOutline(tmp_path, settings(*served)))
    monitor.start()
    log(monitor, 1, **{"rollout/logprob_diff_max": 0.8})
    monitor.close()
    alerts = [alert.name for call in calls if call[0] == "alerts" for alert in call[1]]
    assert alerts == ([] if held else ["engine and trainer differ"])
