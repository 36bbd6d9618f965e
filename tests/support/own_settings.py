"""A user's verifier, environment, sink, source and engine, each with settings of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from megatron_stare.config.schema import Config
from megatron_stare.data.arithmetic import ArithmeticPrompts
from megatron_stare.data.streams import Split
from megatron_stare.environments.environment import Environment, Generate, Response
from megatron_stare.observability.sink import RunOutline, Sink
from megatron_stare.records.batch import Prompt
from megatron_stare.records.trajectory import Trajectory
from megatron_stare.rollout.engines.local import LocalEngine

KNOWN_ANSWERS = [("ab", "8", 0.0)]  # of the defaults


def verify(
    response: str, answer: str, *, always: Annotated[float, Field(le=1)] = 0.0, parity: bool = True
) -> float:
    """Gives as much as is asked for; with `parity` an odd number of characters earns one less."""
    return always - (parity and len(response) % 2)


def needs(response: str, answer: str, *, reward: float) -> float:
    """A setting that has no default."""
    return 0.0 if response else reward


class Brief(Environment):
    """Lets the policy say so much and no more."""

    def __init__(
        self, config: Config, tokenizer: Any, *, tokens: Annotated[int, Field(ge=1)]
    ) -> None:
        super().__init__(config, tokenizer)
        self._tokens = tokens

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        response = Response(prompt)
        response.sampled(await generate(prompt.token_ids, max_new_tokens=self._tokens))
        return response.trajectory()


class Rewards(Sink):
    """Writes rewards of every step into a file of the run directory."""

    def __init__(self, *, file: str, rounded: int | None = None) -> None:
        self._file, self._rounded = file, rounded

    def start(self, run: RunOutline) -> None:
        self._path = Path(run.dir) / self._file

    def step(self, step: int, metrics: Mapping[str, float], batch: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(round(metrics["reward/mean"], self._rounded)) + "\n")


class Few(ArithmeticPrompts):
    """No more problems than are asked for."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        split: Split,
        *,
        problems: Annotated[int, Field(ge=1)] = 5,
    ):
        super().__init__(config, tokenizer, split)
        self.problems = problems


class Counting(LocalEngine):
    """The engine in process, told what it is to be called."""

    def __init__(
        self,
        model_path: str,
        max_batch: int = 256,
        threads: int | None = None,
        dtype: str = "float32",
        *,
        file: str | None = None,
    ) -> None:
        super().__init__(model_path, max_batch, threads, dtype)
        if file:
            Path(file).write_text(dtype)
