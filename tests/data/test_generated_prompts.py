"""Sources that generate their problems: problems that are too long, and questions of reasoning-gym
that another process must make alike."""

from __future__ import annotations

import json
import random
from typing import ClassVar

import pytest
from support.char_tokenizer import char_tokenizer

from megatron_stare.config.load import validate
from megatron_stare.data import reasoning_gym
from megatron_stare.data.generated import GeneratedPrompts, TaskProblem
from megatron_stare.data.prompt_source import PromptQueue, held_out, make_source
from megatron_stare.data.streams import counter_hash
from megatron_stare.errors import ConfigError, DataError

TOKENIZER = char_tokenizer()


class Lengths(GeneratedPrompts):
    """Problem `index` has the text f"{index}=" and then 1, 5 or 9 characters. Two problems in three
    have at most 9 characters."""

    counts: ClassVar = {"train": None, "eval": 30}
    first = 1

    def problem(self, index):
        more = self.first if index == 0 else 1 + counter_hash(index) % 3 * 4
        return TaskProblem(f"{index}={'x' * more}", str(index), str(index), {})


class Long(Lengths):
    first = 9


def config(truncate, name="Lengths", limit=9):
    rollout = {"max_prompt_tokens": limit, "truncate_prompt": truncate}
    data = {"source": f"{__name__}.{name}"}
    return validate({"model": {"path": "."}, "data": data, "rollout": rollout}, "test")


def source(truncate, split="train", **more):
    return make_source(config(truncate, **more), TOKENIZER, split)


def fitting(end, source):
    return [
        index
        for index in range(end)
        if len(TOKENIZER(source.problem(index).text, add_special_tokens=False).input_ids) <= 9
    ]


@pytest.mark.parametrize("name", ["Lengths", "Long"])
def test_problems_that_are_too_long_are_skipped_where_asked(name):
    prompts = source("drop", name=name).take(40)
    assert [prompt.cursor for prompt in prompts] == list(range(40))
    wanted = fitting(200, source("drop", name=name))[:40]
    assert [prompt.answer for prompt in prompts] == list(map(str, wanted))
    assert wanted[-1] > 50  # many were skipped
    assert max(len(prompt.token_ids) for prompt in prompts) <= 9


@pytest.mark.parametrize("taken", [0, 1, 2, 17, 33])
def test_a_stream_that_skipped_problems_resumes_exactly(taken):
    whole = source("drop").take(40)
    queue = PromptQueue(source("drop"))
    assert queue.take(taken + 5) == whole[: taken + 5]
    queue.give_back(5)
    resumed = source("drop")
    resumed.restore(json.loads(json.dumps(queue.state())))
    assert resumed.take(40 - taken) == whole[taken:]


def test_states_without_skipped_problems_are_those_of_earlier_releases():
    every = source("left")
    before = every.take(3)
    assert every.state() == {"cursor": 3}
    assert [prompt.answer for prompt in before + every.take(1)] == ["0", "1", "2", "3"]


def test_a_problem_that_is_too_long_ends_the_run_otherwise():
    """The first one before the run, with settings to change; a later one with what can be done
    then: a resume refuses other settings."""
    with pytest.raises(DataError, match="11 tokens") as error:
        source("error", name="Long")
    assert str(error.value.fix).startswith("set rollout.max_prompt_tokens to at least 11")
    begun = source("error")
    long = min(set(range(200)) - set(fitting(200, begun)))
    assert [prompt.answer for prompt in begun.take(long)] == list(map(str, range(long)))
    with pytest.raises(DataError, match="tokens, the limit") as error:
        begun.take(1)
    assert error.value.where == f"train problem {long}"
    assert "start a new run with a higher rollout.max_prompt_tokens" in str(error.value.fix)
    assert begun.state() == {"cursor": long}


def test_nothing_but_long_problems_is_refused_before_the_run():
    with pytest.raises(DataError, match="1,000 problems in a row are longer") as error:
        source("drop", limit=2)
    assert error.value.where == "train problem 0"


def test_an_evaluation_asks_no_problem_twice_in_place_of_a_long_one():
    fit = fitting(30, source("drop", "eval"))
    found = held_out(config("drop"), TOKENIZER, len(fit))
    assert [prompt.answer for prompt in found] == list(map(str, fit))
    for wanted in (len(fit) + 1, None):
        with pytest.raises(DataError, match=f"only {len(fit)} of the 30 problems fit") as error:
            held_out(config("drop"), TOKENIZER, wanted)
        assert error.value.where == "eval.prompts"


class Question:
    """A task of reasoning-gym whose questions depend on Python's global generator."""

    def __getitem__(self, at):
        return {"question": f"{at}+{random.randrange(10**9)}=", "answer": "1"}


@pytest.fixture
def gym(monkeypatch):
    monkeypatch.setattr(reasoning_gym, "_make_task", lambda *_: Question())
    reasoning_gym.make_entry.cache_clear()
    yield
    reasoning_gym.make_entry.cache_clear()


def questions(dataset):
    data = {"source": {"name": "reasoning_gym", "dataset": dataset}}
    made = make_source(validate({"model": {"path": "."}, "data": data}, "test"), TOKENIZER, "train")
    return [prompt.text for prompt in made.take(3)]


@pytest.mark.parametrize("seed", [None, "", "random"])
def test_questions_that_depend_on_a_random_hash_seed_are_refused(gym, monkeypatch, seed):
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    for dataset in reasoning_gym.HASHED:
        with pytest.raises(ConfigError, match="depend on Python's hash seed") as error:
            questions(dataset)
        assert error.value.where == "data.source.dataset"
        assert "export PYTHONHASHSEED=0" in str(error.value.fix)
    assert len(questions("chain_sum")) == 3
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert all(len(questions(dataset)) == 3 for dataset in reasoning_gym.HASHED)


def test_questions_do_not_depend_on_the_global_generator(gym):
    random.seed(1)
    first = questions("list_functions")
    drawn = random.random()
    reasoning_gym.make_entry.cache_clear()
    random.seed(1)
    assert random.random() == drawn  # making questions drew nothing
    assert questions("list_functions") == first
    assert len({text.split("+")[1] for text in first}) == 3


def test_another_question_than_the_prompts_says_what_to_make_equal(gym):
    made_from = {"dataset": "chain_sum", "settings": "{}", "seed": 0, "at": 0, "question": "other"}
    with pytest.raises(
        ValueError, match="one release of reasoning-gym and one value of PYTHONHASHSEED"
    ):
        reasoning_gym.verify("", "", columns={reasoning_gym.COLUMN: made_from})


def test_the_short_form_names_the_task_of_reasoning_gym():
    long = {"name": "reasoning_gym", "dataset": "chain_sum"}
    tree = {"model": {"path": "."}}
    one = validate({**tree, "data": {"source": "reasoning_gym:chain_sum"}}, "test")
    assert one == validate({**tree, "data": {"source": long}}, "test")
    assert one.data.source.written() == long
    with_settings = {"name": "reasoning_gym:chain_sum", "settings": {"max_terms": 3}}
    tasks = [{"name": "sums", "source": with_settings}]
    (task,) = validate({**tree, "eval": {"tasks": tasks}}, "test").eval.tasks
    assert task.source is not None and task.source.written() == {**long, **with_settings, **long}
    twice = {"name": "reasoning_gym:chain_sum", "dataset": "dice"}
    with pytest.raises(ConfigError, match="gives dataset twice, as 'chain_sum' and as 'dice'"):
        validate({**tree, "data": {"source": twice}}, "test")
