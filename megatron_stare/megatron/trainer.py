"""Defines one rank of the trainer as a plain class. A runner creates the trainer either in the
runner's own process or in a Ray actor.

The trainer builds model and optimizer, serves the driver's calls, and saves and loads checkpoints.
The module step.py processes a rollout batch, and the weight stream passes new weights to the
engines.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_stare.config.performance import check_device_performance, chosen
from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.config.rules import check_device
from megatron_stare.errors import DataError
from megatron_stare.megatron.backend.cpu_backend import device, uses_cuda
from megatron_stare.megatron.backend.layout import join, leave
from megatron_stare.megatron.batching.microbatch import RankBatch
from megatron_stare.megatron.batching.sequence_layout import sequence_layout
from megatron_stare.megatron.checkpoint import checkpoint
from megatron_stare.megatron.checkpoint.background_save import BackgroundSave
from megatron_stare.megatron.checkpoint.checkpoint import load_start
from megatron_stare.megatron.export.device_send import DeviceSend
from megatron_stare.megatron.export.export import HfExport, PolicyStream, export_hf
from megatron_stare.megatron.export.stage_send import StageSend
from megatron_stare.megatron.model import routing_replay
from megatron_stare.megatron.model.head import (
    Head,
    HeadChoice,
    choose_head,
    free_memory,
    largest_logits,
)
from megatron_stare.megatron.model.model import build_policy, finish_gather
from megatron_stare.megatron.optimizer.offload import PARTS, DeviceState
from megatron_stare.megatron.optimizer.optimizer import build_optimizer
from megatron_stare.megatron.optimizer.optimizer_state import adam_name, chain
from megatron_stare.megatron.step.differences import Compared
from megatron_stare.megatron.step.not_finite import NotFinite, OwnGradients, look
from megatron_stare.megatron.step.passes import Reference, compute_log_probs
from megatron_stare.megatron.step.rank_memory import RankMemory
from megatron_stare.megatron.step.state_sums import RankProof, state_sums
from megatron_stare.megatron.step.step import Policy, Step
from megatron_stare.models.shape import ModelShape
from megatron_stare.process.memory import keep_freed
from megatron_stare.process.versions import computes_on
from megatron_stare.records.batch import MicroBatchPlan
from megatron_stare.records.log_prob_difference import LogProbDifference
from megatron_stare.records.rollout_batch import RankShare
from megatron_stare.records.token_numbers import TokenNumbers
from megatron_stare.weights.files.manifest import (
    Sum,
    check_bytes,
    read_manifest,
    shares,
    tensors_of,
)
from megatron_stare.weights.files.safetensors_file import Entry
from megatron_stare.weights.sync.stream_plan import BucketLayout
from megatron_stare.weights.sync.target import SyncTarget

UNREPLAYED = (
    "moe.routing_replay: off; in 16 bits engine and trainer choose other experts for some tokens,"
    " whose log-probs then differ by more than rounding alone would make them"
)


@contextlib.contextmanager
def marked(name: str) -> Iterator[None]:
    """Marks a pass in a profiler's trace. On CUDA, also marks the pass as an NVTX range, which
    `nsys profile` shows."""
    with contextlib.ExitStack() as marks:
        marks.enter_context(record_function(name))
        if torch.cuda.is_available():
            marks.enter_context(torch.cuda.nvtx.range(name))
        yield


class StepProfile:
    """Records the torch operators of this process until `write` is called. On CUDA, also records
    the process's kernels."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def write(self, file: Path) -> None:
        """Ends the recording and writes a Chrome trace, compressed if the name ends in .gz.

        Raises:
            OSError: the file cannot be written. The recording ends even in this case.
        """
        self._profile.stop()
        file.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(file))


