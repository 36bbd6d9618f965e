"""The shipped models: the tool makes them reproducibly, and they leave reinforcement learning
something to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import ROOT
from transformers import AutoTokenizer

from megatron_stare.data.signs import VOCABULARY

TOOL = ROOT / "tools/make_tiny_model.py"


def make(path: Path, *arguments: str) -> bytes:
    subprocess.run(
        [sys.executable, str(TOOL), str(path), "--steps", "3", *arguments],
        check=True,
        capture_output=True,
    )
    return (path / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["arithmetic", "signs"])
def test_the_same_seed_makes_the_same_model(tmp_path: Path, task: str) -> None:
    first = make(tmp_path / "a", "--task", task)
    assert first == make(tmp_path / "b", "--task", task)
    assert first != make(tmp_path / "c", "--task", task, "--seed", "2")


@pytest.mark.parametrize(("name", "megabytes"), [("tiny-adder", 5), ("tiny-searcher", 1)])
def test_the_shipped_models_are_small_and_whole(name: str, megabytes: int) -> None:
    folder = ROOT / "assets" / name
    assert sum(f.stat().st_size for f in folder.iterdir()) <= megabytes * 2**20
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {
        f.name for f in folder.iterdir()
    }


def test_the_searcher_s_tokens_are_the_task_s_words() -> None:
    """The tokenizer of a qwen2 would be taken for Qwen2's by transformers, and 41 cut into 4 and
    1."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets/tiny-searcher")
    text = "33 8 5 2 = 38 : +8 41 +5 46 -2 44 wait +8 41 -5 36 +2 38"
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == text.split()
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert {tokenizer(word).input_ids[0] for word in VOCABULARY} == set(
        range(2, 2 + len(VOCABULARY))
    )
