"""Replicas without a runner, and prompts of a list."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from megatron_stare.process.workers import Workers
from megatron_stare.records.batch import Prompt
from megatron_stare.rewards.verifier_pool import Verdict
from megatron_stare.rollout.engines.engine import LostRequest
from megatron_stare.rollout.engines.model_folder import add_text, load_tokenizer

TOKENIZER = load_tokenizer(str(Path(__file__).parents[2] / "assets" / "tiny-adder"))


class Replicas(Workers):
    """Engines of this process. The calls under way are answered in an order drawn from a seed, not
    in that in which they were made: what a run samples must not hang on which replica is faster."""

    def __init__(self, engines: Sequence[Any], seed: int | None = None) -> None:
        self.engines = list(engines)
        # by engine and call, the requests
        self.given: list[list[list[str]]] = [[] for _ in engines]
        self.aborted = 0
        self._order = random.Random(seed) if seed is not None else None

    def __len__(self) -> int:
        return len(self.engines)

    def start_on(self, worker: int, method: str, *args: Any) -> Any:
        engine = self.engines[worker]
        if method == "bring_up":
            return engine.model_info()
        if method == "abort":
            self.aborted += 1
            return engine.abort()
        assert method == "advance"
        requests, params, wait_s = args
        if requests:
            self.given[worker].append([r.rid for r in requests])
            engine.submit(requests, params)
        done = engine.collect(wait_s)
        for result in done:
            if not isinstance(result, LostRequest):
                add_text(result, TOKENIZER)
        return done

    def wait(self, handles: Sequence[Any], on_done: Any = None) -> list[Any]:
        return list(handles)

    async def result(self, handle: Any) -> Any:
        for _ in range(1 + (self._order.randrange(50) if self._order else 0)):
            await asyncio.sleep(0)
        return handle

    def share(self, value: Any) -> Any:
        return value

    def close(self) -> None: ...


class Judge:
    """Finds every answer right."""

    judges_groups = False

    async def of(self, response: str, answer: str, *_: object) -> Verdict:
        return Verdict(1.0, "ok", answer_at=0)


@contextlib.asynccontextmanager
async def judged(answers: int) -> AsyncIterator[Judge]:
    """A verifier for a number of answers."""
    yield Judge()


class Stream:
    """Prompts of a list."""

    def __init__(self, left: list[Prompt]) -> None:
        self.left = left

    def take(self, n: int) -> list[Prompt]:
        taken, self.left = self.left[:n], self.left[n:]
        return taken


class Numbered:
    """Prompts without end; each one's answer is its cursor."""

    problems = None

    def __init__(self) -> None:
        self.cursor = 0

    def take(self, n: int) -> list[Prompt]:
        first, self.cursor = self.cursor, self.cursor + n
        return [Prompt(i, str(i), "", str(i), (7, 8)) for i in range(first, first + n)]

    def state(self) -> dict[str, int]:
        return {"cursor": self.cursor}

    def restore(self, state: dict[str, int]) -> None:
        self.cursor = state["cursor"]
