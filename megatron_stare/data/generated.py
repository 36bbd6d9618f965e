"""Prompts of a task whose problems are generated, never stored: problem i of a stream is a pure
function of (seed, split, i).

A task gives its problems; here they become prompts with a cursor. Free of torch until the first
prompt is taken, so that tools stay light.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
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
        """Answer that the verifier is given."""
        ...

    @property
    def name(self) -> str:
        """Name that all ways to put the same problem share."""
        ...


class GeneratedPrompts(ABC):
    """A PromptSource of generated problems; a task's own class says which.

    Args:
        config: of the run.
        tokenizer: a transformers tokenizer.
        split: 'train' depends on `run.seed`; 'eval' is the same for every run.

    Raises:
        ConfigError: a chat template is asked for and the tokenizer has none.
        DataError: the prompts are longer than `rollout.max_prompt_tokens`.
    """

    counts: ClassVar[Mapping[Split, int]]
    """Different problems of each split."""

    def __init__(self, config: Config, tokenizer: Any, split: Split) -> None:
        # imported here: it reads the configuration, which the tasks do not
        from megatron_stare.data.encode import PromptEncoder

        self._split = split
        self._seed = stream_seed(config.run.seed, split)
        self._cursor = 0
        self.problems = self.counts[split]
        self._encode = PromptEncoder(config, tokenizer)
        # a limit that is too low fails before the run
        self._encode(self.problem(0).text, f"{split} problem 0")

    @abstractmethod
    def problem(self, index: int) -> Problem:
        """Problem number `index` of the stream of this seed and split."""

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts."""
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
            )
            prompts.append(prompt)
        self._cursor += n
        return prompts

    def state(self) -> dict[str, int]:
        """Prompts taken since the run began."""
        return {"cursor": self._cursor}

    def restore(self, state: dict[str, int]) -> None:
        """Goes on after prompt `state["cursor"]`."""
        self._cursor = state["cursor"]
