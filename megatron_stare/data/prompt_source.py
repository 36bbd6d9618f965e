"""Defines the protocol of all prompt sources, finds the source that a configuration names, and
provides a queue over a source.

In every step the driver takes the prompts of the step's batch from the queue. Every checkpoint
contains the queue's `state()`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from megatron_stare.config.schema import Config
from megatron_stare.data.streams import Split
from megatron_stare.errors import ConfigError
from megatron_stare.records.batch import Prompt
from megatron_stare.registry import resolve, settings_of

WHERE = "data.source"
SOURCES = {
    "files": "megatron_stare.data.file_prompts.FilePrompts",
    # an earlier name, from when it read only JSON Lines
    "jsonl": "megatron_stare.data.file_prompts.FilePrompts",
    "arithmetic": "megatron_stare.data.arithmetic.ArithmeticPrompts",
    "signs": "megatron_stare.data.signs.SignsPrompts",
    "reasoning_gym": "megatron_stare.data.reasoning_gym.ReasoningGym",
    "messages": "megatron_stare.data.messages.Conversations",
    "verifiers": "megatron_stare.data.verifiers_tasks.VerifiersTasks",
}


class PromptSource(Protocol):
    """An endless, resumable stream of prompts.

    A user-defined class is called as `cls(config, tokenizer, split)`, with its settings as keyword
    arguments. A source that omits records can report the number of omitted records in an attribute
    `dropped`.
    """

    problems: int | None
    """Number of different problems in the split. An evaluation cannot use more problems. None means
    that the problems are endless."""

    def take(self, n: int) -> list[Prompt]:
        """Returns the next `n` prompts, tokenized. `Prompt.cursor` starts at 0, increases by one
        per prompt, and never repeats."""
        ...

    def state(self) -> dict[str, int]:
        """Returns the state that `restore` needs to continue after the last prompt taken."""
        ...

    def restore(self, state: dict[str, int]) -> None:
        """Continues after the last prompt that was taken before `state` was saved. Raises DataError
        if the prompts have changed since `state` was saved."""
        ...


def make_source(config: Config, tokenizer: Any, split: Split) -> PromptSource:
    """Builds the source that `data.source` names. The new source starts at its first prompt.

    Args:
        config: the run's configuration. `run.seed` determines the order of the training split. The
            evaluation split does not depend on the seed.
        tokenizer: a transformers tokenizer.
        split: 'train' or 'eval'. Two sources of the 'eval' split yield the same problems in the
            same order.

    Raises:
        ConfigError: the source does not exist, or a setting is missing.
        DataError: prompts are missing, malformed or too long.
    """
    factory, settings = find_source(config)
    return factory(config, tokenizer, split, **settings)


def find_source(config: Config) -> tuple[Callable[..., PromptSource], dict[str, Any]]:
    """Returns a pair (factory, settings). The factory is the class or function that builds the
    configured source (`data.source`). `settings` contains the keyword arguments with which the
    factory must be called, as a dict. Raises ConfigError like `make_source`."""
    source = config.data.source
    factory = resolve(source.name, SOURCES, WHERE)
    if not callable(factory):
        raise ConfigError(f"{source.name!r} is not a class", where=WHERE)
    return factory, settings_of(source, factory, WHERE)


def first_prompt(source: PromptSource) -> Prompt:
    """Returns the next prompt of a source. After the call, the source yields this prompt again."""
    before = dict(source.state())
    (prompt,) = source.take(1)
    source.restore(before)
    return prompt


def dropped(source: PromptSource) -> Mapping[str, int]:
    """Returns a source's attribute `dropped`, or an empty mapping if the source has no such
    attribute. `dropped` maps each reason to the number of records that the source omitted for this
    reason."""
    found: Mapping[str, int] = getattr(source, "dropped", {})
    return found


def told(source: PromptSource) -> list[str]:
    """Returns lines about a source's data for the user: what the source omitted, and the source's
    attribute `remarks`."""
    rows = "rows" if getattr(source, "demonstrates", False) else "prompts"
    left_out = [f"{n} {rows} left out: {why}" for why, n in dropped(source).items()]
    return [*left_out, *getattr(source, "remarks", ())]


class HeldOut(list[Prompt]):
    """List of held-out problems. Every evaluation of a run uses the same held-out problems. `told`:
    see the function `told`."""

    told: Sequence[str] = ()


def held_out(config: Config, tokenizer: Any, wanted: int | None) -> HeldOut:
    """Returns the held-out problems of a run. Every evaluation of the run uses the same held-out
    problems.

    Args:
        wanted: number of problems, at least 1. None requests all problems.

    Raises:
        ConfigError: the source has fewer different problems than `wanted`, or does not report its
            number of problems.
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
    found = HeldOut(source.take(wanted or most or 0))
    found.told = told(source)
    return found


class PromptQueue:
    """Queue that yields each prompt of a source once, in the source's order. A call of `give_back`
    puts prompts back into the queue, and the next `take` yields these prompts first. The queue
    skips the prompts that `leave_out` marked.

    While the queue holds prompts that `give_back` has put back, the state of the queue is the state
    that the source had just before the source yielded the first of these prompts. After a `restore`
    of this state, the source yields these prompts again. The state therefore does not need to
    contain the prompts themselves. If the queue holds no such prompts, the state of the queue is
    the current state of the source.
    """

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        # prompts of the last `take`, each with the source's state before it
        self._last: list[tuple[dict[str, int], Prompt]] = []
        self._back: deque[tuple[dict[str, int], Prompt]] = deque()
        self._left_out: frozenset[int] = frozenset()

    @property
    def problems(self) -> int | None:
        return self._source.problems

    def take(self, n: int) -> list[Prompt]:
        """Returns the next `n` prompts."""
        self._last = [self._next() for _ in range(n)]
        return [prompt for _, prompt in self._last]

    def give_back(self, n: int) -> None:
        """Puts the last `n` prompts of the most recent `take` back at the front of the queue.
        Raises ValueError if the most recent `take` returned fewer than `n` prompts."""
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
        """Makes the queue skip all prompts whose cursors are in `cursors`, even prompts that were
        given back. After a `restore`, the queue still skips the prompts of `cursors`."""
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
