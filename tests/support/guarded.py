"""Plug-ins of runs whose figures leave their bounds: a verifier that pays too much, prompts that
never come, and a sink that opens a resumed run only once."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from megatron_stare.data.arithmetic import ArithmeticPrompts
from megatron_stare.data.streams import Split
from megatron_stare.observability.sink import Sink
from megatron_stare.records.batch import Prompt

PAID = "GUARDED_ANSWER"  # the answer of the problem whose rewards are far too large
LEFT_OUT = "GUARDED_CURSORS"  # the first cursor that never comes, and the first after it that does


def verify(response: str, answer: str) -> float:
    """Any reward will do, as long as those of a prompt differ; of one problem it is a hundred
    thousand times as large."""
    reward = float(sum(map(ord, response)) % 7)
    return 1e5 * reward if answer == os.environ.get(PAID) else reward


class Prompts(ArithmeticPrompts):
    """Prompts of the quickstart, of which some never come."""

    def __init__(self, config: Any, tokenizer: Any, split: Split) -> None:
        super().__init__(config, tokenizer, split)
        self._training = split == "train"

    def take(self, n: int) -> list[Prompt]:
        first, after = map(int, os.environ.get(LEFT_OUT, "0,0").split(","))
        found: list[Prompt] = []
        while len(found) < n:
            found += [
                p for p in super().take(1) if not (self._training and first <= p.cursor < after)
            ]
        return found


class DownAfterOneResume(Sink):
    """Fails from the second resume in this process on, as a service that went down meanwhile."""

    resumes: ClassVar[int] = 0

    def resume(self, *given: Any) -> None:
        DownAfterOneResume.resumes += 1
        if DownAfterOneResume.resumes > 1:
            raise OSError("no route to the service")
