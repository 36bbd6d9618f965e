"""The driver's interface to all trainer ranks. `TrainerGroup` has one method for each task of the
ranks, such as a log-prob pass or an update."""

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
    """Returns the rules by which the run's micro-batches are planned."""
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
    """Fingerprint of the state of all ranks together. Equal states have equal fingerprints.

    `log_probs`: maps the name of each policy to a list of N log-probs, in nats. The list contains
        one log-prob for each response token of a canary batch. The tokens are in canonical order.
    `sums`: maps each tensor's name to two numbers: the sum of the absolute values of the tensor's
        elements, and the sum of the squares of the tensor's elements.
    `counts`: maps the name of each step counter to the counter's value.
    """

    log_probs: Mapping[str, Sequence[float]]
    sums: Mapping[str, Sequence[float]]
    counts: Mapping[str, float]


class TrainerGroup:
    """All ranks of the Megatron trainer."""

    def __init__(self, workers: Workers, rules: PlanRules) -> None:
        self._workers = workers
        self._rules = rules
        self._data_ranks: list[int] = workers.call("data_rank")  # of each worker
        self._stages: list[int] = workers.call("stage")  # pipeline stage of each worker
        self._last: tuple[RolloutBatch, MicroBatchPlan] | None = None
        # layouts of the weights' buckets, requested from rank 0 once
        self._layouts: tuple[BucketLayout, ...] | None = None

    def notes(self) -> list[str]:
        """Returns notes on decisions that the trainer made when it started, one line each."""
        return self._workers.wait([self._workers.start_on(0, "notes")])[0]

    def compute_log_probs(self, batch: RolloutBatch) -> None:
        """Computes the log-prob and the entropy of every response token, before the batch's
        updates.

        The batch's updates use the same micro-batch plan as this log-prob pass.
        """
        plan = self._plan(batch)
        self._last = batch, plan
        self._deal("compute_log_probs", batch, plan)

    def measure(self, state: dict[str, float]) -> None:
        """Computes the method's statistics over the whole batch, and updates the method's gate and
        controllers. Call `measure` once per batch."""
        self._workers.call("measure", state)

    def update(
        self,
        number: int = 0,
        dump_to: str | None = None,
        watched: Sequence[int] = (),
        norm_limit: float = math.inf,
    ) -> UpdateResult:
        """Runs the forward and the backward pass of the weighted loss on one mini-batch, and takes
        the optimizer step. See Trainer.update."""
        if dump_to is not None and self._last is not None:
            batch, plan = self._last
            first = batch.branches.samples[plan.branches(0)].unique()
            write_batch(Path(dump_to), batch.first(len(first)))
        (metrics, state) = _reported(
            self._workers.call("update", number, dump_to, watched, norm_limit)
        )
        return UpdateResult(metrics, state)

    @contextlib.contextmanager
    def profiled(
        self, ranks: Sequence[int], folder: Path, step: int, note: Callable[[str], None]
    ) -> Iterator[None]:
        """Context manager that profiles some ranks and writes their traces to the folder.

        Args:
            note: a function that is called with a message for every trace that could not be
                written.
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
        """Returns the non-finite values that each rank found. Call `not_finite` after an update was
        skipped because of non-finite values."""
        return self._workers.call("not_finite")

    def log_probs(self) -> Tensor:
        """Returns a tensor [N] of log-probs in nats, one for each response token of the last batch,
        in canonical order. The log-probs are those of the policy before its updates on the last
        batch. A log-prob is NaN if the token's loss mask is 0."""
        if self._last is None:
            raise RuntimeError("there is no batch before compute_log_probs()")
        found = torch.full((int(self._last[0].response_lengths.sum()),), torch.nan)
        for index, log_prob in filter(None, self._workers.call("log_probs")):
            found[index] = log_prob.to(found.dtype)
        return found

    def token_numbers(self) -> list[TokenNumbers]:
        """Returns the per-token numbers that the last batch's updates computed for the samples in
        `watched` (see `update`). Some ranks add several entries to the returned list, and other
        ranks add no entry."""
        return [part for parts in self._workers.call("token_numbers") for part in parts]

    def compare(self, temperature: float | None = None) -> LogProbDifference:
        """Compares the engines' log-probs of the last batch with the trainer's log-probs.

        Args:
            temperature: the temperature at which the trainer's log-probs are recomputed. If
                `temperature` is None, the log-probs of `compute_log_probs` are used.
        """
        if self._last is None:
            raise RuntimeError("there is no batch before compute_log_probs()")
        versions = self._last[0].run_versions.unique().tolist()
        return _reported(self._workers.call("compare", versions, temperature))

    def compare_with(
        self, batch: RolloutBatch, engines: Tensor, temperature: float
    ) -> list[LogProbDifference]:
        """Compares several engines' log-probs of the given batch with the trainer's log-probs.
        Returns one difference per engine. Does not change `last_batch`.

        Args:
            engines: [S, N] log-probs of S engines, in canonical order.
        """
        return _reported(self._deal("compare_with", batch, self._plan(batch), engines, temperature))

    def mean_loss(self, batch: RolloutBatch) -> float:
        """Returns the mean negative log-likelihood, in nats, that the policy assigns to the loss
        tokens of the given batch. Does not change `last_batch`."""
        # A log-prob is at most 0, so its mean distance from 0 is the mean loss.
        zeros = torch.zeros(1, len(batch.loss_mask))
        (found,) = self.compare_with(batch, zeros, 1.0)
        return found.everywhere.mean

    def _plan(self, batch: RolloutBatch) -> MicroBatchPlan:
        return plan_mini_batches(batch.lengths.tolist(), batch.branch_groups.tolist(), self._rules)

    def _deal(
        self, method: str, batch: RolloutBatch, plan: MicroBatchPlan, *args: Any
    ) -> list[Any]:
        """Calls `method` on every worker, with the part of the batch that belongs to the worker's
        data-parallel rank. Each part is stored once, for all workers of the same data-parallel
        rank. Each tensor among the arguments `args` is stored once, for all workers of the
        trainer."""
        # A handle must be an argument by itself; one within a list would not be fetched.
        given = [self._workers.share(arg) if isinstance(arg, Tensor) else arg for arg in args]
        ranks = sorted(set(self._data_ranks))
        parts = batch.shares(plan.branches_of(rank) for rank in ranks)
        shares = {rank: self._workers.share(part) for rank, part in zip(ranks, parts, strict=True)}
        started = [
            self._workers.start_on(worker, method, shares[rank], plan, *given)
            for worker, rank in enumerate(self._data_ranks)
        ]
        return self._workers.wait(started)

    def offload(self, parts: Sequence[str]) -> None:
        """Offloads parts of the policy to host memory (megatron/optimizer/offload.py). A later call
        that needs an offloaded part loads the part onto the device."""
        self._workers.call("offload", parts)

    def memory_mb(self) -> dict[str, float]:
        """Returns the largest memory use of any rank, in 10^6 bytes. Leaves out a value if any rank
        cannot measure it.

        `peak_mb` is the peak since the last call, and `device_mb` is the current use.
        """
        found = self._workers.call("memory_mb")
        return {
            name: max(each[name] for each in found)
            for name in found[0]
            if all(name in each for each in found)
        }

    def refresh_reference(self) -> None:
        """Makes the current policy the reference policy."""
        self._workers.call("refresh_reference")

    def export(self) -> TrainerWeights:
        """Returns a stream of the policy's tensors, under their Hugging Face names and in buckets
        for the engines."""
        if self._layouts is None:
            (self._layouts,) = self._workers.wait([self._workers.start_on(0, "bucket_layouts")])
        return TrainerWeights(self._workers, self._layouts, self._stages)

    def weights(self) -> dict[str, Tensor]:
        """Copies the policy's tensors to this process, and returns them by Hugging Face name."""
        here: dict[str, Tensor] = {}
        stream = self.export()
        for layout, (bucket, others) in zip(stream.layouts, stream.buckets(), strict=True):
            flat, *_ = self._workers.wait([bucket, *others])
            here |= {name: tensor.clone() for name, tensor in layout.tensors(flat)}
        stream.checksums()
        return here

    def own_tensors(self) -> list[dict[str, tuple[tuple[int, ...], torch.dtype]]]:
        """Returns one dict for each rank. The dict describes the tensors that the rank would write
        in an export: it maps each tensor's Hugging Face name to the tensor's shape and dtype.
        Exactly one rank writes each tensor."""
        found = self._workers.call("own_tensors")
        whole = sorted(slot.name for layout in self.export().layouts for slot in layout.slots)
        if sorted(name for part in found for name in part) != whole:
            raise RuntimeError("the ranks would not write every tensor of the policy once")
        return found

    def write_tensors(self, entries: dict[str, Entry]) -> None:
        """Makes each rank write the tensors that `own_tensors` lists for this rank. The argument
        `entries` maps the name of each tensor of the policy to the tensor's place in a file.
        `own_tensors` must be called first."""
        self._workers.call("write_tensors", entries)

    @property
    def last_batch(self) -> RolloutBatch | None:
        """Batch of the last log-prob pass, or None."""
        return self._last[0] if self._last is not None else None

    def place(self) -> str:
        """Describes the devices that the ranks compute on."""
        return ", ".join(sorted(set(self._workers.call("place"))))

    def prove(self, batch: RolloutBatch) -> StateProof:
        """Computes a fingerprint of the policy, of the refreshed reference policy and of the
        optimizer state. Does not change `last_batch`."""
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
        """Begins to write a distributed checkpoint into an existing empty folder. Returns when
        training may continue.

        Args:
            timeout_s: the timeout of the wait until training may continue, seconds. If `timeout_s`
                is None, the timeout of an ordinary call applies.

        Raises:
            UserError: the wait took longer.
        """
        self._workers.wait(self._workers.start("save", folder), timeout_s=timeout_s)

    def saved(self) -> bool:
        """Returns True if every rank has either written its part of the checkpoint or failed to
        write its part."""
        return all(self._workers.call("saved"))

    def wait_saved(self, timeout_s: float | None = None) -> None:
        """Waits until every rank has written its part of the checkpoint or has failed to write it.

        Args:
            timeout_s: the timeout of the wait, seconds. If `timeout_s` is None, the timeout of an
                ordinary call applies.

        Raises:
            UserError: a rank did not finish within the timeout.
        """
        self._workers.wait(self._workers.start("wait_saved"), timeout_s=timeout_s)

    def finish_save(self) -> dict[str, Sum]:
        """Finishes the checkpoint on all ranks. Returns the length and the checksum of each file of
        the checkpoint, by file name. Raises UserError if a rank could not write its part of the
        checkpoint."""
        return {
            name: each for sums in self._workers.call("finish_save") for name, each in sums.items()
        }

    def verify(self, folder: str) -> None:
        """Verifies all tensor files of a checkpoint. The ranks divide the files among themselves.
        Raises DataError if a file is damaged."""
        self._workers.call("verify", folder)

    def load(self, folder: str) -> None:
        """Loads a distributed checkpoint."""
        self._workers.call("load", folder)

    def close(self) -> None:
        self._workers.close()


