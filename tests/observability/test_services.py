"""Sinks that report to services: each step once, an error told, a hanging service not waited
for."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_monitor import batch, log, settings

from megatron_stare.errors import ConfigError, DataError, UserError
from megatron_stare.observability.metrics.glossary import explained
from megatron_stare.observability.metrics.monitor import Monitor
from megatron_stare.observability.sink import Alert, RunOutline, Sink, make_sinks
from megatron_stare.observability.sinks import service as service_module
from megatron_stare.observability.sinks import webhook as webhook_module
from megatron_stare.observability.sinks.delivery import Background, Delivered
from megatron_stare.observability.sinks.service import Service
from megatron_stare.observability.sinks.webhook import Webhook
from megatron_stare.process.network import free_port
from megatron_stare.registry import Extension
from megatron_stare.run_dir.run_files import read_metrics

SECRET = "T0P-SECRET"


class Recording(Service):
    """A service that takes down what it is given."""

    name, package = "recording", "json"
    given: list[tuple[int, Mapping[str, float]]]
    fails_at = 0
    waits_at, released = 0, threading.Event()

    def open(self, run: RunOutline, delivered: Delivered) -> None:
        self.opened = (delivered.id, delivered.starts, [list(each) for each in delivered.redone])
        self.given, self.ended = [], None

    def send(self, step: int, figures: Mapping[str, float]) -> None:
        if step == self.waits_at:
            self.released.wait()
        if step == self.fails_at:
            raise OSError("it is gone")
        self.given.append((step, figures))

    def end(self, finished: bool) -> None:
        self.ended = finished


def monitor(folder: Path, **sinks: Sink) -> Monitor:
    return Monitor({**make_sinks(["jsonl"]), **sinks}, RunOutline(folder, settings()))


def evaluated(step: int) -> dict[str, Any]:
    return {"step": step, "weights": "trained", "task": "sums", "pass1": step / 10, "greedy": None}


def steps_of(sink: Recording) -> list[int]:
    return [step for step, figures in sink.given if "x" in figures]


def test_a_continued_run_gives_nothing_twice_and_says_what_was_made_again(tmp_path: Path) -> None:
    first = Recording()
    run = monitor(tmp_path, s=first)
    run.start()
    log(run, 1, 2, 3, 4, 5, nan=float("nan"))
    run.evaluation(evaluated(2))
    run.evaluation(evaluated(4))
    run.close()  # as after a signal: not finished
    assert steps_of(first) == [1, 2, 3, 4, 5] and first.ended is False
    assert all("nan" not in figures for _, figures in first.given)
    assert [given for given in first.given if given[0] in (2, 4)][-2:] == [
        (2, {"eval/sums/pass1": 0.2}),
        (4, {"eval/sums/pass1": 0.4}),
    ]

    again = Recording()
    run = monitor(tmp_path, s=again)
    run.resume(3)
    log(run, 4, 5, 6)
    run.evaluation(evaluated(4))
    run.evaluation(evaluated(6))
    run.finish()
    run.close()
    assert steps_of(again) == [6] and again.ended is True
    assert [step for step, figures in again.given if "x" not in figures] == [6]
    assert again.opened == (first.opened[0], 2, [[4, 5]])

    third = Recording()  # killed before it made a step: nothing is new
    run = monitor(tmp_path, s=third)
    run.resume(6)
    run.close()
    assert third.given == [] and third.opened == (first.opened[0], 3, [[4, 5]])


def test_what_the_service_was_never_given_is_handed_over_on_a_resume(tmp_path: Path) -> None:
    run = monitor(tmp_path)  # without the sink
    run.start()
    log(run, 1, 2, 3)
    run.evaluation(evaluated(2))
    run.close()
    added = Recording()
    run = monitor(tmp_path, s=added)
    run.resume(2)
    log(run, 3)
    run.close()
    assert steps_of(added) == [1, 2, 3]
    assert (2, {"eval/sums/pass1": 0.2}) in added.given


@pytest.mark.parametrize(
    "how", ["copied", "hard links", "moved", "copied, original removed", "linked"]
)
def test_a_copied_run_is_another_run_of_the_service_and_a_moved_one_is_the_same(
    how: str, tmp_path: Path
) -> None:
    """The original of a copy goes on under its own name."""
    first, again, original, folder = Recording(), Recording(), tmp_path / "a", tmp_path / "b"
    original.mkdir()
    run = monitor(original, s=first)
    run.start()
    log(run, 1, 2, 3)
    run.evaluation(evaluated(2))
    run.close()
    if how == "moved":
        original.rename(folder)
    elif how == "linked":
        folder.symlink_to(original)
    else:
        shutil.copytree(
            original, folder, copy_function=os.link if how == "hard links" else shutil.copy2
        )
    if how == "copied, original removed":
        shutil.rmtree(original)

    run = monitor(folder, s=again)
    run.resume(2)
    log(run, 3, 4)
    run.close()
    if how in ("copied", "hard links"):
        assert again.opened[0] != first.opened[0] and again.opened[1:] == (1, [])
        assert steps_of(again) == [1, 2, 3, 4]
        assert (2, {"eval/sums/pass1": 0.2}) in again.given
        other = Recording()
        run = monitor(original, s=other)
        run.resume(3)
        run.close()
        assert other.opened == (first.opened[0], 2, [])
        run = monitor(folder, s=other)
        run.resume(4)  # it was a copy only once
        run.close()
        assert other.opened == (again.opened[0], 2, [])
    else:
        assert again.opened == (first.opened[0], 2, [[3, 3]])
        assert steps_of(again) == [4]


def test_a_run_in_the_place_of_one_that_was_moved_is_no_original(tmp_path: Path) -> None:
    file, moved = tmp_path / "a/s_delivered.json", tmp_path / "b/s_delivered.json"
    file.parent.mkdir()
    told = Delivered(file, step=3)
    told.write()
    file.parent.rename(moved.parent)
    file.parent.mkdir()
    for taken in ("a damaged file", json.dumps({"id": "0123abcd"}), "[]"):
        file.write_text(taken)
        assert (Delivered.read(moved).id, Delivered.read(moved).step) == (told.id, 3)


def test_a_file_of_deliveries_without_its_directory_is_read_as_that_of_this_run(
    tmp_path: Path,
) -> None:
    file = tmp_path / "s_delivered.json"
    file.write_text('{"id": "0123abcd", "starts": 1, "step": 9, "evaluated": [], "redone": []}')
    assert (Delivered.read(file).id, Delivered.read(file).step) == ("0123abcd", 9)


def test_a_step_made_again_in_the_same_process_is_not_given_again(tmp_path: Path) -> None:
    sink = Recording()
    run = monitor(tmp_path, s=sink)
    run.start()
    log(run, 1, 2, 1, 2, 3)  # a run that went back to a checkpoint
    run.close()
    assert steps_of(sink) == [1, 2, 3]


def test_a_service_that_fails_ends_nothing_and_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = Recording()
    sink.fails_at = 2
    run = monitor(tmp_path, s=sink)
    run.start()
    log(run, 1, 2, 3, 4)
    run.close()
    assert steps_of(sink) == [1, 3, 4]  # asked again, though it failed
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    assert (
        capsys.readouterr().err.count(
            "the sink 's' of observability.sinks failed: OSError: it is gone"
        )
        == 1
    )


@pytest.mark.parametrize("error", [OSError("no route"), ConfigError("no port", where="sinks")])
def test_a_run_that_restarts_by_itself_goes_on_without_a_service_that_is_down(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Down(Recording):
        def open(self, run: RunOutline, delivered: Delivered) -> None:
            raise error

    first, down, again = Recording(), Down(), Recording()
    run = monitor(tmp_path, s=first)
    run.start()
    log(run, 1, 2)
    run.close()
    attended = monitor(tmp_path, s=down)
    with pytest.raises(UserError, match=str(error)):
        attended.resume(2)  # its user can mend it
    attended.close()

    run = monitor(tmp_path, s=down)
    run.resume(2, unattended=True)
    run.resume_record(2)
    log(run, 3, 4)
    run.finish()
    run.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert capsys.readouterr().err == (
        "warning: the run goes on without the sink 's' of observability.sinks, which cannot start:"
        f" {type(error).__name__}: {error}\n"
    )
    run = monitor(tmp_path, s=again)
    run.resume(4, unattended=True)
    run.close()
    assert steps_of(first) + steps_of(again) == [1, 2, 3, 4]  # handed over once it is back


def test_an_essential_sink_that_cannot_start_ends_a_run_that_restarts_by_itself(
    tmp_path: Path,
) -> None:
    class Record(Sink):
        essential = True

        def resume(self, *given: Any) -> None:
            raise OSError("no space")

    run = Monitor({"record": Record()}, RunOutline(tmp_path / "new", settings()))
    run.resume(0, unattended=True)
    with pytest.raises(UserError, match="'record' cannot start: OSError: no space"):
        run.resume_record(0)


def test_a_service_that_hangs_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "CLOSE_S", 0.01)
    sink = Recording()
    sink.waits_at, sink.released = 2, threading.Event()
    run = monitor(tmp_path, s=sink)
    run.start()
    log(run, *range(1, 6))
    run.close()  # all of this while the service answers nothing
    assert steps_of(sink) == [1]
    assert (
        "TimeoutError: the service did not take the last reports within 0.01 s"
        in capsys.readouterr().err
    )
    sink.released.set()


def test_reports_beyond_the_room_are_refused_and_those_before_are_made() -> None:
    begun, released, done, made = threading.Event(), threading.Event(), threading.Event(), []
    background = Background("test", room=2)
    background.call(lambda: (begun.set(), released.wait()))  # type: ignore[arg-type, return-value]
    begun.wait()
    background.call(lambda: made.append(1))
    background.call(lambda: (made.append(2), done.set()))  # type: ignore[arg-type, return-value]
    with pytest.raises(
        RuntimeError, match="2 reports wait for the service, and further reports are dropped"
    ):
        background.call(lambda: made.append(3))
    released.set()
    done.wait()
    assert background.close(10.0) and made == [1, 2]


def test_what_was_delivered_is_not_guessed_where_its_file_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "recording_delivered.json").write_text('{"id": "a", "ste')
    with pytest.raises(
        DataError, match=r"recording_delivered\.json: not a record of deliveries to a service"
    ):
        monitor(tmp_path, s=Recording()).start()


@pytest.mark.parametrize(
    ("sink", "package"),
    [("wandb", "wandb"), ("mlflow", "mlflow"), ("prometheus", "prometheus_client")],
)
def test_a_package_that_is_missing_is_named_at_the_edge(
    sink: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else found(name)
    )
    with pytest.raises(ConfigError) as caught:
        make_sinks(["jsonl", sink])
    assert (
        str(caught.value)
        == f"observability.sinks: the sink {sink!r} needs the package {package}, which is not"
        f" installed\n  fix: pip install 'megatron_stare[{sink}]', or leave this sink out"
    )


class Hook(ThreadingHTTPServer):
    """Takes alerts, refuses the first `refused` posts, and answers none while it `hangs`."""

    daemon_threads = True
    refused = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HookHandler)
        self.posts: list[dict[str, Any]] = []
        self.arrived = threading.Condition()
        self.hangs: threading.Event | None = None

    def wait_for(self, number: int) -> list[dict[str, Any]]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.posts) >= number, 10)
        return self.posts


class HookHandler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.arrived:
            self.server.posts.append(body)
            refused = len(self.server.posts) <= self.server.refused
            self.server.arrived.notify_all()
        if self.server.hangs:
            self.server.hangs.wait()
        self.send_response(503 if refused else 200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    server = Hook()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:{server.server_port}/{SECRET}")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def alerting(folder: Path, **own: Any) -> Monitor:
    hook = Extension("webhook", {"env": "HOOK", "back_off_s": 0, **own})
    return Monitor({**make_sinks(["jsonl", hook])}, RunOutline(folder, settings()))


def test_alerts_are_posted_with_value_and_range_as_they_begin_and_end(
    hook: Hook, tmp_path: Path
) -> None:
    run = alerting(tmp_path)
    run.start()
    log(run, 1, **{"group/degenerate": 1.0})
    log(run, *range(2, 7), **{"group/degenerate": 0.5})
    run.close()
    began, over = hook.posts
    entry = explained("group/degenerate")
    assert entry and {
        key: began[key]
        for key in ("run", "dir", "step", "alert", "state", "metric", "value", "range")
    } == {
        "run": "quickstart",
        "dir": str(tmp_path),
        "step": 1,
        "alert": "groups without signal",
        "state": "began",
        "metric": "group/degenerate",
        "value": 1.0,
        "range": entry.healthy,
    }
    assert began["text"] == "step 1: 100% of the groups have equal rewards and teach nothing"
    assert (over["state"], over["text"]) == ("over", "over: groups without signal (step 1)")


def test_an_alert_of_a_step_that_is_made_again_is_not_posted_again(
    hook: Hook, tmp_path: Path
) -> None:
    run = alerting(tmp_path)
    run.start()
    log(run, 1, 2)
    log(run, 3, **{"group/degenerate": 1.0})
    run.close()
    run = alerting(tmp_path)
    run.resume(2)
    log(run, 3, **{"group/degenerate": 1.0})
    log(run, 4, **{"response/truncated": 1.0})
    run.close()
    assert [(post["step"], post["alert"]) for post in hook.posts] == [
        (3, "groups without signal"),
        (4, "responses cut off"),
    ]


def test_an_alert_that_is_active_at_a_resume_is_said_again_only_on_the_terminal(
    hook: Hook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sinks = ["jsonl", "console", Extension("webhook", {"env": "HOOK", "back_off_s": 0})]

    def alerting() -> Monitor:
        return Monitor(make_sinks(sinks), RunOutline(tmp_path, settings()))

    run = alerting()
    run.start()
    log(run, 1)
    log(run, 2, 3, 4, **{"group/degenerate": 1.0})
    run.close()
    capsys.readouterr()
    run = alerting()
    run.resume(3)
    run.resume_record(3)
    log(run, 4, **{"group/degenerate": 1.0})
    log(run, *range(5, 12), **{"group/degenerate": 0.5})
    run.close()
    assert [(post["step"], post["state"]) for post in hook.posts] == [(2, "began"), (4, "over")]
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "warning" in line or "over" in line] == [
        "warning: step 2: 100% of the groups have equal rewards and teach nothing",
        "over: groups without signal (steps 2 to 4)",
    ]


def test_alerts_of_other_steps_after_a_rollback_are_posted(hook: Hook, tmp_path: Path) -> None:
    run = alerting(tmp_path)
    run.start()
    log(run, *range(1, 95))
    log(run, 95, **{"reward/crashes": 0.5})
    run.close()
    run = alerting(tmp_path)
    run.resume(80)
    log(run, 81, **{"group/degenerate": 1.0})
    log(run, 82, 83)
    log(run, 84, **{"response/truncated": 1.0})
    run.close()
    assert [(post["step"], post["alert"]) for post in hook.posts] == [
        (95, "reward failures"),
        (81, "groups without signal"),
        (84, "responses cut off"),
    ]


def test_a_file_of_deliveries_of_an_earlier_release_is_read_and_the_newest_alerts_are_kept(
    hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_module, "KEPT", 1)
    file = tmp_path / "webhook_delivered.json"
    file.write_text('{"id": "0123abcd", "starts": 0, "step": 9, "evaluated": [], "redone": []}')
    run = alerting(tmp_path)
    run.start()
    log(run, 1, **{"response/truncated": 1.0})
    log(run, 2, **{"group/degenerate": 1.0, "response/truncated": 1.0})
    run.close()
    assert len(hook.posts) == 2
    assert Delivered.read(file).alerts == [["groups without signal", False, 2]]


def test_a_refused_alert_is_posted_again_and_no_more_than_allowed(
    hook: Hook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hook.refused = 2
    run = alerting(tmp_path, attempts=3)
    run.start()
    log(run, 1, **{"group/degenerate": 1.0})
    run.close()
    assert len(hook.posts) == 3 and capsys.readouterr().err == ""
    hook.posts.clear()
    hook.refused = 100
    other = tmp_path / "other"
    other.mkdir()
    run = alerting(other, attempts=2)
    run.start()
    log(run, 1, **{"group/degenerate": 1.0, "response/truncated": 1.0})
    run.close()
    said = capsys.readouterr().err
    assert len(hook.posts) == 4  # both alerts, twice each: one that fails does not keep the other
    assert "ConnectionError: 2 alerts were not taken in 2 attempts (HTTPError 503)" in said
    assert SECRET not in said


def test_a_hook_that_hangs_keeps_no_step_and_no_end(
    hook: Hook, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_module, "CLOSE_S", 0.01)
    hook.hangs = threading.Event()
    run = alerting(tmp_path)
    run.start()
    log(run, 1, **{"group/degenerate": 1.0})
    hook.wait_for(1)
    log(run, 2, 3)
    run.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert "alerts were not taken within 0.01 s of the end" in capsys.readouterr().err
    hook.hangs.set()


def test_a_slow_hook_is_given_up_after_its_time(
    hook: Hook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hook.hangs = threading.Event()
    run = alerting(tmp_path, timeout_s=0.05, attempts=2)
    run.start()
    log(run, 1, **{"group/degenerate": 1.0})
    hook.wait_for(2)
    run.close()
    assert "1 alerts were not taken in 2 attempts (TimeoutError)" in capsys.readouterr().err
    hook.hangs.set()


@pytest.mark.parametrize("address", [None, "", "ftp://a", f"{SECRET}.example"])
def test_a_hook_without_an_address_is_refused_before_the_run(
    address: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (
        monkeypatch.delenv("HOOK", raising=False)
        if address is None
        else monkeypatch.setenv("HOOK", address)
    )
    with pytest.raises(
        UserError, match="the environment variable HOOK holds no http address"
    ) as caught:
        alerting(tmp_path).start()
    assert SECRET not in str(caught.value)


def test_an_alert_without_a_single_figure_is_posted_without_one() -> None:
    told = webhook_module._told(Alert("of a user", "text", 3, 4))
    assert (told["metric"], told["value"], told["range"]) == (None, None, None)
    assert Webhook.essential is False


def scrape(port: int) -> dict[str, float]:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    told = {line: 0.0 for line in text.splitlines() if line.startswith("# HELP")}
    values = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in values} | told


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Callable[[], tuple[Monitor, int]]]:
    pytest.importorskip("prometheus_client")
    opened: list[Monitor] = []

    def make() -> tuple[Monitor, int]:
        port = free_port("127.0.0.1", range(19464, 19600))
        served = Extension("prometheus", {"port": port})
        opened.append(Monitor(make_sinks(["jsonl", served]), RunOutline(tmp_path, settings())))
        return opened[-1], port

    yield make
    for each in opened:
        each.close()


def test_prometheus_scrapes_the_newest_step_with_its_glossary(
    endpoint: Callable[[], tuple[Monitor, int]],
) -> None:
    run, port = endpoint()
    run.start()
    of = '{run="quickstart"}'
    assert scrape(port)[f"megatron_stare_steps{of}"] == 300.0
    run.begin_step()
    with run.phase("rollout"):
        assert scrape(port)['megatron_stare_phase{phase="rollout",run="quickstart"}'] == 1.0
    run.log(1, batch(1), {"update/empty": 1.0, "own/figure": 2.5, "loss/policy": float("nan")})
    run.evaluation(evaluated(1))
    seen = scrape(port)
    assert seen[f"megatron_stare_step{of}"] == 1.0 and seen[f"megatron_stare_own_figure{of}"] == 2.5
    assert seen[f"megatron_stare_response_length_mean{of}"] == 2.0
    # NaN, as it was logged
    assert seen[f"megatron_stare_loss_policy{of}"] != seen[f"megatron_stare_loss_policy{of}"]
    assert seen['megatron_stare_alert{alert="nothing to learn",run="quickstart"}'] == 1.0
    assert seen['megatron_stare_eval_pass1{run="quickstart",task="sums"}'] == 0.1
    entry = explained("response/length_mean")
    assert (
        entry
        and f"# HELP megatron_stare_response_length_mean {entry.meaning} [{entry.unit}]; healthy: "
        in " ".join(
            line for line in seen if line.startswith("# HELP megatron_stare_response_length_mean")
        )
    )
    log(run, *range(2, 8))
    seen = scrape(port)
    assert f"megatron_stare_own_figure{of}" not in seen  # the newest step has none
    assert seen['megatron_stare_alert{alert="nothing to learn",run="quickstart"}'] == 0.0
    run.close()
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_prometheus_goes_on_from_the_record_and_a_taken_port_is_named(
    endpoint: Callable[[], tuple[Monitor, int]], tmp_path: Path
) -> None:
    run, _ = endpoint()
    run.start()
    log(run, 1, 2)
    run.close()
    run, port = endpoint()
    run.resume(1)
    assert scrape(port)['megatron_stare_step{run="quickstart"}'] == 1.0
    taken = Monitor(
        make_sinks(["jsonl", Extension("prometheus", {"port": port})]),
        RunOutline(tmp_path / "other", settings()),
    )
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match=f"port {port} cannot be listened on"):
        taken.start()
    taken.close()
