"""The record of a run survives kill -9, and a resumed run continues it without a seam; so does
TensorBoard's."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_stare.config.load import load_config
from megatron_stare.errors import DataError
from megatron_stare.observability.sink import RunOutline
from megatron_stare.observability.sinks.console import Console
from megatron_stare.observability.sinks.jsonl_files import JsonlFiles
from megatron_stare.observability.sinks.tensorboard import TensorBoard
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import sampled_trajectory
from megatron_stare.run_dir.rollout_files import rollout_rows
from megatron_stare.run_dir.run_files import read_metrics

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"
NONE = SimpleNamespace(trajectories=())  # a batch of which nothing is shown


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def sample(cursor, index=0, text="4"):
    prompt = Prompt(cursor=cursor, id=f"p{cursor}", text="2+2=", answer="4", token_ids=(1, 2))
    made = sampled_trajectory(prompt, index, [5, 6], [-0.1, -0.2], version=3)
    made.text, made.reward, made.reward_status = text, 1.0, "ok"
    return made


@contextlib.contextmanager
def opened(sink, run_dir, resume=None, **settings):
    """A sink of a run in this directory, which writes rollouts in every step."""
    overrides = ["run.rollouts_every=1", *(f"run.{key}={value}" for key, value in settings.items())]
    run = RunOutline(run_dir, load_config(QUICKSTART, overrides))
    try:
        if resume is None:
            sink.start(run)
        else:
            sink.resume(
                run,
                resume,
                [row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"] <= resume],
            )
        yield sink
    finally:
        sink.close()


def test_a_step_is_on_disk_when_log_returns(tmp_path):
    with opened(JsonlFiles(), tmp_path) as sink:
        sink.step(1, {"reward/mean": 0.5, "entropy/mean": 0.1}, NONE)
        assert lines(tmp_path / "metrics.jsonl") == [
            {"step": 1, "reward/mean": 0.5, "entropy/mean": 0.1}
        ]


def test_not_finite_is_null_on_disk_and_nan_when_read(tmp_path):
    with opened(JsonlFiles(), tmp_path) as sink:
        sink.step(1, {"a": math.nan, "b": math.inf, "c": 2}, NONE)
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "a": None, "b": None, "c": 2.0}]
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(row["a"])
    assert math.isnan(row["b"])
    assert row["c"] == 2.0


def test_read_leaves_out_a_torn_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 1, "x": 1.0}\n{"step": 2, "é": 2.0}\n'.encode()
    # also in the middle of a UTF-8 character
    for cut in range(len(whole) - 2, whole.index(b"\n"), -1):
        path.write_bytes(whole[:cut])
        assert [row["step"] for row in read_metrics(path)] == [1]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_damage_before_the_last_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


def test_resume_cuts_back_to_the_checkpoint_and_drops_the_torn_line(tmp_path):
    with opened(JsonlFiles(), tmp_path) as sink:
        for step in range(1, 6):
            shown = (
                RolloutBatch.from_trajectories([sample(0), sample(0, 1)], step)
                if step in (2, 4)
                else NONE
            )
            sink.step(step, {"x": float(step)}, shown)
        for step, weights in ((0, "base"), (2, "trained"), (4, "trained")):
            sink.evaluation(
                {"step": step, "weights": weights, "pass1": 0.5, "greedy": None, "problems": 2}
            )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "x"')
    with opened(JsonlFiles(), tmp_path, 3) as sink:
        sink.step(4, {"x": 40.0}, NONE)
    assert [(row["step"], row["x"]) for row in read_metrics(tmp_path / "metrics.jsonl")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]
    assert [record["step"] for record in lines(tmp_path / "eval.jsonl")] == [0, 2]
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000002.jsonl"]
    assert not list(tmp_path.glob(".*.tmp"))


OF_SEVERAL = {
    "results": {
        name: {"value": value, "low": 0.0, "high": 1.0}
        for name, value in {"avg@4": 0.25, "pass@1": 0.25, "pass@4": 0.75, "maj@4": 0.5}.items()
    },
    "full_solve": 0.125,
    "length_mean": 20.0,
    "distinct_answers": None,
    "reflection": {"backtracking": 1.5},
}


def test_tensorboard_shows_the_run_as_if_it_had_never_stopped(tmp_path):
    with opened(TensorBoard(), tmp_path) as sink:
        for step in (1, 2, 3):
            sink.step(step, {"reward/mean": 0.25 * step}, NONE)
    with opened(TensorBoard(), tmp_path, 1) as sink:
        sink.step(2, {"reward/mean": 0.75}, NONE)
        sink.evaluation({"step": 2, "weights": "trained", "pass1": 0.5, "greedy": None})
        sink.evaluation(
            {
                "step": 2,
                "weights": "trained",
                "task": "aime",
                "pass1": 0.25,
                "greedy": 0.75,
                **OF_SEVERAL,
            }
        )
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.75)]
    assert [(e.step, e.value) for e in events.Scalars("eval/pass1")] == [(2, 0.5)]
    assert [e.value for e in events.Scalars("eval/aime/pass1")] == [0.25]
    assert [e.value for e in events.Scalars("eval/aime/greedy")] == [0.75]
    named = {
        tag.removeprefix("eval/aime/")
        for tag in events.Tags()["scalars"]
        if tag.startswith("eval/aime/")
    }
    figures = {
        "avg@4",
        "pass@1",
        "pass@4",
        "maj@4",
        "full_solve",
        "length_mean",
        "reflection/backtracking",
    }
    assert named == figures | {"pass1", "greedy"}  # what a verifier does not say is left out
    assert [e.value for e in events.Scalars("eval/aime/maj@4")] == [0.5]


def test_the_line_of_an_evaluation_says_what_several_responses_come_to(capsys, tmp_path):
    about = {"step": 2, "weights": "trained", "problems": 9, "pass1": 0.25, "greedy": None}
    with opened(Console(), tmp_path) as sink:
        sink.evaluation({**about, "task": "aime", "decoding": {"samples": 4}, **OF_SEVERAL})
        sink.evaluation({**about, "results": {"avg@1": {"value": 0.25}, "pass@1": {"value": 0.25}}})
        sink.evaluation(about)  # of an earlier release
    several, *one = [
        line for line in capsys.readouterr().out.splitlines() if "held-out problems" in line
    ]
    assert several.endswith("9 held-out problems of aime: sampled 0.250, pass@4 0.750, maj@4 0.500")
    assert {line.partition("problems: ")[2] for line in one} == {"sampled 0.250"}


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path):
    with opened(JsonlFiles(), tmp_path) as sink:
        sink.step(1, {"x": 1.0}, NONE)
    with (
        pytest.raises(DataError, match="already holds the metrics"),
        opened(JsonlFiles(), tmp_path),
    ):
        pass
    with opened(JsonlFiles(), tmp_path, resume=0):  # starting over, said explicitly
        pass
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_rollouts_are_spread_over_the_batch(tmp_path):
    samples = [
        sample(cursor, index, text="<s>\n½") for cursor in (3, 1, 2, 0) for index in range(4)
    ]
    batch = RolloutBatch.from_trajectories(samples, 10)
    assert len(rollout_rows(12, samples, limit=99)) == 16
    with opened(JsonlFiles(), tmp_path, rollouts_kept=4, rollouts_every=5) as sink:
        for step in (4, 10, 11):
            sink.step(step, {}, batch)
    with opened(JsonlFiles(), tmp_path, resume=11, rollouts_kept=0) as sink:
        sink.step(15, {}, batch)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000010.jsonl"]
    rows = lines(tmp_path / "rollouts/step_000010.jsonl")
    assert [row["cursor"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["response"] == "<s>\n½"
    assert (rows[0]["reward"], rows[0]["tokens"], rows[0]["finish_reason"]) == (1.0, 2, "stop")


def test_what_was_logged_before_a_kill_is_there_after_it(tmp_path):
    script = f"""
import time
from pathlib import Path
from types import SimpleNamespace
from megatron_stare.config.load import load_config
from megatron_stare.observability.sink import RunOutline
from megatron_stare.observability.sinks.jsonl_files import JsonlFiles
sink = JsonlFiles()
sink.start(RunOutline(Path({str(tmp_path)!r}), load_config({str(QUICKSTART)!r})))
for step in range(1, 51):
    sink.step(step, {{"x": 1.0}}, SimpleNamespace(trajectories=()))
print("ready", flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 51))