def _each(told: Any) -> Sequence[Any]:
    """Returns, as a list, the results that a rank returned after it sent weights. If the engines
    share the trainer's devices, a rank can collect the memory handles for several engines. The list
    then contains one result for each of these engines. If the engines do not share the trainer's
    devices, the list contains a single result for all engines."""
    return told if isinstance(told, list) else [told]


def _reported(results: Sequence[Any]) -> Any:
    """Returns the only result that is not None. One rank, the reporting rank, returns this result
    for all ranks, and every other rank returns None."""
    (result,) = (each for each in results if each is not None)
    return result


class Runner(Protocol):
    """Starts trainer ranks and engines, and ends them."""

    trainers: TrainerGroup
    engines: EnginePool

    def notes(self) -> list[str]:
        """Returns the placement of ranks and engines as lines of text. The list is empty if no
        placement was planned."""
        ...

    def pids_here(self) -> list[int]:
        """Returns the pids of the ranks and engines that have their own processes on the driver's
        node. If the run joined an existing cluster, the processes of ranks and engines do not
        descend from the driver."""
        ...

    def engines_beside(self, config: Config) -> EnginePool:
        """Starts additional engines with this configuration. The additional engines use no GPUs of
        the cluster, and are ended when the runner is closed.

        Raises:
            UserError: an engine does not start.
        """
        ...

    def lost(self, error: Exception) -> WorkerLostError | None:
        """Returns an error that names the lost process behind `error`, or None if no process was
        lost."""
        ...

    def close(self) -> None: ...


