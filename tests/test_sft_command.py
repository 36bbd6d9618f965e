"""`megatron-stare sft`: runs on the tiny chat model, and what is refused before they begin."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.runs import ROOT, environment, metrics
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_stare.cli import main
from megatron_stare.commands.evaluate.offline_evaluation import read
from megatron_stare.config.load import load_config
from megatron_stare.data.messages import rendered
from megatron_stare.observability.metrics.figures import verdict
from megatron_stare.observability.report.headline import headline
from megatron_stare.rollout.engines.model_folder import model_stop_token_ids
from megatron_stare.run_dir.run_files import read_run

CHAT = ROOT / "assets/tiny-chat"
STEPS = 6


def folder_of(tmp_path: Path) -> Path:
    """A configuration with its rows."""
    for name, first in (("rows", 0), ("held_out", 100)):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"What is {n}+{n}?"},
                    {"role": "assistant", "content": f"It is {2 * n}, I say."},
                    {"role": "user", "content": "Sure?"},
                    {"role": "assistant", "content": "Yes." * (1 + n % 3)},
                ]
            }
            for n in range(first, first + 20)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "sft.yaml").write_text(
        f"""\
run: {{dir: run, steps: {STEPS}, checkpoint_every: 2}}
model: {{path: {CHAT}}}
batch: {{prompts: 4, micro_batch_tokens: 512}}
rollout: {{max_prompt_tokens: 128, max_new_tokens: 128}}
data: {{path: rows.jsonl, eval_path: held_out.jsonl}}
eval: {{every: 3}}
optimizer: {{lr: 1.0e-3, warmup_steps: 2}}
runtime: {{runner: inline}}
"""
    )
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "megatron_stare.cli", "sft", "sft.yaml", *arguments]


def sft(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.wide
@pytest.mark.distributed
def test_a_run_its_report_and_the_same_run_killed_and_resumed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    done = sft(folder, "run.dir=whole")
    assert done.returncode == 0, done.stderr
    rows = metrics(folder / "whole")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["heldout/loss"] < rows[2]["heldout/loss"]
    assert [row["step"] for row in rows if "heldout/loss" in row] == [3, 6]
    names = {name for row in rows for name in row}
    assert {"loss/policy", "loss/tokens", "optimizer/lr", "optimizer/grad_norm"} <= names
    assert not [name for name in names if name.startswith(("reward/", "rollout/", "group/"))]
    assert "held-out loss before training" in done.stdout
    assert "rollout engine" not in done.stdout + done.stderr
    assert "reward" not in done.stdout

    run = read_run(folder / "whole")
    assert headline(run).sentence.startswith("In 6 steps, the loss went from")
    assert {figure.label for figure in verdict(run)} >= {"Loss, last step", "Held-out loss"}
    report = (folder / "whole/report.html").read_text()
    assert "Held-out loss" in report
    for absent in ("Reward", "not recorded", "Clip fraction", "pass@1"):
        assert absent not in report.split("<main")[1].split('id="settings"')[0], absent

    killed = subprocess.Popen(
        command("run.dir=again"),
        cwd=folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    record = folder / "again/metrics.jsonl"
    until = time.monotonic() + 120
    while time.monotonic() < until and not (record.exists() and record.read_text().count("\n") > 2):
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (folder / "again/hf").exists()
    done = sft(folder, "run.dir=again", "--resume")
    assert done.returncode == 0, done.stderr
    assert metrics(folder / "again") == rows
    policies = [load_file(folder / each / "hf/model.safetensors") for each in ("whole", "again")]
    assert policies[0].keys() == policies[1].keys()
    assert all(policies[0][name].equal(tensor) for name, tensor in policies[1].items())


@pytest.mark.wide
@pytest.mark.distributed
def test_the_held_out_loss_is_that_of_the_exported_policy(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    base = folder / "base"  # ends where no turn of the rows does, as base models do
    shutil.copytree(CHAT, base)
    for name in ("generation_config.json", "config.json"):
        told = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps({**told, "eos_token_id": 256}))
    told = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**told, "eos_token": "<|endoftext|>"}))
    parallel = ("runtime.runner=ray", "parallel.tensor=2", "run.steps=2")
    done = sft(folder, "run.dir=run", f"model.path={base}", *parallel)
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(folder / "run/hf")
    tokenizer = AutoTokenizer.from_pretrained(folder / "run/hf")
    total, number = 0.0, 0
    for line in (folder / "held_out.jsonl").read_text().splitlines():
        ids, mask = rendered(json.loads(line)["messages"], None, tokenizer)
        labels = [id if kept else -100 for id, kept in zip(ids, mask, strict=True)]
        found = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels]))
        total, number = total + float(found.loss.detach()) * sum(mask), number + sum(mask)
    assert model_stop_token_ids(str(folder / "run/hf")) == (256, 258)
    assert model.generation_config.eos_token_id == [256, 258]
    assert main(["convert", str(folder / "run"), str(folder / "converted")]) == 0
    assert model_stop_token_ids(str(folder / "converted")) == (256, 258)
    config = load_config(
        ROOT / "configs/quickstart.yaml",
        [f"model.path={base}", "eval.prompts=1", "rollout.max_prompt_tokens=32"],
    )
    assert read(config, folder / "run", []).stop_ids == (256, 258)
    assert metrics(folder / "run")[-1]["heldout/loss"] == pytest.approx(total / number, rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.path=none.jsonl"], "cannot read the prompts"),
        (["algorithm=grpo", "batch.samples_per_prompt=2"], "does not learn from conversations"),
        (["data.source=arithmetic"], "has no conversations to learn from"),
        (["batch.samples_per_prompt=2"], "a row is one conversation"),
        (["rollout.temperature=0.5"], "the loss is that of the policy itself"),
        (["batch.epochs=2"], "fix: batch.epochs=1"),
        (["batch.mini_batch_prompts=2"], "fix: batch.epochs=1"),
        (["eval.prompts=4"], "evaluate the exported policy afterwards"),
        (["rollout.staleness=1"], "nothing is sampled"),
        (["data.deduplicate=true"], "conversations are not compared"),
        (["data.decontaminate=[held_out.jsonl]"], "fix: data.decontaminate=[]"),
        (["rollout.max_new_tokens=2", "rollout.max_prompt_tokens=2"], "20 of 20 rows"),
    ],
)
def test_what_is_refused_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(folder_of(tmp_path))
    assert main(["sft", "sft.yaml", *overrides, "--dry-run"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_dry_run_says_how_much_there_is_to_learn_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder_of(tmp_path))
    assert main(["sft", "sft.yaml", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "# data: 20 conversations of" in said
    assert "the run takes 24 rows, 1.20 passes" in said


def test_reinforcement_learning_refuses_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder_of(tmp_path))
    assert main(["train", "sft.yaml", "data.source=messages", "--dry-run"]) == 2
    assert "start the run with `megatron-stare sft`" in capsys.readouterr().err
