"""The policy's Hugging Face tensors written by the ranks that hold them: a tensor-parallel group gathers those that are
its own, bucket by bucket, on its first rank, which puts them into its files. Nobody holds the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_stare.errors import UserError
from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.export.export import EXPORT_BUCKET_BYTES, shards
from megatron_stare.models import rule_for
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.files.hf_folder import fill
from megatron_stare.weights.files.safetensors_file import Entry
from megatron_stare.weights.sync.stream import stream
from megatron_stare.weights.sync.stream_plan import SENDER, StreamPlan, plan_stream


class HfExport:
    """A rank's end of writing the policy. All ranks must make it, and call `write`."""

    def __init__(self, model: list[nn.Module], layout: Layout, shape: ModelShape, whole: StreamPlan) -> None:
        """`whole` is the plan of the weight stream, in which every tensor comes from one tensor-parallel group alone:
        that of the lowest ranks that hold it."""
        self._group = layout.tp_group
        ranks = set(dist.get_process_group_ranks(self._group))
        planned = (tensor for bucket in whole.buckets for tensor in bucket.tensors)
        own = {tensor.name for tensor in planned if {piece.rank for piece in tensor.pieces} <= ranks}
        self._shards = shards(model, layout)
        held = [shard for shard in self._shards if own.issuperset(rule_for(shard.name, shape).sources)]
        self._plan = plan_stream(held, shape, EXPORT_BUCKET_BYTES, self._group)

    def own(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what this rank will write, by name."""
        if dist.get_rank(self._group) != SENDER:
            return {}
        return {
            slot.name: (slot.shape, bucket.layout.dtype)
            for bucket in self._plan.buckets
            for slot in bucket.layout.slots
        }

    @torch.no_grad()
    def write(self, entries: Mapping[str, Entry]) -> None:
        """Writes this rank's tensors where they go.

        Raises:
            UserError: they cannot be written.
        """
        try:
            fill(entries, self._tensors())
        except OSError as error:
            where = str(next(iter(entries.values())).file.parent)
            raise UserError(f"the policy could not be written ({error.strerror})", where=where) from error

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        if not self._plan.buckets:
            return
        for bucket in stream(self._plan, self._shards, self._group):
            if bucket is not None:
                yield from bucket.tensors()
