"""Uses the questions of `reasoning-gym` tasks as prompts, and the tasks' own scorers as a verifier.

Each question is generated from a seed and an index. The verifier generates the question a second
time to score a response. This module also runs in reward workers, so it imports torch and
reasoning-gym only when they are needed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from megatron_stare.data.generated import GeneratedPrompts, TaskProblem
from megatron_stare.data.streams import Split, counter_hash
from megatron_stare.errors import ConfigError, DataError

COLUMN = "reasoning_gym"  # of a prompt: what its question is made again from
CHUNK = 500  # questions of one seed; some tasks cannot make many more
WHERE = "data.source"
HASHED = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note"})
"""Tasks whose questions depend on the seed of Python's string hashes, because they draw from
sets."""


class ReasoningGym(GeneratedPrompts):
    """A PromptSource of one task of the package `reasoning-gym`. A task never runs out of
    questions. The source has two settings.

    `dataset`: the name of the task, such as `chain_sum`.
    `settings`: the options of the task, such as `{min_terms: 2, max_terms: 3}`.

    Raises:
        ConfigError: the package is not installed, does not have the task, or rejects the settings.
            Also raised for a task of HASHED if Python chooses the seed of its hashes at random.
    """

    counts: ClassVar[Mapping[Split, int | None]] = {"train": None, "eval": None}

    def __init__(
        self,
        config: Any,  # a Config, whose import would bring torch into reward workers
        tokenizer: Any,
        split: Split,
        *,
        dataset: str,
        settings: dict[str, Any] | None = None,
    ) -> None:
        # an empty value means random, too
        if dataset in HASHED and (os.environ.get("PYTHONHASHSEED") or "random") == "random":
            raise ConfigError(
                f"the questions of {dataset!r} depend on Python's hash seed, which is random here:"
                " verifiers and resumed runs would make other questions",
                where=f"{WHERE}.dataset",
                fix="export PYTHONHASHSEED=0 before the run and before every resume",
            )
        self._dataset, self._settings = dataset, json.dumps(settings or {}, sort_keys=True)
        super().__init__(config, tokenizer, split)

    def problem(self, index: int) -> TaskProblem:
        chunk, at = divmod(index, CHUNK)
        seed = counter_hash(self._seed, chunk) % 2**31
        entry = make_entry(self._dataset, self._settings, seed, at)[1]
        made_from = {"dataset": self._dataset, "settings": self._settings, "seed": seed, "at": at}
        made_from["question"] = _digest(entry["question"])
        answer = "" if entry["answer"] is None else str(entry["answer"])
        return TaskProblem(entry["question"], answer, entry["question"], {COLUMN: made_from})


def verify(
    response: str, answer: str, *, columns: Mapping[str, Any], tag: str | None = "answer"
) -> float:
    """Scores a response with the task's own scorer. Returns the score, from 0 to 1, or 0 if the
    scorer raises an error.

    Args:
        answer: unused, because the scorer generates the question and its answer again.
        columns: the columns of a prompt that ReasoningGym made.
        tag: the answer is the text in the last `<tag>` ... `</tag>` of the response. A response
            without this tag has no answer. null: the answer is the whole response, stripped.

    Raises:
        ValueError: ReasoningGym did not make the prompt, or the package generates a different
            question in this process.
    """
    made_from = columns.get(COLUMN)
    if made_from is None:
        raise ValueError("the prompt is not of the source reasoning_gym")
    task, entry = make_entry(*(made_from[key] for key in ("dataset", "settings", "seed", "at")))
    if _digest(entry["question"]) != made_from["question"]:
        raise ValueError(
            f"the package makes another question {made_from['at']} of {made_from['dataset']} here"
            " than where the prompt was made: use one release of reasoning-gym and one value of"
            " PYTHONHASHSEED everywhere"
        )
    said: str | None = response.strip()
    if tag is not None:
        found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", response, re.DOTALL)
        said = found[-1].strip() if found else None
    try:
        return float(task.score_answer(said, entry))
    except Exception:  # some scorers fail on what they cannot read
        return 0.0


def self_test() -> list[str]:
    """Tests whether the package reasoning-gym scores answers correctly. The test scores a right
    answer and a missing answer to the same question. Returns a list with one message if a score is
    wrong, and otherwise an empty list. The test imports reasoning-gym before the run starts, so the
    first response of the run does not wait for this import. Raises ConfigError if the package is
    not installed."""
    task, entry = make_entry("chain_sum", "{}", 0, 0)
    scores = [task.score_answer(answer, entry) for answer in (entry["answer"], None)]
    return [] if scores == [1.0, 0.0] else [f"reasoning-gym scores a known question {scores}"]


@functools.lru_cache(maxsize=256)  # a prompt has many responses
def make_entry(dataset: str, settings: str, seed: int, at: int) -> tuple[Any, dict[str, Any]]:
    """Returns a pair: the task, and the task's entry at index `at`. An entry consists of a
    question, its answer and metadata.

    Args:
        settings: settings of the task, as JSON.

    Raises:
        ConfigError: as ReasoningGym.
        DataError: the task cannot make the question.
    """
    task = _make_task(dataset, settings, seed)
    state = random.getstate()
    random.seed(counter_hash(seed, at))  # list_functions also draws from the global generator
    try:
        return task, task[at]
    except Exception as error:
        raise DataError(
            f"reasoning-gym cannot make question {at} of {dataset!r}: {error}", where=WHERE
        ) from error
    finally:
        random.setstate(state)


@functools.lru_cache(maxsize=16)
def _make_task(dataset: str, settings: str, seed: int) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigError(
            f"the package reasoning-gym is not installed: {error}",
            where=WHERE,
            fix='pip install "megatron-stare[tools]"',
        ) from error
    if dataset not in DATASETS:
        raise ConfigError(
            f"reasoning-gym has no task {dataset!r}",
            where=f"{WHERE}.dataset",
            fix=f"one of {', '.join(sorted(DATASETS))}",
        )
    try:
        return create_dataset(dataset, seed=seed, size=CHUNK, **json.loads(settings))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"the task {dataset!r} refuses its settings: {error}", where=f"{WHERE}.settings"
        ) from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
