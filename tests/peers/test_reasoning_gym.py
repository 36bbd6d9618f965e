"""The tasks of `reasoning-gym`: each makes prompts, its own scorer judges the responses, and runs
train on it unchanged.

pip install reasoning-gym==0.1.25        into an environment that has this project
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.runs import ROOT, environment
from transformers import AutoTokenizer

from megatron_stare.config.schema import Config
from megatron_stare.data.prompt_source import make_source
from megatron_stare.data.reasoning_gym import (
    CHUNK,
    COLUMN,
    HASHED,
    ReasoningGym,
    make_entry,
    verify,
)
from megatron_stare.errors import ConfigError

sys.path.insert(0, str(ROOT / "benchmarks"))

import others_environments

pytestmark = pytest.mark.slow
gym = pytest.importorskip("reasoning_gym")
CHAT = ROOT / "assets/tiny-chat"
# needs a list of other tasks, or files that the package does not ship
LEFT_OUT = {"composite", "arc_agi", "rearc"}
# the digest of 24 questions of each task; for this seed, list_functions draws the third question
# from Python's global generator
DIGESTS = """
import hashlib, json, sys
from megatron_stare.data.reasoning_gym import make_entry

found = {}
for dataset in sys.argv[1:]:
    texts = [make_entry(dataset, "{}", 12345, at)[1]["question"] for at in range(24)]
    found[dataset] = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
print()  # some tasks print without ending the line
print(json.dumps(found))
"""


def source(dataset: str, split: Any = "train", seed: int = 0, **settings: Any) -> ReasoningGym:
    made = Config.model_validate(
        {
            "model": {"path": str(CHAT)},
            "run": {"seed": seed},
            "rollout": {"max_prompt_tokens": 100_000},
            "data": {
                "source": {"name": "reasoning_gym", "dataset": dataset, "settings": settings},
                "chat_template": True,
            },
        }
    )
    found = make_source(made, AutoTokenizer.from_pretrained(CHAT), split)
    assert isinstance(found, ReasoningGym)
    return found


@pytest.mark.parametrize("dataset", sorted(set(gym.factory.DATASETS) - LEFT_OUT))
def test_a_task_is_scored_by_its_own_scorer(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts as records that JSON holds, scored where nothing of the source is left."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # in one process, any seed will do
    for prompt in source(dataset).take(2):
        columns = json.loads(json.dumps(prompt.columns))
        made_from = columns[COLUMN]
        task = gym.create_dataset(dataset, seed=made_from["seed"], size=CHUNK)
        entry = task[made_from["at"]]
        assert prompt.text == entry["question"]
        make_entry.cache_clear()
        for said in (entry["answer"], "nonsense", ""):
            text = "" if said is None else str(said)
            response = f"<think>first</think><answer>0</answer> so <answer>\n{text} </answer>"
            try:
                wanted = float(task.score_answer(text.strip(), entry))
            except ValueError:  # an answer that the scorer cannot read
                wanted = 0.0
            assert verify(response, prompt.answer, columns=columns) == wanted
            assert verify(f" {text} ", "", columns=columns, tag=None) == wanted
        untagged = float(task.score_answer(None, entry))
        assert verify(str(entry["answer"]), prompt.answer, columns=columns) == untagged


def test_processes_make_the_same_questions_except_of_tasks_that_need_a_hash_seed() -> None:
    every = set(gym.factory.DATASETS) - LEFT_OUT
    made = [
        subprocess.Popen(
            [sys.executable, "-c", DIGESTS, *datasets],
            env=environment() | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed, datasets in (("1", every), ("2", every), ("2", HASHED))
    ]
    first, other, again = (json.loads(each.communicate()[0].splitlines()[-1]) for each in made)
    assert {dataset for dataset in every if first[dataset] != other[dataset]} == HASHED
    assert again == {dataset: other[dataset] for dataset in HASHED}


def test_a_stream_goes_on_where_it_was_saved_and_splits_differ() -> None:
    whole = source("chain_sum").take(6)
    first = source("chain_sum")
    first.take(4)
    rest = source("chain_sum")
    rest.restore(first.state())
    assert [p.text for p in rest.take(2)] == [p.text for p in whole[4:]]
    texts = [
        {p.text for p in each.take(6)}
        for each in (source("chain_sum", "eval"), source("chain_sum", seed=1))
    ]
    assert not texts[0] & texts[1] and not {p.text for p in whole} & (texts[0] | texts[1])
    evaluation = source("chain_sum", "eval", seed=1).take(6)
    assert {p.text for p in evaluation} == texts[0]  # the same for every seed of the run


def test_another_question_is_not_scored() -> None:
    (prompt,) = source("chain_sum").take(1)
    changed = {COLUMN: {**dict(prompt.columns or {})[COLUMN], "at": 1}}
    with pytest.raises(ValueError, match="another question"):
        verify("<answer>1</answer>", "", columns=changed)
    with pytest.raises(ValueError, match="not of the source"):
        verify("<answer>1</answer>", "", columns={})


@pytest.mark.parametrize(
    ("dataset", "settings", "message"),
    [
        ("no_such", {}, "no task 'no_such'"),
        ("chain_sum", {"min_terms": 0}, "refuses its settings"),
        ("chain_sum", {"colour": "red"}, "refuses its settings"),
    ],
)
def test_what_the_package_refuses_is_said(
    dataset: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        source(dataset, **settings)


@pytest.mark.distributed
@pytest.mark.parametrize("dataset", others_environments.GYM)
def test_a_run_trains_on_a_task(dataset: str, tmp_path: Path) -> None:
    """20 steps; the rewards are those of the package's own scorer, computed again."""
    found = others_environments.train(dataset, tmp_path, tmp_path / dataset)
    assert all(others_environments.asked(found).values()), found
