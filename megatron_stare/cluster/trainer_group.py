"""The trainer's ranks as the driver sees them: one object, with the verbs of the algorithm."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.config.schema import Config
from megatron_stare.megatron.step.dump import write_batch
from megatron_stare.megatron.step.not_finite import NotFinite
from megatron_stare.models import cost_of
from megatron_stare.ops.plan import PlanRules, plan_mini_batches
from megatron_stare.process.workers import Handle, WorkerLostError, Workers
from megatron_stare.records.batch import MicroBatchPlan
from megatron_stare.records.log_prob_difference import LogProbDifference
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.token_numbers import TokenNumbers
from megatron_stare.records.updates import UpdateResult
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.weights.files.manifest import Sum
from megatron_stare.weights.files.safetensors_file import Entry
from megatron_stare.weights.sync.stream_plan import BucketLayout
from megatron_stare.weights.sync.target import SyncTarget, WeightStream


def plan_rules(run: ResolvedRun) -> PlanRules:
    """The rules that micro-batch plans of this run must respect."""
    config, parallel = run.config, run.config.parallel
    return PlanRules(
        data_parallel=parallel.data,
        budget=config.batch.micro_batch_tokens,
        packed=config.batch.packed,
        multiple=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
        each=parallel.sequence_multiple,
        cost=cost_of(run.shape),
        mini_batch_prompts=config.batch.mini_batch_prompts,
    )


@dataclass(frozen=True)
class StateProof:
    """A proof of what all ranks hold, as numbers that another load of it must come to again.

    log_probs: [N] of a canary in canonical order, nats, by the name of the policy.
    sums: by the name of a tensor of the whole model, sums of absolute values and of squares.
    counts: of steps, by what counts them.
    """

    log_probs: Mapping[str, Sequence[float]]
    sums: Mapping[str, Sequence[float]]
    counts: Mapping[str, float]


class TrainerGroup:
    """All ranks of the Megatron trainer."""

    def __init__(self, workers: Workers, rules: PlanRules) -> None:
        self._workers = workers
        self._rules = rules
        self._data_ranks: list[int] = workers.call("data_rank")  # of every worker
        self._stages: list[int] = workers.call("stage")  # likewise, of the pipeline
        self._last: tuple[RolloutBatch, MicroBatchPlan] | None = None
        # layouts of the weights' buckets; asked for once
        self._layouts: tuple[BucketLayout, ...] | None = None

    def notes(self) -> list[str]:
        """Notes of what the trainer decided as it started; a line each."""
        return self._workers.wait([self._workers.start_on(0, "notes")])[0]

    def compute_log_probs(self, batch: RolloutBatch) -> None:
        """Log-probs and entropies of every response token under the current policy, before any
        update.

        The plan of the batch's mini-batches that this makes is also that of the updates.
        """
        plan = self._plan(batch)
        self._last = batch, plan
        self._deal("compute_log_probs", batch, plan)

    def measure(self, state: dict[str, float]) -> None:
        """The method's statistics over the whole batch, and its gate and controllers; they move
        once a batch."""
        self._workers.call("measure", state)

    def update(
        self,
        number: int = 0,
        dump_to: str | None = None,
        watched: Sequence[int] = (),
        norm_limit: float = math.inf,
    ) -> UpdateResult:
        """Forward and backward of the weighted loss of one mini-batch, and the optimizer step. See
        Trainer.update."""
        if dump_to is not None and self._last is not None:
            batch, plan = self._last
            write_batch(Path(dump_to), batch.first(len(plan.samples(0))))
        (metrics, state) = _reported(
            self._workers.call("update", number, dump_to, watched, norm_limit)
        )
        return UpdateResult(metrics, state)

    @contextlib.contextmanager
    def profiled(
        self, ranks: Sequence[int], folder: Path, step: int, note: Callable[[str], None]
    ) -> Iterator[None]:
        """Has some ranks record what they do while this is open, and write it to the folder.

        Args:
            note: is told what could not be written; that ends no run.
        """
        workers = self._workers
        workers.wait([workers.start_on(rank, "begin_profile") for rank in ranks])
        yield
        where = str(folder.resolve())
        for fault in workers.wait(
            [workers.start_on(rank, "end_profile", where, step) for rank in ranks]
        ):
            if fault is not None:
                note(fault)

    def not_finite(self) -> list[NotFinite]:
        """Finds what is not finite on each rank, after an update that was not taken for it."""
        return self._workers.call("not_finite")

    def log_probs(self) -> Tensor:
        """[N] of the last batch's response tokens in canonical order, under the policy before its
        updates, nats; NaN where a token carries no loss."""
        if self._last is None:
            raise RuntimeError("there is no batch before compute_log_probs()")
        found = torch.full((int(self._last[0].response_lengths.sum()),), torch.nan)
        for index, log_prob in filter(None, self._workers.call("log_probs")):
            found[index] = log_prob.to(found.dtype)
        return found

    def token_numbers(self) -> list[TokenNumbers]:
        """Gathers what the ranks found of the tokens of watched samples in the last batch's
        updates, in parts."""
        return [part for parts in self._workers.call("token_numbers") for part in parts]

    def compare(self, temperature: float | None = None) -> LogProbDifference:
        """The engine's log-probs of the last batch with the trainer's: those of
        `compute_log_probs`, or anew at a temperature."""
        if self._last is None:
            raise RuntimeError("there is no batch before compute_log_probs()")
        versions = self._last[0].run_versions.unique().tolist()
        return _reported(self._workers.call("compare", versions, temperature))

    def compare_with(
        self, batch: RolloutBatch, engines: Tensor, temperature: float
    ) -> list[LogProbDifference]:
        """Compares as `compare` does, but any batch with the log-probs [S, N] of several engines,
        in canonical order; one an engine. Leaves the last batch alone."""
        return _reported(self._deal("compare_with", batch, self._plan(batch), engines, temperature))

    def _plan(self, batch: RolloutBatch) -> MicroBatchPlan:
        return plan_mini_batches(batch.lengths.tolist(), batch.groups.tolist(), self._rules)

    def _deal(
        self, method: str, batch: RolloutBatch, plan: MicroBatchPlan, *args: Any
    ) -> list[Any]:
        """A call of every worker with the share of its data rank; each share is put where workers
        take it from once."""
        ranks = sorted(set(self._data_ranks))
        parts = batch.shares(plan.samples_of(rank) for rank in ranks)
        shares = {rank: self._workers.share(part) for rank, part in zip(ranks, parts, strict=True)}
        started = [
            self._workers.start_on(worker, method, shares[rank], plan, *args)
            for worker, rank in enumerate(self._data_ranks)
        ]
        return self._workers.wait(started)

    def offload(self, parts: Sequence[str]) -> None:
        """Moves parts of the policy to host memory (megatron/optimizer/offload.py); a call that
        needs one brings it."""
        self._workers.call("offload", parts)

    def memory_mb(self) -> dict[str, float]:
        """Memory of the ranks that hold most, 10^6 bytes: `peak_mb` since this was asked last,
        `device_mb` now; what is not known is left out."""
        found = self._workers.call("memory_mb")
        return {
            name: max(each[name] for each in found)
            for name in found[0]
            if all(name in each for each in found)
        }

    def refresh_reference(self) -> None:
        """Makes the policy as it is now the reference policy."""
        self._workers.call("refresh_reference")

    def export(self) -> TrainerWeights:
        """The policy's tensors by Hugging Face name, as buckets the engines can take."""
        if self._layouts is None:
            (self._layouts,) = self._workers.wait([self._workers.start_on(0, "bucket_layouts")])
        return TrainerWeights(self._workers, self._layouts, self._stages)

    def weights(self) -> dict[str, Tensor]:
        """The policy's tensors by Hugging Face name, here."""
        here: dict[str, Tensor] = {}
        stream = self.export()
        for layout, (bucket, others) in zip(stream.layouts, stream.buckets(), strict=True):
            flat, *_ = self._workers.wait([bucket, *others])
            here |= {name: tensor.clone() for name, tensor in layout.tensors(flat)}
        stream.checksums()
        return here

    def own_tensors(self) -> list[dict[str, tuple[tuple[int, ...], torch.dtype]]]:
        """The tensors that each rank would write of the policy: shape and dtype by Hugging Face
        name, each tensor once."""
        found = self._workers.call("own_tensors")
        whole = sorted(slot.name for layout in self.export().layouts for slot in layout.slots)
        if sorted(name for part in found for name in part) != whole:
            raise RuntimeError("the ranks would not write every tensor of the policy once")
        return found

    def write_tensors(self, entries: dict[str, Entry]) -> None:
        """Has the ranks write the policy's tensors to where they go."""
        self._workers.call("write_tensors", entries)

    @property
    def last_batch(self) -> RolloutBatch | None:
        """The batch of the last log-prob pass; None where there was none."""
        return self._last[0] if self._last is not None else None

    def place(self) -> str:
        """The devices that the ranks compute on, in words."""
        return ", ".join(sorted(set(self._workers.call("place"))))

    def prove(self, batch: RolloutBatch) -> StateProof:
        """Proves what policy, moving reference and optimizer hold; leaves the last batch alone."""
        found = self._deal("prove", batch, self._plan(batch))
        log_probs: dict[str, Tensor] = {}
        sums: dict[str, list[list[float]]] = {}
        for part in found:
            for name, (index, values) in part.log_probs.items():
                whole = log_probs.setdefault(name, torch.full((len(batch.loss_mask),), torch.nan))
                whole[index] = values
            for name, pair in part.sums.items():
                sums.setdefault(name, []).append(pair)
        whole_sums = {
            name: [math.fsum(column) for column in zip(*pairs, strict=True)]
            for name, pairs in sums.items()
        }
        return StateProof(
            {name: each.tolist() for name, each in log_probs.items()}, whole_sums, found[0].counts
        )

    def save(self, folder: str, timeout_s: float | None = None) -> None:
        """Begins to write a distributed checkpoint into an existing empty folder; training may go
        on meanwhile.

        Args:
            timeout_s: of the wait until it may, seconds; None: that of any call.

        Raises:
            UserError: it may not in this time.
        """
        self._workers.wait(self._workers.start("save", folder), timeout_s=timeout_s)

    def saved(self) -> bool:
        """True once every rank has written its part."""
        return all(self._workers.call("saved"))

    def wait_saved(self, timeout_s: float | None = None) -> None:
        """Waits until every rank has written its part.

        Args:
            timeout_s: of the wait, seconds; None: that of any call.

        Raises:
            UserError: one has not in this time.
        """
        self._workers.wait(self._workers.start("wait_saved"), timeout_s=timeout_s)

    def finish_save(self) -> dict[str, Sum]:
        """Makes a checkpoint of what the ranks have written: lengths and checksums of the files, by
        name. Raises UserError where one of them could not write."""
        return {
            name: each for sums in self._workers.call("finish_save") for name, each in sums.items()
        }

    def verify(self, folder: str) -> None:
        """Reads all tensor files of a checkpoint, each rank a share of them. Raises DataError where
        one is damaged."""
        self._workers.call("verify", folder)

    def load(self, folder: str) -> None:
        """Continues from a distributed checkpoint."""
        self._workers.call("load", folder)

    def close(self) -> None:
        self._workers.close()


