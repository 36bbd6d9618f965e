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
from megatron_stare.errors import DataError

if TYPE_CHECKING:
    from megatron_stare.config.schema import Config
    from megatron_stare.records.batch import Prompt

# number of problems in a row that may be too long
_TRIED = 1_000


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
    """A PromptSource of generated problems. A subclass generates the problems in its method
    `problem`. With `rollout.truncate_prompt: drop`, the source skips problems whose prompts are too
    long.

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
        self._skipped = 0  # problems before the cursor's problem that were too long
        self._drops = config.rollout.truncate_prompt == "drop"
        self.problems = self.counts[split]
        self._encode = PromptEncoder(config, tokenizer)
        self._fitting(0, 0)  # fails before the run if the limit is too low

    @abstractmethod
    def problem(self, index: int) -> Problem:
        """Returns the problem at position `index` of the stream. Each pair of seed and split has
        its own stream."""

    def take(self, n: int) -> list[Prompt]:
        """Returns the next `n` prompts. With `rollout.truncate_prompt: error`, raises DataError if
        a prompt is longer than `rollout.max_prompt_tokens`. With `rollout.truncate_prompt: drop`,
        raises DataError if the source finds no further problem whose prompt is short enough."""
        from megatron_stare.records.batch import Prompt  # imports torch

        prompts, skipped = [], self._skipped
        for cursor in range(self._cursor, self._cursor + n):
            problem, token_ids, skipped = self._fitting(cursor, skipped)
            prompt = Prompt(
                cursor=cursor,
                id=f"{self._split}-{cursor}",
                text=problem.text,
                answer=problem.answer,
                token_ids=token_ids,
                problem=problem.name,
                columns=getattr(problem, "columns", None),
            )
            prompts.append(prompt)
        self._cursor, self._skipped = self._cursor + n, skipped
        return prompts

    def _fitting(self, cursor: int, skipped: int) -> tuple[Problem, tuple[int, ...], int]:
        """Finds the problem of the prompt at position `cursor`. Returns the problem, its token ids
        and the number of problems skipped so far.

        Args:
            skipped: number of problems skipped before the previous prompt.
        """
        from megatron_stare.data.encode import PromptTooLongError  # imports the configuration

        for index in range(cursor + skipped, cursor + skipped + _TRIED):
            if self._split == "eval" and index > cursor and index == self.problems:
                # later problems repeat earlier ones, or belong to training
                raise DataError(
                    f"only {cursor} of the {index} problems fit into rollout.max_prompt_tokens",
                    where="eval.prompts",
                    fix="ask for no more problems than fit, or raise rollout.max_prompt_tokens",
                )
            problem = self.problem(index)
            try:
                token_ids = self._encode(problem.text, f"{self._split} problem {index}")
            except PromptTooLongError as error:
                if self._drops:
                    continue
                if self._split == "train" and index:  # the run has begun
                    error.fix = (
                        "start a new run with a higher rollout.max_prompt_tokens, or with"
                        " rollout.truncate_prompt=drop or left: a resume cannot change them"
                    )
                raise
            return problem, token_ids, index - cursor
        raise DataError(
            f"{_TRIED:,} problems in a row are longer than rollout.max_prompt_tokens",
            where=f"{self._split} problem {cursor + skipped}",
            fix="raise rollout.max_prompt_tokens",
        )

    def state(self) -> dict[str, int]:
        """Returns the number of prompts taken since the run began. If problems were skipped, the
        state also contains their number."""
        state = {"cursor": self._cursor}
        return state | {"skipped": self._skipped} if self._skipped else state

    def restore(self, state: dict[str, int]) -> None:
        """Continues after prompt `state["cursor"]`."""
        self._cursor, self._skipped = state["cursor"], state.get("skipped", 0)