class TrainerWeights(WeightStream):
    """Weight stream of the trainer's ranks. `send_to` makes the ranks send the weights directly to
    a SyncTarget. The method `buckets` reads the weights from rank 0, and yields one bucket at a
    time.

    Args:
        layouts: layouts of the buckets, in order.
        stages: pipeline stage of each rank.
    """

    def __init__(
        self, trainers: Workers, layouts: tuple[BucketLayout, ...], stages: Sequence[int] = ()
    ) -> None:
        self._trainers, self._stages = trainers, stages
        self.layouts = layouts
        # target, `prove` and started calls of the last `prepare`
        self._prepared: tuple[SyncTarget, bool, list[Handle]] | None = None

    def prepare(self, target: SyncTarget, prove: bool) -> None:
        """See WeightStream. Starts a call of `prepare_weights` on every rank, and returns without
        waiting for the calls. The call prepares a rank to send weights. If the engines do not share
        the trainer's devices, the call also gathers the first bucket of the rank's pipeline
        stage."""
        self._prepared = target, prove, self._trainers.start("prepare_weights", target, prove)

    def send_to(self, target: SyncTarget, prove: bool) -> list[Any]:
        """See WeightStream. All ranks prepare their weights at the same time. If the target allows
        only one sender at a time, each pipeline stage waits until the previous stage has sent its
        weights. If `target.owners_send` is True, each rank sends its own experts in a separate
        call. If the target allows only one sender at a time, the ranks send their own experts one
        after another, after the last pipeline stage has sent its weights."""
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
            # A turn's calls take the previous turn's results as arguments, so that they start, or
            # fail, after the previous turn.
            now = [self._trainers.start_on(rank, method, *before) for rank in ranks]
            sends += now
            before = now if in_turn else []
        told = self._trainers.wait([*started, *sends])[len(started) :]
        return [one for of_rank in told if of_rank is not None for one in _each(of_rank)]

    def forget(self) -> None:
        """Makes the ranks remove the files that they wrote for the engines."""
        self._trainers.call("forget_weights")

    def buckets(self, checksums: bool = True) -> Iterator[tuple[Handle, list[Handle]]]:
        """See WeightStream. Rank 0 returns the bucket. To gather the bucket, rank 0 needs the
        `next_bucket` calls of all other ranks.

        This method calls `begin_weight_stream` and `next_bucket` on the ranks. The method
        `checksums` calls `end_weight_stream` on the ranks. Requests the next bucket before yielding
        the current bucket, so that the ranks gather the next bucket while the caller uses the
        current one. At most three buckets exist at a time: the next bucket, the current bucket, and
        the previous bucket, if the caller still holds it.
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
