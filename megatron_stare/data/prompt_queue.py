"""A prompt source whose last prompts may be given back, to be taken again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from megatron_stare.data.prompt_source import PromptSource
from megatron_stare.records.batch import Prompt


class PromptQueue:
    """Prompts of a source in its order, each used once: one that was given back is the next to be taken. Some may be
    left out: they are passed over when their turn comes.

    Its state is the source's before the first prompt that is not used yet, so that what waits here need not be saved.
    """

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        self._last: list[tuple[dict[str, int], Prompt]] = []  # of the last call of `take`: the state before, the prompt
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
        """The last `n` prompts of the last `take` were not used. Raises ValueError where it gave fewer."""
        if n > len(self._last):
            raise ValueError(f"{n} prompts cannot be given back of {len(self._last)} that were taken")
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