def _each(told: Any) -> Sequence[Any]:
    """Accounts that a rank gives engines: one account of what it sent, or one for each engine."""
    return told if isinstance(told, list) else [told]


def _reported(results: Sequence[Any]) -> Any:
    """The result of the one rank that reports it."""
    (result,) = (each for each in results if each is not None)
    return result


class Runner(Protocol):
    """Places trainer ranks and engines, and takes them away again."""

    trainers: TrainerGroup
    engines: EnginePool

    def notes(self) -> list[str]:
        """Notes of where ranks and engines were placed, a line each; none where there was nothing
        to choose."""
        ...

    def engines_beside(self, config: Config) -> EnginePool:
        """More engines, of this configuration, which take none of a cluster's GPUs. They end with
        the runner.

        Raises:
            UserError: one does not come up.
        """
        ...

    def lost(self, error: Exception) -> WorkerLostError | None:
        """Finds the process that was lost, where this error, of whatever kind, came of one that
        died; None: none has."""
        ...

    def close(self) -> None: ...


class TrainerWeights(WeightStream):
    """The weights of the trainer's ranks on their way: to a target by the ranks themselves, or
    bucket by bucket through the first of them.

    Args:
        layouts: what the buckets hold, in order.
        stages: of the pipeline, that each rank is of.
    """

    def __init__(
        self, trainers: Workers, layouts: tuple[BucketLayout, ...], stages: Sequence[int] = ()
    ) -> None:
        self._trainers, self._stages = trainers, stages
        self.layouts = layouts
        # target, proof and calls that the ranks were told to prepare
        self._prepared: tuple[SyncTarget, bool, list[Handle]] | None = None

    def prepare(self, target: SyncTarget, prove: bool) -> None:
        """See WeightStream. All ranks gather a first bucket."""
        self._prepared = target, prove, self._trainers.start("prepare_weights", target, prove)

    def send_to(self, target: SyncTarget, prove: bool) -> list[Any]:
        """See WeightStream. All ranks gather a first bucket at once, and where senders must take
        turns, the stages do, and then the owners of experts."""
        if self._prepared is None or self._prepared[:2] != (target, prove):
            self.prepare(target, prove)
        assert self._prepared is not None
        (*_, started), self._prepared = self._prepared, None
        in_turn, every = target.one_sender_at_a_time, list(range(len(self._stages)))
        stages = (
            [{stage} for stage in sorted(set(self._stages))] if in_turn else [set(self._stages)]
        )
        turns = [
            ("send_weights", [rank for rank in every if self._stages[rank] in stage])
            for stage in stages
        ]
        if target.owners_send:
            turns += [
                ("send_own_weights", owners)
                for owners in ([[rank] for rank in every] if in_turn else [every])
            ]
        sends: list[Handle] = []
        before: list[Handle] = []
        for method, ranks in turns:
            # Calls of a turn take the former turn's results as arguments: they start, or fail, once
            # those have ended.
            now = [self._trainers.start_on(rank, method, *before) for rank in ranks]
            sends += now
            before = now if in_turn else []
        told = self._trainers.wait([*started, *sends])[len(started) :]
        return [one for of_rank in told if of_rank is not None for one in _each(of_rank)]

    def forget(self) -> None:
        """Has the ranks remove what they left for the engines to fetch."""
        self._trainers.call("forget_weights")

    def buckets(self, checksums: bool = True) -> Iterator[tuple[Handle, list[Handle]]]:
        """See WeightStream; the calls that a bucket needs are those of the other ranks.

        Consumes the trainer ranks' `begin_weight_stream`, `next_bucket` and `end_weight_stream`.
        The next bucket is asked for before the one at hand is given out, so the ranks gather it
        meanwhile; at most three buckets are alive, a third while the caller still holds the last
        one.
        """
        self._trainers.call("begin_weight_stream", checksums)
        ahead = self._trainers.start("next_bucket")
        for number in range(len(self.layouts)):
            bucket, *others = ahead
            ahead = self._trainers.start("next_bucket") if number + 1 < len(self.layouts) else []
            yield bucket, others

    def checksums(self) -> dict[str, str]:
        """See WeightStream."""
        return self._trainers.call("end_weight_stream")[0]
