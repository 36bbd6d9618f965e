"""The files a run writes survive kill -9, and a resumed run continues them without a seam."""

import json
import math
import os
import signal
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_stare.batch import Prompt
from megatron_stare.errors import DataError
from megatron_stare.observability.metrics import MetricsWriter, read_metrics
from megatron_stare.records.trajectory import sampled_trajectory


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def sample(cursor, index=0, text="4"):
    prompt = Prompt(cursor=cursor, id=f"p{cursor}", text="2+2=", answer="4", token_ids=(1, 2))
    made = sampled_trajectory(prompt, index, [5, 6], [-0.1, -0.2], version=3)
    made.text, made.reward, made.reward_status = text, 1.0, "ok"
    return made


def test_a_step_is_on_disk_when_log_returns(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log(1, {"reward/mean": 0.5, "entropy/mean": 0.1})
        assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5, "entropy/mean": 0.1}]


def test_not_finite_is_null_on_disk_and_nan_when_read(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log(1, {"a": math.nan, "b": math.inf, "c": 2})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "a": None, "b": None, "c": 2.0}]
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(row["a"])
    assert math.isnan(row["b"])
    assert row["c"] == 2.0


def test_read_leaves_out_a_torn_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 1, "x": 1.0}\n{"step": 2, "é": 2.0}\n'.encode()
    for cut in range(len(whole) - 2, whole.index(b"\n"), -1):  # also in the middle of a UTF-8 character
        path.write_bytes(whole[:cut])
        assert [row["step"] for row in read_metrics(path)] == [1]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_damage_before_the_last_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


def test_resume_cuts_back_to_the_checkpoint_and_drops_the_torn_line(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.log(step, {"x": float(step)})
        for step, weights in ((0, "base"), (2, "trained"), (4, "trained")):
            writer.log_eval({"step": step, "weights": weights, "pass1": 0.5, "greedy": None, "problems": 2})
        for step in (2, 4):
            writer.log_rollouts(step, [sample(0)], limit=1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "x"')
    with MetricsWriter(tmp_path, resume_step=3) as writer:
        writer.log(4, {"x": 40.0})
    assert [(row["step"], row["x"]) for row in read_metrics(tmp_path / "metrics.jsonl")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]
    assert [record["step"] for record in lines(tmp_path / "eval.jsonl")] == [0, 2]
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000002.jsonl"]
    assert not list(tmp_path.glob(".*.tmp"))


def test_tensorboard_shows_the_run_as_if_it_had_never_stopped(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.log(step, {"reward/mean": 0.25 * step})
    with MetricsWriter(tmp_path, resume_step=1) as writer:
        writer.log(2, {"reward/mean": 0.75})
        writer.log_eval({"step": 2, "weights": "trained", "pass1": 0.5, "greedy": None})
        writer.log_eval({"step": 2, "weights": "trained", "task": "aime", "pass1": 0.25, "greedy": 0.75})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.75)]
    assert [(e.step, e.value) for e in events.Scalars("eval/pass1")] == [(2, 0.5)]
    assert [e.value for e in events.Scalars("eval/aime/pass1")] == [0.25]
    assert [e.value for e in events.Scalars("eval/aime/greedy")] == [0.75]


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log(1, {"x": 1.0})
    with pytest.raises(DataError, match="already holds the metrics"):
        MetricsWriter(tmp_path)
    MetricsWriter(tmp_path, resume_step=0).close()  # starting over, said explicitly
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_rollouts_are_spread_over_the_batch(tmp_path):
    batch = [sample(cursor, index, text="<s>\n½") for cursor in (3, 1, 2, 0) for index in range(4)]
    with MetricsWriter(tmp_path) as writer:
        path = writer.log_rollouts(10, batch, limit=4)
        assert writer.log_rollouts(11, batch, limit=0) is None
        assert len(lines(writer.log_rollouts(12, batch, limit=99))) == 16
    assert path == tmp_path / "rollouts" / "step_000010.jsonl"
    rows = lines(path)
    assert [row["cursor"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["response"] == "<s>\n½"
    assert (rows[0]["reward"], rows[0]["tokens"], rows[0]["finish_reason"]) == (1.0, 2, "stop")


def test_what_was_logged_before_a_kill_is_there_after_it(tmp_path):
    # The TensorBoard side has its own thread and takes seconds to import; what is tested here is the JSON Lines side.
    script = f"""
import sys, time
from pathlib import Path
from unittest import mock
import megatron_stare.observability.metrics as metrics
metrics._summary_writer = lambda *a: mock.Mock()
writer = metrics.MetricsWriter(Path({str(tmp_path)!r}))
for step in range(1, 51):
    writer.log(step, {{"x": 1.0}})
print("ready", flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 51))
