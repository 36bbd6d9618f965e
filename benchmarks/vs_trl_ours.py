"""Additions of vs_trl.py to a run of ours: a clock at the end of every step, and responses of given
lengths."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from vs_trl_task import LONGEST, Lengths

from megatron_stare.config.schema import Config
from megatron_stare.environments.environment import Environment, Generate, Response
from megatron_stare.observability.sink import RunOutline, Sink
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import Trajectory


class Clock(Sink):
    """A line a step, in the file named by VS_TRL_CLOCK: when it ended, and its mean reward."""

    def start(self, run: RunOutline) -> None:
        self._file = open(os.environ["VS_TRL_CLOCK"], "w")  # noqa: SIM115 closed with the run

    def step(self, step: int, metrics: Mapping[str, float], batch: RolloutBatch) -> None:
        line = {
            "at": time.monotonic(),
            "reward": metrics["reward/mean"],
            "tokens": metrics["response/length_mean"],
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


class Ragged(Environment):
    """One turn of a length that is drawn before it."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        assert config.rollout.max_new_tokens == LONGEST
        self._lengths = Lengths(config.run.seed)

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        response = Response(prompt)
        response.sampled(await generate(prompt.token_ids, self._lengths.draw()))
        return response.trajectory()
