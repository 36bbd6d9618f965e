"""Whole runs: what they leave behind, a frozen weight sync, and a driver that is killed and
resumed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from support.interrupts import uninterruptible
from support.ranks_sink import FILE
from support.runs import ROOT, command, environment, metrics, model, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_stare.rollout.agreement.limits import BOUNDS
from megatron_stare.run_dir.heartbeat import IDLE, read_heartbeat
from megatron_stare.run_dir.json_lines import read_jsonl
from megatron_stare.run_dir.rollout_files import read_rollouts

pytestmark = pytest.mark.distributed


@pytest.mark.wide
def test_a_run_leaves_everything_it_promises(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    watched = "observability.measured_every=2"
    done = train(model(), f"run.dir={run_dir}", "run.rollouts_every=1", watched, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.endswith(" ...")] == [
        "starting 1 reward worker ...",
        "starting Ray ...",
        "starting 2 trainer ranks and 1 rollout engine: each imports PyTorch ...",
        f"building the trainer of {ROOT / 'assets/tiny-adder'} ...",
        "starting the engine local ...",
    ]
    names = {p.name for p in run_dir.iterdir()}
    assert {
        "config.yaml",
        "metrics.jsonl",
        "eval.jsonl",
        "tensorboard",
        "rollouts",
        "checkpoints",
        "hf",
        "report.html",
        "starts.jsonl",
    } <= names
    logs = {file.stem: file.read_text() for file in (run_dir / "logs").iterdir()}
    assert logs and all(text.startswith("--- ") for text in logs.values())
    assert any(name.endswith("_1") for name in logs)  # a file of each rank
    beat = read_heartbeat(run_dir)
    assert beat is not None and (beat.process, beat.phase, beat.step, beat.steps) == (
        "ended",
        "closing",
        2,
        2,
    )
    assert len(beat.step_s) == 2 and beat.tokens_per_s and "blackbox" not in names  # nothing hung
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["ratio/max_abs_log"] == 0.0  # one plan serves both passes: on policy, exactly
        assert row["rollout/logprob_diff_max"] < 1e-4
        assert row["update/finite"] == 1.0
        masses = [
            row[f"forecast/mass_{side}"]
            for side in ("common_plus", "rare_plus", "common_minus", "rare_minus")
        ]
        assert row["forecast/plain_change"] == pytest.approx(sum(masses))
        assert 0 < row["signal/format"] <= 1
    for name in ("forecast/measured_change", "gradient/token_share_0", "gradient/token_norm_19"):
        assert [name in row for row in rows] == [False, True]
    shares = [rows[1][f"gradient/token_share_{n}"] for n in range(20)]
    assert sum(shares) == pytest.approx(1) and "gradient/token_share_20" not in rows[1]
    assert all("reflection/selected_verification" in row for row in rows)
    assert "Entropy forecast" in (run_dir / "report.html").read_text()
    assert [json.loads(line)["weights"] for line in (run_dir / "eval.jsonl").open()] == [
        "base",
        "trained",
    ]
    (start,) = read_jsonl(run_dir / "starts.jsonl")
    assert start["step"] == 0 and start["host"] == socket.gethostname() and start["date"]
    responses = read_rollouts(run_dir / "rollouts" / "step_000002.jsonl")
    assert [bool(each.tokens) for each in responses].count(True) == 8  # run.tokens_kept, of 16
    for each in responses:
        if each.tokens:
            assert (
                "".join(token.text for token in each.tokens).removesuffix("<eos>") == each.response
            )
            assert all(
                token.surprisal >= 0 and token.entropy >= 0 and token.rare in "rc"
                for token in each.tokens
            )
            assert all(
                token.weight == 1
                for token in each.tokens
                if token.advantage and token.selected == "."
            )
    policy = AutoModelForCausalLM.from_pretrained(run_dir / "hf")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "hf")
    ids = tokenizer("10+20+30=", return_tensors="pt").input_ids
    assert tokenizer.decode(policy.generate(ids, max_new_tokens=24, do_sample=False)[0]).startswith(
        "10+20+30="
    )
    again = train(model(), f"run.dir={run_dir}", cwd=tmp_path)
    assert again.returncode == 2
    assert "there is a run in this directory already" in again.stderr


@pytest.mark.wide
def test_no_rank_is_in_a_call_while_responses_are_sampled(tmp_path: Path) -> None:
    """So no collective of the trainer waits for a rollout, and the limit of one need not be as long
    (faults.requests.collective_s)."""
    run = tmp_path / "run"
    done = train(
        model(),
        f"run.dir={run}",
        "observability.sinks=[jsonl, support.ranks_sink.RanksAt]",
        "parallel.tensor=2",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads((run / FILE).read_text())
    assert seen["rollout"] == {f"trainer rank {rank}": [IDLE] for rank in range(2)}


@pytest.mark.wide
def test_a_run_says_which_weights_are_proven(tmp_path: Path) -> None:
    """The start's are, and then those of each second step; a run that proves all of them says
    nothing. Its machine is of a kind that no plan knows, which ends nothing and is said once."""
    inline = (
        "runtime.runner=inline",
        "parallel.tensor=1",
        f"run.dir={tmp_path / 'run'}",
        "eval.prompts=0",
        model(),
    )
    done = train(
        *inline, "rollout.prove_every=2", "plan.gpu=abacus", cwd=tmp_path, **{"run.steps": 3}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("memory and time of this run are not predicted: unknown") == 1
    assert '"plan/' not in (tmp_path / "run/metrics.jsonl").read_text()
    assert [row["sync/proven"] for row in metrics(tmp_path / "run")] == [0.0, 1.0, 0.0]


@pytest.mark.wide
def test_a_frozen_weight_sync_stops_the_run(tmp_path: Path) -> None:
    alone = {"runtime.runner": "inline", "parallel.tensor": 1, "eval.prompts": 0}
    done = train(
        model(),
        f"run.dir={tmp_path / 'run'}",
        "rollout.engine=support.engines.FrozenEngine",
        cwd=tmp_path,
        **alone,
    )
    assert done.returncode == 2
    assert "the trainer holds version 1, but the rollout was sampled by version 0" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(metrics(tmp_path / "run")) == 1  # a step was made, and what is known of it stays


@pytest.mark.wide
@pytest.mark.parametrize("host", ["127.0.0.1", "nowhere.invalid"])
def test_a_cluster_that_is_not_there_is_said_to_be_that(tmp_path: Path, host: str) -> None:
    with socket.socket() as probe:  # bound and not listening: refused for as long as it lives
        probe.bind(("", 0))
        address = f"{host}:{probe.getsockname()[1]}"
        done = train(
            model(), f"run.dir={tmp_path / 'run'}", f"runtime.ray_address={address}", cwd=tmp_path
        )
    assert done.returncode == 2
    loading, error, fix = done.stderr.splitlines()  # and none of gRPC's
    assert loading == "loading PyTorch and Megatron ..."
    assert error.startswith(
        f"error: runtime.ray_address: no Ray cluster can be reached at {address}: "
    )
    assert fix.startswith(
        f"  fix: is a cluster running there? `ray status --address {address}` asks it; "
    )


@pytest.mark.wide
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    settings = {
        "run.steps": 5,
        "run.checkpoint_every": 2,
        "checkpoint.background": "false",
        "eval.prompts": 0,
    }
    whole = train(model(), f"run.dir={tmp_path / 'whole'}", cwd=tmp_path, **settings)
    assert whole.returncode == 0, whole.stderr
    cut = tmp_path / "cut"
    arguments = [model(), f"run.dir={cut}"]
    process = subprocess.Popen(
        command(*arguments, **settings),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=uninterruptible,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.lstrip().startswith("step 1/5"):
            process.send_signal(signal.SIGINT)  # a run in the background goes on
        if line.lstrip().startswith("step 3/5"):  # one step past the checkpoint of step 2
            break
    else:
        pytest.fail("it ended before step 3")
    # Ray's two agents notice last, within two minutes; they hold nothing that a resumed run needs
    children = [
        p
        for p in psutil.Process(process.pid).children(recursive=True)
        if not p.name().endswith("Agent")
    ]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=120)
    # trainers, engine, verifier and Ray go with the driver
    assert not alive, [p.cmdline() for p in alive]

    # what a save that was killed leaves behind must not be taken for a checkpoint
    half = cut / "checkpoints" / "step_000004.tmp"
    half.mkdir()
    (half / "run_state.json").write_text("{}")
    resumed = train(*arguments, "--resume", cwd=tmp_path, **settings)
    assert resumed.returncode == 0, resumed.stderr
    assert "continuing after step 2" in resumed.stdout
    assert not half.exists()
    assert metrics(cut) == metrics(tmp_path / "whole")

    changed = train(*arguments, "--resume", "optimizer.lr=1e-5", cwd=tmp_path, **settings)
    assert changed.returncode == 2
    assert "optimizer.lr: the run was started with 0.00045, not 1e-05" in changed.stderr


LARGEST = {"bfloat16": 0.5, "float16": 0.1}  # nats, of a token of this small model


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_run_in_16_bits(tmp_path: Path, dtype: str) -> None:
    """Trainer and engine round alike but for the shapes of their products; what is exported is in
    that dtype."""
    run_dir = tmp_path / "run"
    settings = {
        "runtime.runner": "inline",
        "parallel.tensor": 1,
        "eval.prompts": 0,
        "model.dtype": dtype,
    }
    settings |= {"run.steps": 10, "agreement.window": 3}
    done = train(model(), f"run.dir={run_dir}", cwd=tmp_path, **settings)
    assert done.returncode == 0, done.stderr
    rows = metrics(run_dir)
    assert [row["update/count"] for row in rows] == [1.0] * 10
    assert ["agreement/trend" in row for row in rows] == [False] * 5 + [True] * 5
    for row in rows:
        assert row["ratio/max_abs_log"] == 0.0
        assert 1e-5 < row["rollout/logprob_diff_max"] < LARGEST[dtype]
        assert row["agreement/max"] == pytest.approx(row["rollout/logprob_diff_max"])
        assert row["agreement/mean"] == pytest.approx(row["rollout/logprob_diff_mean"])
        assert 1e-6 < row["agreement/mean"] < BOUNDS[dtype]["mean"] / 3
        assert row.get("optimizer/loss_scale") == (2.0**16 if dtype == "float16" else None)
    assert {str(t.dtype) for t in load_file(run_dir / "hf/model.safetensors").values()} == {
        f"torch.{dtype}"
    }
    assert json.loads((run_dir / "hf/config.json").read_text())["dtype"] == dtype
