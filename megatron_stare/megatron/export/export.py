"""Exports the policy, or its gradients, as whole Hugging Face tensors. Either the first rank gets
all tensors, or several ranks write the tensors to files. The weight stream assembles each whole
tensor from the shards that Megatron's ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_stare.errors import UserError
from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.model.model import named_parameters, named_weights, part_of
from megatron_stare.models import rule_for
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.files.hf_folder import fill
from megatron_stare.weights.files.safetensors_file import Entry
from megatron_stare.weights.sync.stream import Bucket, stream
from megatron_stare.weights.sync.stream_plan import (
    SENDER,
    BucketLayout,
    Shard,
    StreamPlan,
    plan_stream,
)

EXPORT_BUCKET_BYTES = 64 * 2**20


def main_grad(parameter: nn.Parameter) -> Tensor:
    """Returns a view of a parameter's gradient in Megatron's gradient buffer. With the distributed
    optimizer, the buffer contains reduced gradients only in this rank's shard, until
    `gather_gradients` fills the other shards."""
    return parameter.main_grad.view_as(parameter)  # type: ignore[attr-defined]


def shards(
    model: list[nn.Module], layout: Layout, of: Callable[[nn.Parameter], Tensor] | None = None
) -> list[Shard]:
    """Returns this rank's weights, detached. The caller can pass a function as the argument `of`.
    If the caller passes a function, `shards` calls the function for each parameter, and uses the
    returned tensor instead of the parameter's weights. The returned tensor must have the
    parameter's shape."""
    if of is None:
        return [
            Shard(name, weight.detach(), *part_of(name, weight, layout))
            for name, weight in named_weights(model)
        ]
    return [
        Shard(name, of(parameter), *part_of(name, parameter, layout))
        for name, parameter in named_parameters(model)
    ]


