"""`megatron-stare eval` with real servers and on Ray: interrupted and continued, the same results
where seeds are honoured, and by servers that are attached to."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import sglang_servers as servers
from support.leftovers import Traces
from support.runs import ROOT, environment, model, train

MODEL = ROOT / "assets/tiny-adder"
COMMAND = [
    sys.executable,
    "-m",
    "megatron_stare.cli",
    "eval",
    str(ROOT / "configs/quickstart.yaml"),
]
ASKED = (
    f"model.path={MODEL}",
    "eval.prompts=64",
    "eval.samples=8",
    "eval.greedy=false",
    f"--checkpoint={MODEL}",
)
SERVED = (
    "rollout.engine=sglang",
    f"sglang.python={servers.PYTHON}",
    f"sglang.start_timeout_s={servers.START_S}",
    "sglang.seeds=true",
    "rollout.max_batch=16",
    "runtime.runner=inline",
)


def real(test: Any) -> Any:
    """Marks a test as one of real servers, which is skipped where they are missing."""
    missing = pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING))
    return pytest.mark.slow(pytest.mark.sglang(missing(test)))


def responses(out: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Responses of a folder, each of which is there once."""
    rows = [json.loads(line) for line in (out / "responses.jsonl").read_text().splitlines()]
    found = {(row["prompt"], row["sample"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def evaluate(out: Path, *settings: str, said: str = "avg@8") -> dict[str, Any]:
    """The record of an evaluation that ends well. Of what is set twice the later counts."""
    done = subprocess.run(
        [*COMMAND, *ASKED, *settings, f"--out={out}"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    return json.loads((out / "results.json").read_text())["held-out"]


def stopped(
    out: Path, at_least: int, number: signal.Signals, *settings: str, traces: Traces
) -> int:
    """Starts an evaluation, and sends it a signal once so many responses are there. Returns its
    exit code."""
    process = subprocess.Popen(
        [*COMMAND, *ASKED, *settings, f"--out={out}"],
        env=traces.environment(environment()),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if (found := re.match(r"held-out: (\d+) of 512", line)) and int(found[1]) >= at_least:
            traces.look()
            process.send_signal(number)
            break
    process.stderr.read()
    return process.wait()


@real
def test_servers_are_killed_with_it_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """64 problems, 8 responses each; once killed, once told to end, then to its end: as in one
    go."""
    whole = evaluate(tmp_path / "whole", *SERVED)
    out, traces = tmp_path / "out", Traces()
    assert stopped(out, 60, signal.SIGKILL, *SERVED, traces=traces) == -signal.SIGKILL
    first = (out / "responses.jsonl").read_bytes()
    assert 60 <= first.count(b"\n") < 512
    assert (
        stopped(out, first.count(b"\n") + 60, signal.SIGTERM, *SERVED, traces=traces)
        == 128 + signal.SIGTERM
    )
    second = (out / "responses.jsonl").read_bytes()
    assert second.startswith(first[: first.rindex(b"\n") + 1])
    assert second.count(b"\n") >= first.count(b"\n") + 60
    assert evaluate(out, *SERVED) == whole
    assert responses(out) == responses(tmp_path / "whole")
    assert (out / "responses.jsonl").read_bytes().startswith(second)
    assert traces.left() == []


@real
def test_the_servers_of_a_colocated_recipe_take_weights_from_disk(tmp_path: Path) -> None:
    """A recipe's `sync: tensor` reaches servers on the trainer's GPUs, and there is no trainer."""
    few = ("eval.prompts=8", "eval.samples=2")
    colocated = ("sglang.colocated=true", "sglang.cache_tokens=4000", "sglang.sync=tensor")
    found = evaluate(tmp_path / "out", *SERVED, *few, *colocated, said="avg@2")
    assert found == evaluate(tmp_path / "apart", *SERVED, *few, said="avg@2")
    assert not (tmp_path / "out" / "weight_sync").exists()


@real
def test_servers_that_are_attached_to(tmp_path: Path) -> None:
    """They come with other weights, and are given those of the checkpoint, by each way there is."""
    here = evaluate(tmp_path / "local", "runtime.runner=inline")
    with servers.running(seeds=True) as engine:
        servers.sync(engine, 3, servers.says_only(5))
        assert engine.process is not None
        attached = (
            "rollout.engine=sglang",
            f"sglang.urls=[{engine.process.url}]",
            "sglang.seeds=true",
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SGLANG_API_KEY", engine.process.api_key)
            found = [
                evaluate(tmp_path / sync, *attached, f"sglang.sync={sync}", "runtime.runner=inline")
                for sync in ("tensor", "disk", "distributed")
            ]
    assert found[0] == found[1] == found[2]
    assert abs(found[0]["pass1"] - here["pass1"]) < 0.08  # other noise, the same weights


@real
def test_training_evaluates_on_servers_of_the_evaluations_own(tmp_path: Path) -> None:
    """The evaluation's servers say the same to training and to the command of the same weights.
    Training gives these servers the weights beside its own."""
    asked = ("eval.prompts=16", "eval.samples=4", "eval.greedy=false")
    run, served = (
        tmp_path / "run",
        ("rollout.engine=sglang", "sglang.seeds=true", "runtime.runner=inline"),
    )
    started = (
        f"sglang.python={servers.PYTHON}",
        f"sglang.start_timeout_s={servers.START_S}",
        "parallel.tensor=1",
    )
    with servers.running(seeds=True) as engine, pytest.MonkeyPatch.context() as patch:
        assert engine.process is not None
        url = engine.process.url
        patch.setenv("SGLANG_API_KEY", engine.process.api_key)
        done = train(
            model(), f"run.dir={run}", *started, *served, *asked, f"eval.urls=[{url}]", cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        found = evaluate(
            tmp_path / "out",
            *served,
            *asked,
            f"sglang.urls=[{url}]",
            f"--checkpoint={run}",
            said="avg@4",
        )
    base, after = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    assert (after["step"], found["step"]) == (2, 2)
    assert (after["correct"], after["samples"]) == (found["correct"], found["samples"])
    assert base["samples"] != after["samples"]


@pytest.mark.slow
@pytest.mark.distributed
def test_engines_on_ray_answer_as_those_in_this_process(tmp_path: Path) -> None:
    inline = evaluate(tmp_path / "inline", "runtime.runner=inline")
    assert evaluate(tmp_path / "ray", "runtime.runner=ray", "rollout.engines=2") == inline


@pytest.mark.slow
@pytest.mark.distributed
def test_training_on_ray_evaluates_on_engines_of_the_evaluations_own(tmp_path: Path) -> None:
    records = []
    for name, engines in (("shared", 0), ("own", 2)):
        run = tmp_path / name
        done = train(
            model(), f"run.dir={run}", "eval.every=1", f"eval.engines={engines}", cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        records.append((run / "eval.jsonl").read_text())
    assert records[0] == records[1] and records[0].count("\n") == 3
