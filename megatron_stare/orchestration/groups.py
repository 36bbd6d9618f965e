"""Trainer ranks and rollout engines as the driver sees them: one object each, with the verbs of the algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_stare.batch import RolloutBatch, SamplingParams
from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.ops.plan import PlanRules, plan_micro_batches
from megatron_stare.orchestration.workers import Handle, Workers
from megatron_stare.rollout.collect import split_over_engines
from megatron_stare.rollout.engine import GenerateRequest, GenerateResult
from megatron_stare.weights.shape import read_shape


class SyncError(UserError):
    """The engines do not hold the weights that were sent."""


@dataclass(frozen=True)
class StepResult:
    """What an update gives back: the step's metrics and the method's new state."""

    metrics: dict[str, float]
    state: dict[str, float]


def plan_rules(config: Config) -> PlanRules:
    """What micro-batch plans of this run must respect."""
    parallel = config.parallel
    return PlanRules(
        data_parallel=parallel.data,
        budget=config.batch.micro_batch_tokens,
        packed=config.batch.packed,
        multiple=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
        hidden=read_shape(config.model.path).hidden,
    )


class TrainerGroup:
    """All ranks of the Megatron trainer."""

    def __init__(self, workers: Workers, rules: PlanRules) -> None:
        self._workers = workers
        self._rules = rules

    def score(self, batch: RolloutBatch) -> None:
        """Log-probs and entropies of every response token under the current policy."""
        plan = plan_micro_batches(batch.lengths.tolist(), self._rules)
        self._workers.call("score", self._workers.share(batch), plan)

    def measure(self, state: dict[str, float]) -> None:
        """The method's statistics over the whole scored batch: thresholds, counts, mean entropy, gate."""
        self._workers.call("measure", state)

    def update(self, dump_to: str | None = None) -> StepResult:
        """Forward and backward of the weighted loss, and the optimizer step."""
        reported = [result for result in self._workers.call("update", dump_to) if result is not None]
        (metrics, state) = reported[0]
        return StepResult(metrics, state)

    def log_probs(self, batch: RolloutBatch, temperature: float | None = None) -> Tensor:
        """[N] log-probs of a batch's response tokens, in canonical order: those of the last `score`, or anew at a
        temperature."""
        if temperature is None:
            parts = self._workers.call("scored")
        else:
            plan = plan_micro_batches(batch.lengths.tolist(), self._rules)
            parts = self._workers.call("rescore", self._workers.share(batch), plan, temperature)
        found = torch.full((int(batch.response_lengths.sum()),), torch.nan)
        for index, log_prob in (part for part in parts if part is not None):
            found[index] = log_prob.float()
        return found

    def export(self) -> list[Handle]:
        """The policy's tensors by Hugging Face name, as handles the engines can take."""
        return self._workers.start("export")

    def weights(self) -> dict:
        """The policy's tensors by Hugging Face name, here."""
        merged: dict = {}
        for part in self._workers.wait(self.export()):
            merged |= part
        return merged

    def save(self, folder: str) -> None:
        """Writes a distributed checkpoint into an existing empty folder."""
        self._workers.call("save", folder)

    def load(self, folder: str) -> None:
        """Continues from a distributed checkpoint."""
        self._workers.call("load", folder)

    def close(self) -> None:
        self._workers.close()


class EngineGroup:
    """All rollout engines."""

    def __init__(self, workers: Workers, chunk: int | None) -> None:
        self._workers = workers
        self._chunk = chunk  # requests an engine is given at a time, so that progress can be seen; None: all

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[GenerateResult]:
        """Every request's response, spread over the engines. `progress` is told responses finished and wanted."""
        shards = split_over_engines(requests, len(self._workers))
        chunks = [
            (engine, shard[start : start + (self._chunk or len(shard))])
            for engine, shard in enumerate(shards)
            for start in range(0, len(shard), self._chunk or max(len(shard), 1))
        ]
        done = 0

        def one_more(number: int) -> None:
            nonlocal done
            done += len(chunks[number][1])
            progress(done, len(requests))

        progress(0, len(requests))
        handles = [self._workers.start_on(engine, "generate", chunk, params) for engine, chunk in chunks]
        return [result for results in self._workers.wait(handles, one_more) for result in results]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Log-probs, at temperature 1, of all tokens but the first of every sequence; by server, then by sequence."""
        return [server for servers in self._workers.call("score", sequences) for server in servers]

    def update_weights(self, version: int, exported: Sequence[Handle]) -> None:
        """Sends the policy to every engine; only an engine that holds all of it publishes the version.

        Raises:
            SyncError: two engines hold different weights.
        """
        self._workers.call("begin_weight_update", version)
        for part in exported:
            self._workers.call("update_weights", part)
        checksums = self._workers.call("end_weight_update")
        for i, held in enumerate(checksums):
            differing = [name for name in checksums[0] if held.get(name) != checksums[0][name]]
            if differing:
                raise SyncError(f"engine {i} holds other values of {', '.join(differing[:3])} than engine 0")

    def close(self) -> None:
        self._workers.close()


class Runner(Protocol):
    """Places trainer ranks and engines, and takes them away again."""

    trainers: TrainerGroup
    engines: EngineGroup

    def close(self) -> None: ...
