"""Sources of prompts: the protocol every source keeps, the one that a configuration names, and a
queue over it.

The driver takes prompts here, one batch of groups a step, and saves `state()` with every
checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from megatron_stare.config.schema import Config
from megatron_stare.data.streams import Split
from megatron_stare.errors import ConfigError
from megatron_stare.records.batch import Prompt
from megatron_stare.registry import resolve, settings_of

WHERE = "data.source"
SOURCES = {
    "files": "megatron_stare.data.file_prompts.FilePrompts",
    # its name while it read nothing but JSON Lines
    "jsonl": "megatron_stare.data.file_prompts.FilePrompts",
    "arithmetic": "megatron_stare.data.arithmetic.ArithmeticPrompts",
    "signs": "megatron_stare.data.signs.SignsPrompts",
}


class PromptSource(Protocol):
    """An endless, resumable stream of prompts.

    A class of the user's own is built as `cls(config, tokenizer, split)`, like ours, with its
    settings as keywords. One that leaves records out may say so: see `dropped`.
    """

    problems: int | None
    """Number of different problems in the split: an evaluation asks for no more. None: endless."""

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts, tokenized. `Prompt.cursor` goes up by one a prompt, from 0, and
        never repeats."""
        ...

    def state(self) -> dict[str, int]:
        """All that `restore` needs to go on with the prompt after the last one taken."""
        ...

    def restore(self, state: dict[str, int]) -> None:
        """Goes to where `state` was saved. Raises DataError where the prompts are no longer the
        same."""
        ...


def make_source(config: Config, tokenizer: Any, split: Split) -> PromptSource:
    """The source that `data.source` names, at its first prompt.

    Args:
        config: of the run; `run.seed` orders the training split, evaluation is the same for every
            seed.
        tokenizer: a transformers tokenizer.
        split: 'train' or 'eval'. Two sources of the 'eval' split yield the same problems in the
            same order.

    Raises:
        ConfigError: no such source, or one that lacks a setting.
        DataError: its prompts are missing, malformed or too long.
    """
    factory, settings = find_source(config)
    return factory(config, tokenizer, split, **settings)


def find_source(config: Config) -> tuple[Callable[..., PromptSource], dict[str, Any]]:
    """Finds what makes the source that `data.source` names, and its settings. Raises ConfigError as
    `make_source`."""
    source = config.data.source
    factory = resolve(source.name, SOURCES, WHERE)
    if not callable(factory):
        raise ConfigError(f"{source.name!r} is not a class", where=WHERE)
    return factory, settings_of(source, factory, WHERE)


def dropped(source: PromptSource) -> Mapping[str, int]:
    """The records that a source left out, by reason, as its attribute `dropped` says; without one,
    none."""
    found: Mapping[str, int] = getattr(source, "dropped", {})
    return found


def held_out(config: Config, tokenizer: Any, wanted: int | None) -> list[Prompt]:
    """The problems of every evaluation of a run.

    Args:
        wanted: how many, at least 1; None: all.

    Raises:
        ConfigError: the source does not have, or does not say whether it has, as many different
            ones.
        DataError: as in `make_source`.
    """
    source = make_source(config, tokenizer, "eval")
    if not hasattr(source, "problems"):
        raise ConfigError(
            f"{config.data.source.name!r} does not say how many different problems it has",
            where=WHERE,
            fix=(
                "give its objects an attribute `problems`: a number, or None if the problems are"
                " endless"
            ),
        )
    most: int | None = source.problems
    if wanted is None and most is None:
        raise ConfigError(
            f"the problems of {config.data.source.name!r} are endless, so an evaluation cannot ask"
            " all of them",
            where="eval.prompts",
            fix="give a number of problems",
        )
    if wanted is not None and most is not None and wanted > most:
        raise ConfigError(
            f"an evaluation of {wanted} problems would ask some twice: the source has {most}"
            " different ones",
            where="eval.prompts",
            fix=f"at most {most}",
        )
    return source.take(wanted or most or 0)


class PromptQueue:
    """Prompts of a source in its order, each used once: one that was given back is the next to be
    taken. Some may be left out: they are passed over when their turn comes.

    Its state is the source's before the first prompt that is not used yet, so that what waits here
    need not be saved.
    """

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        # prompts of the last call of `take`, each with the state before it
        self._last: list[tuple[dict[str, int], Prompt]] = []
        self._back: deque[tuple[dict[str, int], Prompt]] = deque()
        self._left_out: frozenset[int] = frozenset()

    @property
    def problems(self) -> int | None:
        return self._source.problems

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts."""
        self._last = [self._next() for _ in range(n)]
        return [prompt for _, prompt in self._last]

    def give_back(self, n: int) -> None:
        """The last `n` prompts of the last `take` were not used. Raises ValueError where it gave
        fewer."""
        if n > len(self._last):
            raise ValueError(
                f"{n} prompts cannot be given back of {len(self._last)} that were taken"
            )
        kept = len(self._last) - n
        self._back.extendleft(reversed(self._last[kept:]))
        del self._last[kept:]

    def state(self) -> dict[str, int]:
        """See PromptSource."""
        return self._back[0][0] if self._back else self._source.state()

    def restore(self, state: dict[str, int]) -> None:
        """See PromptSource."""
        self._source.restore(state)
        self._last.clear()
        self._back.clear()

    def leave_out(self, cursors: Iterable[int]) -> None:
        """Leaves out prompts of these cursors, given back ones too, before and after a restore."""
        self._left_out |= frozenset(cursors)

    def _next(self) -> tuple[dict[str, int], Prompt]:
        while True:
            before, prompt = self._back.popleft() if self._back else self._new()
            if prompt.cursor not in self._left_out:
                return before, prompt

    def _new(self) -> tuple[dict[str, int], Prompt]:
        before = dict(self._source.state())
        (prompt,) = self._source.take(1)
        return before, prompt
