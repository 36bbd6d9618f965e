"""Prompts of a task that generates its problems and stores none. Problem number i of a stream
depends only on i, the seed and the split.

The task supplies the problems. This module turns each problem into a prompt with token ids and a
cursor. The module imports torch only when the first prompt is taken, so importing the module itself
is fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from megatron_stare.data.streams import Split, stream_seed

if TYPE_CHECKING:
    from megatron_stare.config.schema import Config
    from megatron_stare.records.batch import Prompt


class Problem(Protocol):
    """A problem of a task."""

    @property
    def text(self) -> str:
        """The prompt."""
        ...

    @property
    def answer(self) -> str:
        """Answer for the verifier."""
        ...

    @property
    def name(self) -> str:
        """Name of the problem. Different wordings of the same problem have the same name."""
        ...


@dataclass(frozen=True)
class TaskProblem:
    """A Problem that a library generates. `columns` contains the values with which the library
    finds or generates the same problem again."""

    text: str
    answer: str
    name: str
    columns: Mapping[str, Any]


class GeneratedPrompts(ABC):
    """A PromptSource of generated problems. A task defines its problems in a subclass.

    Args:
        config: the run's configuration.
        tokenizer: a transformers tokenizer.
        split: 'train' depends on `run.seed`; 'eval' is the same for every run.

    Raises:
        ConfigError: the configuration requests a chat template, but the tokenizer has no chat
            template.
        DataError: the prompts are longer than `rollout.max_prompt_tokens`.
    """

    counts: ClassVar[Mapping[Split, int | None]]
    """Number of different problems in each split. None means that the problems are endless."""

    def __init__(self, config: Config, tokenizer: Any, split: Split) -> None:
        # imported here, because it imports the configuration, which the tasks do not need
        from megatron_stare.data.encode import PromptEncoder

        self._split = split
        self._seed = stream_seed(config.run.seed, split)
        self._cursor = 0
        self.problems = self.counts[split]
        self._encode = PromptEncoder(config, tokenizer)
        # fails before the run if the limit is too low
        self._encode(self.problem(0).text, f"{split} problem 0")

    @abstractmethod
    def problem(self, index: int) -> Problem:
        """Returns the problem at position `index` of the stream. Each pair of seed and split has
        its own stream."""

    def take(self, n: int) -> list[Prompt]:
        """Returns the next `n` prompts."""
        from megatron_stare.records.batch import Prompt  # imports torch

        prompts = []
        for cursor in range(self._cursor, self._cursor + n):
            problem = self.problem(cursor)
            prompt = Prompt(
                cursor=cursor,
                id=f"{self._split}-{cursor}",
                text=problem.text,
                answer=problem.answer,
                token_ids=self._encode(problem.text, f"{self._split} problem {cursor}"),
                problem=problem.name,
                columns=getattr(problem, "columns", None),
            )
            prompts.append(prompt)
        self._cursor += n
        return prompts

    def state(self) -> dict[str, int]:
        """Returns the number of prompts taken since the run began."""
        return {"cursor": self._cursor}

    def restore(self, state: dict[str, int]) -> None:
        """Continues after prompt `state["cursor"]`."""
        self._cursor = state["cursor"]
