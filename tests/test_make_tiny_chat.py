"""The byte-level chat model: its bytes, its template, the script that makes it, and what it can."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import ROOT, environment
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_stare.data.messages import conversation as read
from megatron_stare.data.messages import rendered

TOOL = ROOT / "tools/make_tiny_chat.py"
CHAT = ROOT / "assets/tiny-chat"


@pytest.fixture(scope="module")
def made() -> Any:
    spec = importlib.util.spec_from_file_location("make_tiny_chat", TOOL)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHAT)


def test_it_is_small_and_its_files_are_those_of_the_script(made: Any, tokenizer: Any) -> None:
    assert sum(file.stat().st_size for file in CHAT.iterdir()) < 8e6
    assert tokenizer.chat_template == made.make_tokenizer().chat_template
    assert tokenizer.get_vocab() == made.make_tokenizer().get_vocab()


def test_every_byte_is_a_token_and_text_comes_back(tokenizer: Any) -> None:
    for text in ("naïve 日本 \n\t x", "".join(map(chr, range(256))), " a  b "):
        ids = tokenizer(text).input_ids
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text
    for word in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_response>"):
        assert len(tokenizer(word).input_ids) == 1


def test_conversations_are_right_but_for_slips(made: Any, tokenizer: Any) -> None:
    draw, right, called, sums = random.Random(5), 0, 0, 0
    for _ in range(400):
        row = made.conversation(draw)
        ids, mask = rendered(*read(row), tokenizer)
        assert len(ids) == len(mask)
        asked, *turns = row["messages"]
        if asked["content"].startswith("Say "):
            assert asked["content"] == f"Say {turns[0]['content']}."
            continue
        value = eval(asked["content"].removeprefix("What is ").removesuffix("?"))
        same = turns[-1]["content"] == f"The answer is {value}."
        sums, right = sums + 1, right + same
        if len(turns) == 3:
            called += 1
            assert same
            assert row["tools"]
            assert turns[1] == {"role": "tool", "content": str(value)}
    assert 0.9 * sums < right < sums
    assert 0.3 * sums < called < 0.8 * sums


@pytest.mark.wide
def test_the_model_says_what_its_tool_returned(tokenizer: Any, made: Any) -> None:
    """Results that no sum in the question has, so that they can only be copied."""
    model = AutoModelForCausalLM.from_pretrained(CHAT).eval()
    draw, right, called = random.Random(1), 0, 0
    for _ in range(16):
        one, other, result = draw.randint(10, 99), draw.randint(10, 99), draw.randint(200, 999)
        asked = {"role": "user", "content": f"What is {one}*{other}?"}
        tools = [made.tool("Runs Python.")]
        code = f"print({one}*{other})"
        call = {"function": {"name": "code_interpreter", "arguments": {"code": code}}}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        begun = _greedy(model, tokenizer, [asked], tools)
        called += begun.startswith("<tool_call>") and code in begun
        told = [asked, calling, {"role": "tool", "content": str(result)}]
        right += _greedy(model, tokenizer, told, tools) == f"The answer is {result}.<|im_end|>"
    assert called >= 12 and right >= 12


def _greedy(model: Any, tokenizer: Any, messages: Any, tools: Any) -> str:
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([tokenizer(text).input_ids])
    there = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=there, max_new_tokens=90, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :])


@pytest.mark.wide
@pytest.mark.distributed
def test_the_script_makes_a_model_that_transformers_loads(tmp_path: Path) -> None:
    few = ["--rows=40", "--steps=2", "--batch=4", "--hidden=32", "--layers=1"]
    done = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path / "out"), *few],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        file.name for file in CHAT.iterdir()
    }
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    config = json.loads((CHAT / "config.json").read_text())
    assert model.config.vocab_size == config["vocab_size"]