class Trainer:
    """A rank of the Megatron trainer. Raises UserError if this rank's device does not support the
    configuration, or if this rank cannot connect to the other ranks."""

    def __init__(self, run: ResolvedRun, rank: int, init_method: str) -> None:
        config, shape = run.config, run.shape
        self._rank = rank
        if not torch.cuda.is_available():
            torch.set_num_threads(config.runtime.trainer_threads)
            keep_freed()
        check_device(config, experts=shape.experts > 0)
        check_device_performance(config.performance)
        config = config.model_copy(update={"performance": chosen(config, shape)})
        self.config, self.method = config, run.method
        fused = config.performance.swiglu_fusion or config.performance.bias_fusion
        # now, because files may change during the run
        self._computes_on = computes_on(
            compiled=bool(fused) and uses_cuda(), unordered=shape.experts > 0 and uses_cuda()
        )
        timeout_s = config.faults.requests.collective_limit(config.runtime.timeout_s)
        layout = join(config.parallel, rank, init_method, config.run.seed, timeout_s)
        model = build_policy(
            shape,
            config.model,
            config.parallel,
            layout,
            config.optimizer.distributed,
            config.performance,
            config.moe,
        )
        if config.moe.routing_replay:
            routing_replay.install(model)
        self._own_gradients = OwnGradients(model)
        load_start(model, config.model.path, shape, layout)
        # built after the weights are loaded, because it copies them into float32 masters
        optimizer, scheduler = build_optimizer(
            model,
            config.optimizer,
            config.model.dtype,
            config.run.steps * config.batch.updates,
            config.performance,
        )
        reference = Reference(config, shape, layout) if self.method.needs_reference else None
        self._head_choice = self._choose_head(shape)
        head = Head(
            shape.vocab_size,
            config.rollout.temperature,
            layout,
            self.method.needs_entropy_gradient,
            self._head_choice.mode,
            config.model.head_chunk_tokens,
        )
        self.policy = Policy(model, shape, layout, head, optimizer, scheduler, reference)
        self.memory = DeviceState(
            model, optimizer, reference.model if reference is not None else ()
        )
        self._counts = RankMemory(self.memory)
        self._sequences = sequence_layout(config, layout)
        self.stream = PolicyStream(model, shape, layout, config.rollout.sync_bucket_mb * 2**20)
        self._stage_send: StageSend | None = None
        self._device_send: DeviceSend | None = None
        # whichever of the two serves the current weight update
        self._prepared: StageSend | DeviceSend | None = None
        self._step: Step | None = None
        self._profile: StepProfile | None = None
        self._saver = checkpoint.Saver(layout, config.checkpoint.writers)
        self._saving: BackgroundSave | None = None
        self._export: HfExport | None = None

    def _choose_head(self, shape: ModelShape) -> HeadChoice:
        """Chooses the mode of the output head. If the setting `model.head` is `auto`, the choice
        depends on the memory that model and optimizer leave free. Otherwise, `model.head` names the
        mode.

        The mode of the output head is chosen only once, because the log-prob pass and the training
        pass must use the same mode. All ranks choose the same mode, because the choice depends on
        the free memory of the rank that has the least free memory.
        """
        asked = self.config.model.head
        if asked != "auto":
            return HeadChoice(asked, "")
        return choose_head(self.method.coupling, largest_logits(self.config, shape), free_memory())

    def notes(self) -> list[str]:
        """Returns one-line messages for the user about decisions that this rank made."""
        choice = self._head_choice
        notes = [f"model.head: {choice.mode}, because {choice.reason}"] if choice.reason else []
        if (
            self.policy.shape.experts
            and self.config.model.dtype != "float32"
            and not self.config.moe.routing_replay
        ):
            notes.append(UNREPLAYED)
        return [*notes, f"optimizer: {adam_name(chain(self.policy.optimizer)[0].optimizer)}"]

    @property
    def step(self) -> Step:
        """The Step object for the rollout batch on which the last log-prob pass ran."""
        if self._step is None:
            raise RuntimeError("there is no batch before compute_log_probs()")
        return self._step

    def stage(self) -> int:
        """Returns this rank's pipeline stage."""
        return self.policy.layout.pp_rank

    def data_rank(self) -> int:
        """Returns the data-parallel rank whose share of a batch this rank processes."""
        return self.policy.layout.dp_rank

    def offload(self, parts: Collection[str] = PARTS) -> None:
        """Offloads parts of the policy (offload.py) to host memory. A later call that needs an
        offloaded part brings the part back to the device.

        All ranks must call `offload`. Offloading is safe between any two calls, even while a
        checkpoint is being written. The checkpoint's writer processes read either a separate copy
        of the data, or memory that the writer processes inherited when they were forked. Offloading
        changes neither of these.
        """
        self.memory.offload(parts)
        # Megatron keeps a table for each of 32 lengths on the device, 16 MB for 32k tokens
        RotaryEmbedding.forward.cache_clear()

    def onload(self, parts: Collection[str] = PARTS) -> None:
        """Brings parts of the policy back to the device. Gradients are zeros afterwards."""
        self.memory.onload(parts)

    def memory_mb(self) -> dict[str, float]:
        """See RankMemory.take_mb."""
        return self._counts.take_mb()

    def _batch_of(self, share: RankShare, plan: MicroBatchPlan) -> RankBatch:
        return RankBatch(share, plan, self.data_rank(), device(), self._sequences)

    def compute_log_probs(self, share: RankShare, plan: MicroBatchPlan) -> None:
        """Computes log-prob and entropy of every response token under the current policy, without a
        backward pass.

        Raises:
            DataError: routing replay is on, but the batch does not contain the experts.
        """
        if self.config.moe.routing_replay and share.experts is None:
            raise DataError(
                "the rollout batch does not name the experts of its tokens",
                where="moe.routing_replay",
                fix=(
                    "an environment that makes its own Trajectory must pass on the last turn's"
                    " `experts`"
                ),
            )
        self.onload(("parameters", "reference"))
        self._step = Step(self.config, self.method, self.policy, self._batch_of(share, plan))
        with self._counts.counting(), marked("log_probs"):
            self._step.compute_log_probs()

    def compare(
        self, versions: Sequence[int], temperature: float | None = None
    ) -> LogProbDifference | None:
        """Compares the engine's log-probs of the last batch with the trainer's log-probs. The
        trainer's log-probs come from the log-prob pass, or from a new pass if `temperature` is
        given. All ranks must call `compare`.

        Args:
            versions: versions of the weights that sampled the whole batch.

        Returns:
            The difference over the tokens of all ranks on the reporting rank, and None on other
                ranks.
        """
        batch, measured = self.step.batch, self.step.measured
        here = measured.tokens.old_log_prob if measured is not None else None
        if temperature is not None:
            here = self._log_probs(batch, temperature)
        found = self._differences(
            batch, [batch.share.rollout_log_probs[batch.held]], here, versions
        )
        return found[0] if found else None

    def compare_with(
        self, share: RankShare, plan: MicroBatchPlan, engines: Tensor, temperature: float
    ) -> list[LogProbDifference] | None:
        """Compares the trainer's log-probs of any batch, at any temperature, with the log-probs of
        several engines; see `compare`.

        The engines' log-probs, [engines, whole batch], must be in canonical order. `compare_with`
        leaves the trainer's last batch unchanged.
        """
        batch = self._batch_of(share, plan)
        log_prob = self._log_probs(batch, temperature)
        return self._differences(batch, [engine[batch.index] for engine in engines], log_prob, ())

    def _log_probs(self, batch: RankBatch, temperature: float) -> Tensor | None:
        """Returns log-probs [N] on the last stage and None on other stages. All ranks must call
        `_log_probs` together."""
        self.onload(("parameters",))
        log_prob, *_ = compute_log_probs(
            self.policy.model, batch, replace(self.policy.head, temperature=temperature)
        )
        return log_prob if self.policy.layout.last_stage else None

    @torch.no_grad()
    def _differences(
        self,
        batch: RankBatch,
        engines: Sequence[Tensor],
        trainer: Tensor | None,
        versions: Sequence[int],
    ) -> list[LogProbDifference] | None:
        """Compares every engine's log-probs [N] with the trainer's log-probs. On the reporting
        rank, returns a list with one LogProbDifference for each engine. On other ranks, returns
        None."""
        if trainer is None:
            return None
        parts = [Compared.of(batch, engine, trainer, versions) for engine in engines]
        found = [part.summary(batch.layout.group) for part in parts]
        return found if self.policy.layout.is_reporting_rank else None

    def measure(self, state: dict[str, float]) -> None:
        """Computes the method's statistics over the rollout batch. Also computes the method's state
        for this step from the state of the previous step."""
        self.step.measure(state)

    def update(
        self,
        number: int = 0,
        dump_to: str | None = None,
        watched: Sequence[int] = (),
        norm_limit: float = math.inf,
    ) -> tuple[dict[str, float], dict[str, float]] | None:
        """Trains on one mini-batch: runs the forward pass and the backward pass, clips the
        gradient, and takes an optimizer step.

        Args:
            number: number of the update, counted from 0. Every epoch takes the mini-batches in the
                same order.
            dump_to: folder for a dump of the first update's mini-batch, loss and gradients, and of
                the weights before this update, or None for no dump.
            watched: samples of the whole batch whose token numbers `token_numbers` will return.
            norm_limit: largest gradient norm before clipping at which the update is still taken.

        Returns:
            The metrics and the method's state for the next step on the reporting rank, and None on
                other ranks. The first update's metrics include the metrics of the rollout batch. If
                no optimizer step was taken, one of four metrics tells the reason. `update/finite`
                is 0 if loss or gradient was not finite. `update/empty` is 1 if no token had a loss.
                `update/skipped` is 1 if the loss scale was too large. `update/held` is 1 if the
                gradient norm was above `norm_limit`.
        """
        self.onload(("parameters", "gradients", "optimizer"))
        with self._counts.counting(), marked("update"):
            return self.step.update(number, dump_to, watched, norm_limit)

    def begin_profile(self) -> None:
        """Records this rank's operations until `end_profile` is called."""
        self._profile = StepProfile()

    def end_profile(self, folder: str, step: int) -> str | None:
        """Writes the recording to step_..._rank_....json.gz.

        Returns:
            The reason why the recording could not be written, or None if it was written.
        """
        assert self._profile is not None
        try:
            self._profile.write(Path(folder) / f"step_{step:06d}_rank_{self._rank}.json.gz")
        except OSError as error:
            return f"the trace of rank {self._rank} could not be written: {error}"
        return None

    def not_finite(self) -> NotFinite:
        """Searches this rank's weights, gradients and samples for NaN and infinite numbers. Call
        `not_finite` after an update that was skipped because of NaN or infinite numbers."""
        measured = self.step.measured
        tokens = measured.tokens if measured is not None else None
        return look(
            self.policy.model, self.policy.layout, self._own_gradients, tokens, self.step.lost
        )

    def log_probs(self) -> tuple[Tensor, Tensor] | None:
        """Returns two tensors [N] for the N response tokens of the last batch that this rank
        processed: the index of every token, and the log-prob of every token. An index is a response
        token's position in the batch's canonical order.

        Only one rank of each tensor-parallel group of the last stage returns indices and log-probs.
        All other ranks return None.
        """
        measured = self.step.measured
        if measured is None or self.policy.layout.tp_rank != 0:
            return None
        return measured.tokens.index.cpu(), measured.tokens.old_log_prob.detach().cpu()

    def token_numbers(self) -> list[TokenNumbers]:
        """Returns the per-token values (TokenNumbers) of the watched samples in the last rollout
        batch. The per-token values come from the first epoch of updates on this batch. One rank of
        each tensor-parallel group of the last stage returns TokenNumbers, and every other rank
        returns an empty list."""
        return self.step.token_numbers()

    def refresh_reference(self) -> None:
        """Copies the current policy's weights into the reference policy."""
        if self.policy.reference is None:
            raise RuntimeError("there is no reference policy")
        self.onload(("parameters", "reference"))
        finish_gather(self.policy.model)
        self.policy.reference.refresh(self.policy.model)

    def export(self) -> dict[str, Tensor]:
        """Returns a dict that maps the Hugging Face name of every tensor of the policy to the
        tensor. Every rank except the first returns an empty dict. Use `export` only for models that
        fit into one process."""
        self.onload(("parameters",))
        finish_gather(self.policy.model)
        return export_hf(self.policy.model, self.policy.shape, self.policy.layout)

    def bucket_layouts(self) -> tuple[BucketLayout, ...]:
        """Returns the layout of each bucket of the weight stream. The layout of a bucket lists the
        bucket's tensors."""
        return self.stream.layouts

    def begin_weight_stream(self, checksums: bool = True) -> None:
        """Starts to stream the policy. All ranks must call `begin_weight_stream`, then
        `next_bucket` for every bucket, then `end_weight_stream`.

        Args:
            checksums: whether to compute the checksums that `end_weight_stream` returns. If False,
                each checksum is "".
        """
        self.onload(("parameters",))
        finish_gather(self.policy.model)
        self.stream.begin(checksums)

    def next_bucket(self) -> Tensor | None:
        """Returns the next bucket of whole tensors as one flat tensor on the first rank, and None
        on other ranks."""
        return self.stream.next()

    def end_weight_stream(self) -> dict[str, str]:
        """Ends the weight stream. On the first rank, returns a dict that maps the name of each
        streamed tensor to the tensor's checksum. On every rank except the first, returns an empty
        dict."""
        return self.stream.end()

    def prepare_weights(self, target: SyncTarget, prove: bool) -> None:
        """Prepares to send the current weights to the engines. If the engines do not share devices
        with the trainer, `prepare_weights` gathers the first bucket of this stage's weights. All
        ranks must call `prepare_weights`.

        Args:
            prove: whether senders compute checksums for the engines to verify.
        """
        self.onload(("parameters",))
        policy = self.policy
        finish_gather(policy.model)
        bucket_bytes = self.config.rollout.sync_bucket_mb * 2**20
        # created when an engine first receives weights this way
        if target.shares_devices:
            if self._device_send is None:
                self._device_send = DeviceSend(
                    policy.model, policy.layout, policy.shape, bucket_bytes
                )
            self._prepared = self._device_send
        else:
            if self._stage_send is None:
                self._stage_send = StageSend(
                    policy.model, policy.layout, policy.shape, self.stream.plan, bucket_bytes
                )
            self._prepared = self._stage_send
        self._prepared.prepare(target, prove)

    def send_weights(self, *after: Any) -> Any:
        """Sends this stage's weights, or all weights if engines share devices with the trainer. All
        ranks of the stage must call `send_weights` after `prepare_weights`. If engines share
        devices with the trainer, all ranks of the trainer must call `send_weights`.

        Args:
            after: results of other workers' calls that must finish first; their values are ignored.

        Returns:
            The `Sender.end` result on the stage's first rank, and None on other ranks. The engines
                verify this result. If devices are shared, each rank instead returns a list of such
                results, for the engines whose handles the rank collects.
        """
        if self._prepared is None:
            raise _nothing_prepared()
        return self._prepared.send()

    def send_own_weights(self, *after: Any) -> Any:
        """Sends the experts that this rank owns, unless this rank has already sent them. `after` is
        described in `send_weights`.

        Returns:
            The `Sender.end` result, which the engines verify, or None if this rank has no experts
                left to send.
        """
        if not isinstance(self._prepared, StageSend):
            raise _nothing_prepared()
        return self._prepared.send_own()

    def forget_weights(self) -> None:
        """Deletes the weight files that this rank has written for the engines. Does nothing if the
        engines do not read the weights from files."""
        if self._stage_send is not None:
            self._stage_send.forget()

    def own_tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns the shape and dtype of each policy tensor that this rank will write, keyed by
        Hugging Face name. All ranks must call `own_tensors`."""
        self.onload(("parameters",))
        policy = self.policy
        finish_gather(policy.model)
        self._export = HfExport(policy.model, policy.layout, policy.shape, self.stream.plan)
        return self._export.own()

    def write_tensors(self, entries: dict[str, Entry]) -> None:
        """Writes this rank's tensors, as listed by `own_tensors`, into their files. All ranks must
        call `write_tensors` after `own_tensors`.

        Raises:
            UserError: the tensors cannot be written.
        """
        if self._export is None:
            raise RuntimeError("there is nothing to write before own_tensors()")
        self.onload(("parameters",))
        self._export.write(entries)

    @property
    def _moving_reference(self) -> list[nn.Module]:
        """The reference policy's model chunks if the configuration refreshes the reference policy,
        else an empty list. If the reference policy is refreshed, every checkpoint must contain the
        reference policy."""
        reference = self.policy.reference
        moves = self.config.model.reference_refresh_every is not None
        return reference.model if reference is not None and moves else []

    def place(self) -> str:
        """Returns a text that contains the name of this rank's device, the versions of the
        libraries in use, and a digest of this package's code. See `computes_on`."""
        return self._computes_on

    def prove(self, share: RankShare, plan: MicroBatchPlan) -> RankProof:
        """Returns the log-probs of a canary batch, the sums of this rank's tensors, and the step
        counts of Adam and of the schedule. To verify a loaded checkpoint, the driver compares the
        results of `prove` for the loaded state with the results for the saved state. All ranks must
        call `prove`."""
        self.onload(("parameters", "optimizer", "reference"))
        policy, moving = self.policy, self._moving_reference
        finish_gather(policy.model)
        batch = self._batch_of(share, plan)
        found = {"policy": compute_log_probs(policy.model, batch, policy.head)[0]}
        # a fixed reference is no part of the checkpoint: its folder may have changed
        if policy.reference is not None:
            found["reference policy"] = policy.reference.compute_log_probs(batch, policy.head)
        log_probs = {name: (batch.index, each.float().cpu()) for name, each in found.items()}
        return RankProof(log_probs if policy.layout.last_stage else {}, *state_sums(policy, moving))

    def save(self, folder: str) -> None:
        """Begins to write this rank's part of a checkpoint into an existing, empty folder. Returns
        as soon as training may continue. All ranks must call `save`, and must call `finish_save`
        before the next `save`."""
        self.onload(("parameters", "optimizer", "reference"))
        policy = self.policy
        finish_gather(policy.model)
        self._saving = self._saver.begin(
            folder, policy.model, policy.optimizer, policy.scheduler, self._moving_reference
        )

    def saved(self) -> bool:
        """Returns True if all processes that write this rank's part of the checkpoint have finished
        or failed. Unlike `saved`, `finish_save` waits for all ranks."""
        return self._saving is None or self._saving.written()

    def wait_saved(self) -> None:
        """Waits until all processes that write this rank's part of the checkpoint have finished or
        failed."""
        if self._saving is not None:
            self._saving.wait()

    def finish_save(self) -> dict[str, Sum]:
        """Waits until the whole checkpoint is written. All ranks must call `finish_save`.

        Returns:
            Lengths and checksums of the files that this rank wrote, by name.

        Raises:
            UserError: the checkpoint could not be written.
        """
        saving, self._saving = self._saving, None
        return {} if saving is None else saving.finish()

    def verify(self, folder: str) -> None:
        """Verifies the checksums of this rank's share of a checkpoint's tensor files. Raises
        DataError if a file changed since it was written. Checkpoints of earlier releases contain no
        checksums. For a checkpoint without checksums, `verify` checks no file and raises no
        error."""
        sums, layout = read_manifest(Path(folder)) or {}, self.policy.layout
        mine = shares(tensors_of(sums), layout.world)[layout.rank]
        check_bytes(Path(folder), mine, self.config.checkpoint.writers)

    def load(self, folder: str) -> None:
        """Resumes from a checkpoint folder. All ranks must call `load`."""
        self.onload()
        policy = self.policy
        checkpoint.load(
            folder,
            policy.model,
            policy.optimizer,
            policy.scheduler,
            policy.layout,
            self._moving_reference,
        )

    def close(self) -> None:
        """Drops an unfinished checkpoint, closes the connections to the engines, and leaves the
        process groups."""
        if self._saving is not None:
            self._saving.drop()
        for send in (self._stage_send, self._device_send):
            if send is not None:
                send.close()
        leave()


def _nothing_prepared() -> RuntimeError:
    return RuntimeError("there is nothing to send before prepare_weights()")
