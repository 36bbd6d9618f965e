"""Files that prompts are made with are known again, and others are named."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.runs import ROOT
from transformers.utils import chat_template_utils

from megatron_stare.config.load import load_config
from megatron_stare.data.prompt_source import make_source
from megatron_stare.driver.resuming import prompt_inputs, refuse_other_inputs
from megatron_stare.errors import DataError
from megatron_stare.rollout.engines.model_folder import load_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}="


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a chat template, and data with a system prompt."""
    shutil.copytree(ROOT / "assets/tiny-adder", tmp_path / "model")
    set_template(tmp_path, TEMPLATE)
    set_system(tmp_path, "1+1=2 ")
    return tmp_path


def set_template(folder: Path, template: str) -> None:
    file = folder / "model/tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))


def set_system(folder: Path, system: str) -> None:
    rows = [
        {
            "prompt": [
                {"role": "system", "content": system},
                {"role": "user", "content": f"{n}+2"},
            ],
            "answer": str(n + 2),
        }
        for n in range(8)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def inputs(folder: Path) -> tuple[dict[str, str], Any]:
    data = f"data={{source: jsonl, path: {folder}/train.jsonl, chat_template: true}}"
    config = load_config(
        ROOT / "configs/quickstart.yaml", [f"model.path={folder}/model", "eval.prompts=0", data]
    )
    tokenizer = load_tokenizer(config.model.path)
    source = make_source(config, tokenizer, "train")
    before = source.state()
    found = prompt_inputs(config, tokenizer, source)
    assert source.state() == before
    return found, config


def test_the_same_files_are_known_again(folder: Path) -> None:
    first, config = inputs(folder)
    assert {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat template",
        "first prompt",
        "set of stop tokens",
    } <= first.keys()
    again, _ = inputs(folder)
    refuse_other_inputs(first, again, config)
    refuse_other_inputs({}, again, config)  # of a release that saved none
    former = {name: digest for name, digest in first.items() if name != "set of stop tokens"}
    refuse_other_inputs(former, again, config)  # of a release that saved none of these


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda folder: set_template(folder, TEMPLATE + "+"),
            {"tokenizer_config.json", "chat template", "first prompt"},
        ),
        (lambda folder: set_system(folder, "2+2=4 "), {"first prompt"}),
        (
            lambda folder: (folder / "model/added_tokens.json").write_text("{}"),
            {"added_tokens.json"},
        ),
        (
            lambda folder: (folder / "model/generation_config.json").write_text(
                json.dumps({"eos_token_id": [1, 2, 3]})
            ),
            {"set of stop tokens"},
        ),
    ],
    ids=["chat-template", "system-prompt", "tokenizer", "stop-tokens"],
)
def test_others_are_named(folder: Path, change: Any, named: set[str]) -> None:
    before, config = inputs(folder)
    change(folder)
    now, _ = inputs(folder)
    assert {
        name for name in before.keys() | now.keys() if before.get(name) != now.get(name)
    } == named
    for name in named:  # each by itself
        with pytest.raises(
            DataError, match=f"{name} (has changed|is new) since the run was started"
        ):
            refuse_other_inputs(before, {**before, **{name: now[name]}}, config)


def test_a_template_with_todays_date_makes_the_same_prompts_on_every_day(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template asks as Llama-3.2's does, which falls back to this date, too."""

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Tomorrow:
            return cls(2031, 1, 2)

    set_template(folder, '{{ date_string or strftime_now("%d %b %Y") }} ' + TEMPLATE)
    monkeypatch.setattr(chat_template_utils, "datetime", Tomorrow)
    inputs(folder)
    text = load_tokenizer(str(folder / "model")).apply_chat_template
    said = [{"role": "user", "content": "1"}]
    assert text(said, tokenize=False) == "26 Jul 2024 1="
    assert text(said, tokenize=False, date_string="1 May 2030") == "1 May 2030 1="