def export_hf(
    model: list[nn.Module],
    shape: ModelShape,
    layout: Layout,
    of: Callable[[nn.Parameter], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Returns a dict of all tensors in host memory, keyed by Hugging Face name. On every rank
    except the first, the dict is empty. All ranks must call `export_hf`.

    Use `export_hf` only for models that fit into one process. For larger models, use PolicyStream.

    Args:
        of: function that maps a parameter to the tensor to export instead of the parameter's
            weights, e.g. to its gradient. The tensor has the parameter's shape.
    """
    held, group = shards(model, layout, of), dist.group.WORLD
    buckets = stream(plan_stream(held, shape, EXPORT_BUCKET_BYTES, group), held, group)
    named = (pair for bucket in buckets if bucket is not None for pair in bucket.tensors())
    return {name: tensor.to("cpu", copy=True) for name, tensor in named}


def export_gradients(
    model: list[nn.Module], shape: ModelShape, layout: Layout, loss_scale: Tensor | None = None
) -> dict[str, Tensor]:
    """Returns the gradients as a dict of the same form as the dict of weights that `export_hf`
    returns. Each returned gradient is already reduced over the data-parallel ranks. All ranks must
    call `export_gradients` after backward. If the call comes after the optimizer step, the returned
    gradients are clipped.

    Args:
        loss_scale: 0-dim factor by which the loss was multiplied, or None for a factor of 1.
    """
    gather_gradients(model)
    unscaled = (
        main_grad if loss_scale is None else lambda parameter: main_grad(parameter) / loss_scale
    )
    return export_hf(model, shape, layout, of=unscaled)


@torch.no_grad()
def gather_gradients(model: list[nn.Module]) -> None:
    """All-gathers the shards of reduce-scattered gradient buffers over the data-parallel ranks.
    Each rank's own shard stays unchanged."""
    for chunk in model:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):  # type: ignore[misc]
            if not group.ddp_config.use_distributed_optimizer:
                continue
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                # Megatron pads buffers to equal shards
                shard = bucket.grad_data.chunk(ranks.size())[ranks.rank()]
                dist.all_gather_into_tensor(bucket.grad_data, shard.clone(), group=ranks)


class PolicyStream:
    """Streams the policy's weights from all ranks to the first rank, for a weight sync. The stream
    is planned once, and runs again for every weight sync.

    All ranks must create a PolicyStream and make the same calls: first `begin`, then `next` for
    every bucket, then `end`. `next` and `end` return data only on the first rank.
    """

    def __init__(
        self, model: list[nn.Module], shape: ModelShape, layout: Layout, bucket_bytes: int
    ) -> None:
        self._model, self._layout = model, layout
        self.plan = plan_stream(shards(model, layout), shape, bucket_bytes, dist.group.WORLD)
        self._buckets: Iterator[Bucket | None] = iter(())
        self._checksums: dict[str, str] = {}
        self._computed = True

    @property
    def layouts(self) -> tuple[BucketLayout, ...]:
        """The layout of each bucket. The receiver of a bucket needs the bucket's layout."""
        return self.plan.layouts

    def begin(self, checksums: bool = True) -> None:
        """Starts streaming the current weights.

        Args:
            checksums: whether `end` returns computed checksums. Otherwise, each checksum is "".
        """
        # Drains messages left over from a sync that an error interrupted, which would be mistaken
        # for this one's.
        self._finish()
        self._buckets = stream(self.plan, shards(self._model, self._layout), dist.group.WORLD)
        self._checksums, self._computed = {}, checksums

    @torch.no_grad()
    def next(self) -> Tensor | None:
        """Returns the next bucket as one flat tensor in host memory on the first rank, and None on
        other ranks."""
        bucket = next(self._buckets)
        if bucket is None:
            return None
        bucket = Bucket(bucket.layout, bucket.flat.cpu())
        # computed while the next bucket is on its way
        names = dict.fromkeys((slot.name for slot in bucket.layout.slots), "")
        self._checksums |= bucket.checksums() if self._computed else names
        return bucket.flat

    def end(self) -> dict[str, str]:
        """Waits until all buckets are sent. Returns the checksum of each tensor, keyed by tensor
        name."""
        self._finish()
        return self._checksums

    def _finish(self) -> None:
        for _ in self._buckets:
            pass


class HfExport:
    """Writes the policy to files from several ranks, so that no rank ever holds the whole model.

    A tensor-parallel group gathers its own tensors, bucket by bucket, on its first rank. The first
    rank of the group then writes the gathered tensors to files. All ranks must create an HfExport
    and call `write`.
    """

    def __init__(
        self, model: list[nn.Module], layout: Layout, shape: ModelShape, whole: StreamPlan
    ) -> None:
        """`whole` is the plan of a PolicyStream for the whole model. In the plan `whole`, each
        tensor comes from a single tensor-parallel group. If several tensor-parallel groups hold a
        tensor, the plan takes the tensor from the group with the lowest ranks."""
        self._group = layout.tp_group
        ranks = set(dist.get_process_group_ranks(self._group))
        planned = (tensor for bucket in whole.buckets for tensor in bucket.tensors)
        own = {
            tensor.name for tensor in planned if {piece.rank for piece in tensor.pieces} <= ranks
        }
        self._shards = shards(model, layout)
        held = [
            shard for shard in self._shards if own.issuperset(rule_for(shard.name, shape).sources)
        ]
        self._plan = plan_stream(held, shape, EXPORT_BUCKET_BYTES, self._group)

    def own(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns the shape and dtype of each tensor that this rank will write, keyed by tensor
        name."""
        if dist.get_rank(self._group) != SENDER:
            return {}
        return {
            slot.name: (slot.shape, bucket.layout.dtype)
            for bucket in self._plan.buckets
            for slot in bucket.layout.slots
        }

    @torch.no_grad()
    def write(self, entries: Mapping[str, Entry]) -> None:
        """Writes this rank's tensors into their files.

        Raises:
            UserError: the tensors cannot be written.
        """
        try:
            fill(entries, self._tensors())
        except OSError as error:
            where = str(next(iter(entries.values())).file.parent)
            raise UserError(
                f"the policy could not be written ({error.strerror})", where=where
            ) from error

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        if not self._plan.buckets:
            return
        for bucket in stream(self._plan, self._shards, self._group):
            if bucket is not None:
                yield from bucket.tensors()
