"""The evaluation of the published recipes by `megatron-stare eval`: six sets in their published
formats, prepared by the tool, answered by a tiny model of the same architecture."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.runs import ROOT
from test_prepare_data import PUBLISHED
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from megatron_stare.cli import main

sys.path.insert(0, str(ROOT / "tools"))
import prepare_data

SETS = {"aime24": 32, "aime25": 32, "amc23": 32, "math500": 4, "minerva": 4, "olympiadbench": 4}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder to which the recipes' paths lead: the six sets and a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in SETS:
        (tmp_path / "rows.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in PUBLISHED[name][0])
        )
        assert prepare_data.main([name, "rows.jsonl", "--out", f"data/{name}.jsonl"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets/tiny-chat")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = Qwen2Config(
        **sizes,
        num_key_value_heads=2,
        vocab_size=len(tokenizer) + 8,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "models/Qwen2.5-Math-7B")
    tokenizer.save_pretrained(tmp_path / "models/Qwen2.5-Math-7B")
    return tmp_path


def test_the_final_evaluation_of_a_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = (
        "rollout.engine=local",
        "sglang={}",
        "runtime.runner=inline",
        "rollout.max_new_tokens=6",
        "model.dtype=float32",
    )
    capsys.readouterr()
    recipe = "recipes/short_cot_qwen2.5_math_7b"
    model = "--checkpoint=models/Qwen2.5-Math-7B"
    assert main(["eval", recipe, *engine, "reward.workers=1", model, "--out=out", "--json"]) == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    assert {name: record["decoding"]["samples"] for name, record in tasks.items()} == SETS
    for name, record in tasks.items():
        assert record["problems"] == len(PUBLISHED[name][1])
        assert record["results"].keys() >= {
            f"avg@{SETS[name]}",
            f"pass@{SETS[name]}",
            f"maj@{SETS[name]}",
        }
        assert (
            record["decoding"]["temperature"],
            record["decoding"]["top_p"],
            record["greedy"],
        ) == (1.0, 0.7, None)
        assert record["failures"] == 0
    rows = [json.loads(line) for line in (folder / "out/problems.jsonl").read_text().splitlines()]
    assert [(row["task"], row["id"]) for row in rows[:2]] == [("aime24", "60"), ("aime25", "0")]
