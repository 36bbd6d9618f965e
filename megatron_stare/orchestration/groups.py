"""Trainer ranks and rollout engines as the driver sees them: one object each, with the verbs of the algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megatron_stare.batch import MicroBatchPlan, SamplingParams
from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.megatron.dump import write_batch
from megatron_stare.ops.plan import PlanRules, plan_mini_batches
from megatron_stare.orchestration.updates import UpdateResult
from megatron_stare.orchestration.weight_stream import WeightStream
from megatron_stare.orchestration.workers import Workers
from megatron_stare.records.log_prob_difference import LogProbDifference
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.rollout.collect import split_over_engines
from megatron_stare.rollout.engine import GenerateRequest, GenerateResult
from megatron_stare.weights.shape import read_shape
from megatron_stare.weights.stream_plan import BucketLayout


class SyncError(UserError):
    """The engines do not hold the weights that were sent."""


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
        self._data_ranks: list[int] = workers.call("data_rank")  # of every worker
        self._scored: tuple[RolloutBatch, MicroBatchPlan] | None = None
        self._layouts: tuple[BucketLayout, ...] | None = None  # of the weights' buckets; asked for once

    def notes(self) -> list[str]:
        """What the trainer decided as it started; a line each."""
        return self._workers.wait([self._workers.start_on(0, "notes")])[0]

    def score(self, batch: RolloutBatch) -> None:
        """Log-probs and entropies of every response token under the current policy, before any update.

        The plan of the batch's mini-batches that this makes is also that of the updates.
        """
        plan = self._plan(batch)
        self._scored = batch, plan
        self._deal("score", batch, plan)

    def measure(self, state: dict[str, float]) -> None:
        """The method's statistics over the whole scored batch, and its gate and controllers; they move once a batch."""
        self._workers.call("measure", state)

    def update(self, number: int = 0, dump_to: str | None = None) -> UpdateResult:
        """Forward and backward of the weighted loss of one mini-batch, and the optimizer step."""
        if dump_to is not None and self._scored is not None:
            batch, plan = self._scored
            write_batch(Path(dump_to), batch.first(len(plan.samples(0))))
        (metrics, state) = _reported(self._workers.call("update", number, dump_to))
        return UpdateResult(metrics, state)

    def compare(self, temperature: float | None = None) -> LogProbDifference:
        """The engine's log-probs of the last scored batch with the trainer's: those of `score`, or anew at a
        temperature."""
        if self._scored is None:
            raise RuntimeError("there is no batch before score()")
        versions = self._scored[0].run_versions.unique().tolist()
        return _reported(self._workers.call("compare", versions, temperature))

    def compare_with(self, batch: RolloutBatch, engines: Tensor, temperature: float) -> list[LogProbDifference]:
        """As `compare`, of any batch with the log-probs [S, N] of several engines, in canonical order; one an engine.
        Leaves the scored batch alone."""
        return _reported(self._deal("compare_with", batch, self._plan(batch), engines, temperature))

    def _plan(self, batch: RolloutBatch) -> MicroBatchPlan:
        return plan_mini_batches(batch.lengths.tolist(), batch.groups.tolist(), self._rules)

    def _deal(self, method: str, batch: RolloutBatch, plan: MicroBatchPlan, *args: Any) -> list[Any]:
        """A call of every worker with the share of its data rank; each share is put where workers take it from once."""
        shares = {rank: self._workers.share(batch.share(plan.samples_of(rank))) for rank in set(self._data_ranks)}
        started = [
            self._workers.start_on(worker, method, shares[rank], plan, *args)
            for worker, rank in enumerate(self._data_ranks)
        ]
        return self._workers.wait(started)

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


class EngineGroup:
    """All rollout engines."""

    def __init__(self, workers: Workers, chunk: int | None) -> None:
        self._workers = workers
        self._chunk = chunk  # requests an engine is given at a time, so that progress can be seen; None: all
        self._layouts: tuple[BucketLayout, ...] = ()  # of the buckets the engines know to expect
        self.served: bool = all(workers.call("is_served"))  # by servers, which alone can score and release memory

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
        """Log-probs, at temperature 1, of all tokens but the first of every sequence; by server, then by sequence.

        Raises:
            UserError: the engines are not served.
        """
        return [server for servers in self._workers.call("score", sequences) for server in servers]

    def release_memory(self) -> None:
        """Every engine gives back its memory, and is of no use until `resume_memory` and a whole weight update.

        Raises:
            UserError: the engines are not served.
        """
        self._workers.call("release_memory")

    def resume_memory(self) -> None:
        """Every engine takes its memory again."""
        self._workers.call("resume_memory")

    def memory_mb(self) -> float | None:
        """What the engines' own processes hold now, 10^6 bytes; None where that is not known."""
        held = self._workers.call("memory_mb")
        return None if None in held else sum(held)

    def update_weights(self, version: int, exported: WeightStream) -> None:
        """Sends the policy to every engine; only an engine that holds all of it publishes the version.

        Raises:
            SyncError: an engine holds other weights than were sent.
        """
        if self._layouts is not exported.layouts:
            self._workers.call("expect_buckets", exported.layouts)
            self._layouts = exported.layouts
        self._workers.call("begin_weight_update", version)
        for number, (bucket, others) in enumerate(exported.buckets()):
            self._workers.wait([*self._workers.start("update_weights", number, bucket), *others])
        sent = exported.checksums()
        for engine, held in enumerate(self._workers.call("end_weight_update")):
            check_arrived(engine, sent, held)

    def close(self) -> None:
        self._workers.close()


def _reported(results: Sequence[Any]) -> Any:
    """The result of the one rank that reports it."""
    (result,) = (each for each in results if each is not None)
    return result


def check_arrived(engine: int, sent: Mapping[str, str], held: Mapping[str, str]) -> None:
    """Compares the checksums of what was sent with those of what an engine holds. Raises SyncError."""
    differing = [name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name)]
    if differing:
        named = ", ".join(sorted(differing)[:3]) + (", ..." if len(differing) > 3 else "")
        raise SyncError(
            f"engine {engine} holds other values than the trainer sent in {len(differing)} of {len(sent)} tensors: "
            f"{named}",
            fix="the engine's memory or its weight loading is at fault; the last checkpoint is intact",
        )


class Runner(Protocol):
    """Places trainer ranks and engines, and takes them away again."""

    trainers: TrainerGroup
    engines: EngineGroup

    def close(self) -> None: ...
