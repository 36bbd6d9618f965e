"""Messages say what to do about a newcomer's first mistakes."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

import pytest

from megatron_stare.cli import main
from megatron_stare.run_dir.run_state import LOCK_FILE

QUICKSTART = "configs/quickstart.yaml"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("trl.py").write_text("def reward(completions, **kwargs):\n    return [0.0]\n")
    Path("three.py").write_text("def reward(prompt, response, answer):\n    return 0.0\n")
    Path("sums.jsonl").write_text('{"question": "1 + 1", "label": "2"}\n')
    Path("texts.jsonl").write_text('{"prompt": "1 + 1", "solution": "2"}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learning_rate=1e-4", "unknown name 'learning_rate'\n  fix: use optimizer.lr\n"),
        ("optimizer.learning_rate=1e-4", "fix: use optimizer.lr\n"),
        ("lr=1e-4", "fix: use optimizer.lr\n"),
        ("num_generations=8", "fix: use batch.samples_per_prompt\n"),
        ("model.max_new_tokens=8", "fix: use rollout.max_new_tokens\n"),
        ("optimizer.warmup_step=8", "fix: did you mean 'warmup_steps'?\n"),
        ("observability.sinks=wandb", "must be a list, such as [wandb] or [a, b] (got 'wandb')\n"),
        ("rollout.temperature=hot", "rollout.temperature: must be a number (got 'hot')\n"),
        ("optimizer.lr=-1", "optimizer.lr: must be above 0 (got -1)\n"),
        ("batch.prompts=0", "batch.prompts: must be at least 1 (got 0)\n"),
        ("batch.prompts=2.5", "batch.prompts: must be a whole number (got 2.5)\n"),
        ("batch.packed=maybe", "batch.packed: must be true or false (got 'maybe')\n"),
        ("batch=3", "batch: must be a section of settings (got 3)\n"),
        ("statistics.surprisal=new", "must be 'old', 'current' or 'rollout' (got 'new')\n"),
        (
            "model.path=Qwen/Qwen9-7B",
            "hf download Qwen/Qwen9-7B --local-dir models/Qwen9-7B, and then model.path=",
        ),
        (
            "reward.verifier=trl.py:reward",
            "'trl.py:reward' takes (completions, **kwargs), but a verifier is called",
        ),
        (
            "reward.verifier=three.py:reward",
            "fix: define it as verify(response: str, answer: str) -> float",
        ),
        ("data.path=sum.jsonl", "sums.jsonl?\n"),
        ("data.path=sums.jsonl", "fix: set data.prompt_key=question\n"),
        ("data.path=texts.jsonl", "fix: set data.answer_key=solution\n"),
        ("data.path=nowhere/sums.jsonl", "nowhere either\n"),
    ],
)
def test_the_message_says_what_to_do(
    override: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["data.source=files"] if override.startswith("data.") else []
    assert main(["train", QUICKSTART, *files, override, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error and "Input should" not in error


def test_columns_that_are_named_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [
        "data.prompt_key=question",
        "data.answer_key=label",
        "batch.prompts=1",
        "eval.prompts=0",
    ]
    assert (
        main(["train", QUICKSTART, "data.source=files", "data.path=sums.jsonl", *keys, "--dry-run"])
        == 0
    )


def test_a_directory_in_use_names_who_uses_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    with Path("run", LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["train", QUICKSTART, "run.dir=run"]) == 2
    error = capsys.readouterr().err
    assert f"another process is running in this directory (pid {os.getpid()})" in error
    assert "megatron-stare status " in error


def test_every_tool_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tool", "--help"])
    lines = capsys.readouterr().out.splitlines()
    for name in ("check_parity", "prepare_data", "plan_memory", "make_tiny_model"):
        (line,) = (each for each in lines if each.strip().startswith(name + " "))
        assert re.search(r"[a-z]{4,} .*[a-z]$|[}]$", line) and len(line.split()) > 5
