"""The trainer's ranks as the driver sees them: one object, with the verbs of the algorithm."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_stare.batch import RolloutBatch
from megatron_stare.config.schema import Config
from megatron_stare.ops.plan import PlanRules, plan_mini_batches
from megatron_stare.orchestration.updates import UpdateResult
from megatron_stare.orchestration.weight_stream import WeightStream
from megatron_stare.rollout.pool import EnginePool
from megatron_stare.weights.shape import read_shape
from megatron_stare.weights.stream_plan import BucketLayout
from megatron_stare.workers import Workers


def plan_rules(config: Config) -> PlanRules:
    """What micro-batch plans of this run must respect."""
    parallel = config.parallel
    return PlanRules(
        data_parallel=parallel.data,
        budget=config.batch.micro_batch_tokens,
        packed=config.batch.packed,
        multiple=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
        hidden=read_shape(config.model.path).hidden,
        mini_batch_prompts=config.batch.mini_batch_prompts,
    )


class TrainerGroup:
    """All ranks of the Megatron trainer."""

    def __init__(self, workers: Workers, rules: PlanRules) -> None:
        self._workers = workers
        self._rules = rules
        self._layouts: tuple[BucketLayout, ...] | None = None  # of the weights' buckets; asked for once

    def notes(self) -> list[str]:
        """What the trainer decided as it started; a line each."""
        return self._workers.wait([self._workers.start_on(0, "notes")])[0]

    def score(self, batch: RolloutBatch) -> None:
        """Log-probs and entropies of every response token under the current policy, before any update.

        The plan of the batch's mini-batches that this makes is also that of the updates.
        """
        plan = plan_mini_batches(batch.lengths.tolist(), batch.groups.tolist(), self._rules)
        self._workers.call("score", self._workers.share(batch), plan)

    def measure(self, state: dict[str, float]) -> None:
        """The method's statistics over the whole scored batch, and its gate and controllers; they move once a batch."""
        self._workers.call("measure", state)

    def update(self, number: int = 0, dump_to: str | None = None) -> UpdateResult:
        """Forward and backward of the weighted loss of one mini-batch, and the optimizer step."""
        reported = [result for result in self._workers.call("update", number, dump_to) if result is not None]
        (metrics, state) = reported[0]
        return UpdateResult(metrics, state)

    def log_probs(self, batch: RolloutBatch, temperature: float | None = None) -> Tensor:
        """[N] log-probs of a batch's response tokens, in canonical order: those of the last `score`, or anew at a
        temperature."""
        if temperature is None:
            parts = self._workers.call("scored")
        else:
            plan = plan_mini_batches(batch.lengths.tolist(), batch.groups.tolist(), self._rules)
            parts = self._workers.call("rescore", self._workers.share(batch), plan, temperature)
        found = torch.full((int(batch.response_lengths.sum()),), torch.nan)
        for index, log_prob in (part for part in parts if part is not None):
            found[index] = log_prob.float()
        return found

    def refresh_reference(self) -> None:
        """Makes the policy as it is now the reference policy."""
        self._workers.call("refresh_reference")

    def export(self) -> WeightStream:
        """The policy's tensors by Hugging Face name, as buckets the engines can take."""
        if self._layouts is None:
            (self._layouts,) = self._workers.wait([self._workers.start_on(0, "bucket_layouts")])
        return WeightStream(self._workers, self._layouts)

    def weights(self) -> dict[str, Tensor]:
        """The policy's tensors by Hugging Face name, here."""
        here: dict[str, Tensor] = {}
        stream = self.export()
        for layout, (bucket, others) in zip(stream.layouts, stream.buckets(), strict=True):
            flat, *_ = self._workers.wait([bucket, *others])
            here |= {name: tensor.clone() for name, tensor in layout.tensors(flat)}
        stream.checksums()
        return here

    def save(self, folder: str) -> None:
        """Writes a distributed checkpoint into an existing empty folder."""
        self._workers.call("save", folder)

    def load(self, folder: str) -> None:
        """Continues from a distributed checkpoint."""
        self._workers.call("load", folder)

    def close(self) -> None:
        self._workers.close()


class Runner(Protocol):
    """Places trainer ranks and engines, and takes them away again."""

    trainers: TrainerGroup
    engines: EnginePool

    def close(self) -> None: ...
