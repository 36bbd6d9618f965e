"""Recipes are planned and rehearsed where no model, tokenizer, data or server is, and say what was
not checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.runs import ROOT

from megatron_stare.cli import main
from megatron_stare.config.load import load_config
from megatron_stare.config.recipes import recipes
from megatron_stare.models import published_shape, read_shape

SMALL = "recipes/long_cot_r1_distill_1.5b"
SETS = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench")
NO_SERVERS = "sglang.python=/nowhere/python"


@pytest.fixture(autouse=True)
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "TORCHDYNAMO_DISABLE"):
        # a plan sets them for its process, which here goes on
        monkeypatch.setenv(name, os.environ.get(name, ""))


def unchecked(text: str) -> list[str]:
    mark = "not checked: "
    return [
        line.removeprefix("# ").removeprefix(mark) for line in text.splitlines() if mark in line
    ]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["train", SMALL, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize("recipe", recipes())
def test_the_shape_of_every_recipe_ships(recipe: str) -> None:
    shape = published_shape(load_config(f"recipes/{recipe}").model.path)
    assert shape is not None and shape.layers >= 28


def test_a_dry_run_answers_and_lists_what_it_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", SMALL, NO_SERVERS, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert yaml.safe_load(said)["model"]["path"].endswith("models/DeepSeek-R1-Distill-Qwen-1.5B")
    model, lengths, servers, *files = unchecked(said)
    assert "weights, tokenizer, chat template and stop tokens" in model
    assert "prompts" in lengths and "servers' software" in servers
    here = Path.cwd()
    wanted = [f"{here}/data/{name}.jsonl" for name in ("dapo_math_17k", *SETS)]
    assert [each.split(",")[0] for each in files] == wanted
    assert list(here.iterdir()) == []


@pytest.mark.wide
def test_the_script_answers_too() -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHON": sys.executable,
        "DRY_RUN": "1",
        "SGLANG_PYTHON": "/nowhere",
    }
    script = ["bash", str(ROOT / "scripts/run_recipe.sh"), "long_cot_r1_distill_1.5b"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(unchecked(done.stdout)) == 10


def test_a_plan_is_that_of_the_model_itself(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    here = str(ROOT / "assets/architectures/r1-distill-qwen-1.5b")
    for number, given in enumerate(([], [f"model.path={here}"])):
        assert main(["plan", SMALL, *given, "--json", f"{number}.json"]) in (0, 1)
        found.append(json.loads(Path(f"{number}.json").read_text()))
    assert found[0]["step"] == found[1]["step"] and found[0]["stages"] == found[1]["stages"]
    assert found[0]["not_checked"] == unchecked_with_mark(capsys.readouterr().out)
    assert len(found[0]["not_checked"]) >= 5 and found[1]["not_checked"] == []


def unchecked_with_mark(text: str) -> list[str]:
    return [f"not checked: {line}" for line in unchecked(text)]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("parallel.tensor=5", "parallel.tensor"),
        ("sglang.tensor_parallel=5", "sglang.tensor_parallel"),
        ("reward.verifier=maths", "did you mean 'math'"),
        ("data.source=file", "data.source"),
        ("rollout.environment=none", "rollout.environment"),
        ("observability.sinks=[jsonl, consol]", "consol"),
        ("rollout.max_new_tokens=200000", "exceed"),
        ("memory.device_gb=8", "too small"),
        ("model.path=models/Qwen2.5-33B", "cannot read the model's config.json"),
        ("model.path=.", "cannot read the model's config.json"),
    ],
)
def test_all_else_is_checked_still(
    capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    assert said in refused(capsys, NO_SERVERS, override, "--dry-run")


def test_data_that_are_here_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    Path("data").mkdir()
    Path("data/dapo_math_17k.jsonl").write_text('{"prompt": "1+1"}\n')
    assert "dapo_math_17k.jsonl:1" in refused(capsys, NO_SERVERS, "--dry-run")
    Path("data/dapo_math_17k.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    assert main(["train", SMALL, NO_SERVERS, "--dry-run"]) == 0
    assert not any("dapo_math_17k" in each for each in unchecked(capsys.readouterr().out))


def test_a_run_needs_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot read the model's config.json" in refused(capsys, NO_SERVERS)
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "shipped"),
    [
        ("models/DeepSeek-V3", "deepseek-v3"),
        ("DeepSeek-R1-Distill-Qwen-1.5B", "r1-distill-qwen-1.5b"),
    ],
)
def test_a_shape_ships_with_its_makers_name_or_without(folder: str, shipped: str) -> None:
    assert published_shape(folder) == read_shape(ROOT / "assets/architectures" / shipped)


def test_a_folder_that_is_there_is_the_model() -> None:
    """Half a download is no reason to take another's word for what it holds."""
    folder = Path("models/Qwen2.5-32B")
    assert published_shape(folder) == read_shape(ROOT / "assets/architectures/qwen2.5-32b")
    folder.mkdir(parents=True)
    assert published_shape(folder) is None
