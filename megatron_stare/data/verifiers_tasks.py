"""Makes prompts from the tasks that an environment of the library `verifiers` provides."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from typing import Any, ClassVar

from megatron_stare.config.schema import Config
from megatron_stare.data.generated import GeneratedPrompts, TaskProblem
from megatron_stare.data.streams import Split, counter_hash
from megatron_stare.environments.verifiers_library import COLUMN, EVALUATED, opened_by


class VerifiersTasks(GeneratedPrompts):
    """A PromptSource of the tasks in a taskset. `rollout.environment` names the taskset.

    From a finite taskset, training takes every task once per epoch, in a new random order in each
    epoch. From a finite taskset, evaluations take the tasks in the taskset's order. In an endless
    taskset, the first `EVALUATED` tasks are reserved for evaluations. With an endless taskset,
    training skips the tasks that are reserved for evaluations, and takes every later task exactly
    once, in the taskset's order.

    The text of a prompt is for display only, because the environment renders the conversation
    itself.

    Raises:
        ConfigError: the run's environment is not `verifiers`, or cannot be made.
    """

    counts: ClassVar[Mapping[Split, int | None]] = {"train": None, "eval": None}

    def __init__(self, config: Config, tokenizer: Any, split: Split) -> None:
        self._library = opened_by(config)
        self.counts = {  # type: ignore[misc]  # of this taskset
            "train": self._library.tasks,
            "eval": self._library.tasks or EVALUATED,
        }
        super().__init__(config, tokenizer, split)

    def problem(self, index: int) -> TaskProblem:
        at = self._at(index)
        task = self._library.task(at)
        text = task.data.prompt_text or task.data.description or task.data.name or f"task {at}"
        return TaskProblem(text, "", task.key, {COLUMN: {"at": at, "key": task.key}})

    def _at(self, index: int) -> int:
        """Returns the index, in the taskset, of the task at position `index` of the prompt
        stream."""
        tasks = self._library.tasks
        if tasks is None:
            return index + (EVALUATED if self._split == "train" else 0)
        epoch, place = divmod(index, tasks)
        return place if self._split == "eval" else _order(self._seed, epoch, tasks)[place]


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, tasks: int) -> list[int]:
    order = list(range(tasks))
    random.Random(counter_hash(seed, epoch)).shuffle(order)
    return order
