"""Another trainer's script and ours, on the pages for who comes from there, set the same things."""

from __future__ import annotations

import ast
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.pages import DOCS, blocks

from megatron_stare.config.load import validate

PAGES = sorted(DOCS.glob("from_*.md"))
# what a value of theirs is called here, where the number or the word is another one
CALLED: dict[tuple[str, Any], Any] = {
    ("use_vllm", True): "sglang",
    ("bf16", True): "bfloat16",
    ("beta", 0.0): None,  # no reference at all
    ("vllm_mode", "colocate"): True,
    ("loss_type", "dapo"): "token_mean",
    ("actor.loss_agg_mode", "token-mean"): "token_mean",
    ("--calculate-per-token-loss", True): "token_mean",
}
NOT_SETTINGS = {"train_dataset", "reward_funcs", "args"}  # data and functions of the script's own


def value_of(text: str) -> Any:
    """Reads a value as a command line has it; YAML takes 1e-6 for a word."""
    return float(text) if re.fullmatch(r"\d+e-?\d+", text) else yaml.safe_load(text)


def theirs(page: Path) -> dict[str, Any]:
    """Settings of the first block of code, by name."""
    block = next(each for each in blocks(page) if each.language in ("bash", "python"))
    if block.language == "python":
        (call,) = ast.parse(block.text).body
        found = {
            keyword.arg: keyword.value
            for node in ast.walk(call)
            if isinstance(node, ast.Call)
            for keyword in node.keywords
            if isinstance(node.func, ast.Name) and node.func.id.startswith("GRPO")
        }
        return {
            str(name): ast.literal_eval(value)
            for name, value in found.items()
            if name not in NOT_SETTINGS
        }
    words = shlex.split(block.text.replace("\\\n", " "))
    pairs: dict[str, Any] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--") and "=" not in word:
            pairs[word] = True if after.startswith("--") else value_of(after)
        elif "=" in word and not word.startswith("--"):
            pairs[word.partition("=")[0]] = value_of(word.partition("=")[2])
    return pairs


def rows(page: Path) -> dict[str, str]:
    """Setting of ours by the name of theirs, of the page's table."""
    found: dict[str, str] = {}
    for row in page.read_text().splitlines():
        if row.startswith("| `") and len(cells := row.split(" | ")) >= 2:
            names = [name.split('="')[0] for name in re.findall(r"`([^`]+)`", cells[0])]
            ours = re.findall(r"`([a-z_.0-9]+)`", cells[1])
            for number, name in enumerate(names if ours else []):
                found.setdefault(name, ours[number] if len(ours) == len(names) else ours[0])
    return found


def short(name: str) -> str:
    return re.sub(r"^actor_rollout_ref\.(?=actor\.|rollout\.)", "", name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_two_scripts_of_a_page_set_the_same(page: Path) -> None:
    asked, table = theirs(page), rows(page)
    text = next(block.text for block in blocks(page) if block.language == "yaml")
    config = validate(yaml.safe_load(text), page.name)
    told = config.model_dump()
    told["algorithm"] = yaml.safe_load(text)["algorithm"]
    assert len(asked) >= 18
    counted = {"trainer.nnodes", "trainer.n_gpus_per_node", "per_device_train_batch_size"}
    counted |= {"gradient_accumulation_steps", "--actor-num-nodes", "--actor-num-gpus-per-node"}
    for name, value in asked.items():
        assert short(name) in table, name
        if name in counted:
            continue
        here: Any = told
        for part in table[short(name)].split("."):
            here = here.get(part) if isinstance(here, dict) else getattr(here, part)
        here = getattr(here, "name", here)
        wanted = CALLED.get((short(name), value), value)
        if isinstance(wanted, int | float) and not isinstance(wanted, bool):
            assert math.isclose(float(here), float(wanted)), name
        else:
            assert here == wanted, name
    gpus = math.prod(float(asked[name]) for name in counted & asked.keys())
    if "per_device_train_batch_size" in asked:  # responses of a step, on as many GPUs as there are
        gpus = gpus * config.parallel.world_size / config.batch.samples_per_prompt
        assert gpus == config.batch.prompts
    else:
        assert gpus == config.parallel.world_size


def test_a_value_that_differs_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "from_slime.md"
    text = (DOCS / "from_slime.md").read_text()
    page.write_text(text.replace("--eps-clip-high 0.28", "--eps-clip-high 0.3", 1))
    with pytest.raises(AssertionError, match="--eps-clip-high"):
        test_the_two_scripts_of_a_page_set_the_same(page)
