"""Builds a rank on the meta device, where tensors have no data, to find the rank's tensors and
their sizes in bytes.

`plan_rank` builds a rank with the same functions that a run uses. `plan_rank` builds the requested
rank, and does not derive it from another rank by symmetry.

`build_parts` builds the embedding and the head of a model, and one layer of each kind. The function
`stage_bytes` takes the result of `build_parts` and a layout, and computes how many bytes the first
rank of a pipeline stage needs. Many layouts can use the same result of `build_parts`. All layers of
a model are alike, except that leading dense layers differ from layers with experts. Every rank
holds some layers. A rank of the first stage also holds the embedding, and a rank of the last stage
also holds the final norm and the output layer. The tensors of the embedding, of the head and of one
layer of each kind therefore determine the tensors of every rank. Only the numbers of
tensor-parallel and expert-parallel ranks determine how a layer is split over ranks. One build per
pair of tensor-parallel and expert-parallel sizes therefore suffices for all pipeline, data and
context sizes. The test tests/megatron/test_planned_parts.py compares `stage_bytes` with
`plan_rank`. Both functions must give exactly the same numbers of bytes for the first rank of each
pipeline stage.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    apply_factories,
    is_main_replica,
)
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_stare.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_stare.megatron.backend.cpu_backend import backend, on_meta, substituted
from megatron_stare.megatron.backend.layout import Layout, cut_world, leave
from megatron_stare.megatron.export.export import shards
from megatron_stare.megatron.model.model import (
    build_model,
    build_policy,
    gradient_buffers,
    is_expert,
    named_parameters,
    unwrap,
)
from megatron_stare.megatron.optimizer.optimizer import build_optimizer
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.sync.stream_plan import Held, held_pieces

NO_WAIT_S = 1.0  # timeout of collectives, which return at once here
ITEMS = ("parameters", "gradients", "main parameters", "moments")
# in a buffer cut over replicas, a parameter starts at a multiple of this many elements
_ALIGNED = 64
_BUCKET = 128  # and a bucket ends at a multiple of this
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@contextlib.contextmanager
def pretend(parallel: ParallelConfig, rank: int) -> Iterator[Layout]:
    """Lets this process act as the given rank on the meta device while the context is open.
    Collectives return immediately, without other ranks' data, so use `pretend` only to build models
    and optimizers."""
    # torch wraps sys.excepthook again with every process group
    hook = substituted(sys, "excepthook", sys.excepthook)
    with on_meta(), hook, substituted(dist, "new_group", _fake_group):
        dist.init_process_group(
            "fake", rank=rank, world_size=parallel.world_size, store=FakeStore()
        )
        try:
            yield cut_world(parallel, rank, timeout_s=NO_WAIT_S)
        finally:
            leave()


_new_group = dist.new_group


def _fake_group(*args: Any, **options: Any) -> Any:
    """Creates a process group with the world's backend even if gloo is requested, because gloo
    would wait for the other ranks."""
    return _new_group(*args, **{**options, "backend": None})


@dataclass(frozen=True)
class StatePart:
    """Describes one entry of the whole model's checkpoint. An entry is either a part of a tensor or
    an object (Megatron's ShardedObject). For an object, `dtype` is None, `whole` is the shape of
    Megatron's grid of objects, and `start` is the object's place in this grid."""

    key: str
    dtype: torch.dtype | None
    whole: tuple[int, ...]  # the sizes of the whole tensor
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    main: bool  # whether this rank is the replica that writes it


@dataclass(frozen=True)
class RankPlan:
    """The bytes and tensors that one rank of a parallel layout holds.

    `replica`: index of the data-parallel replica that the rank's parameters belong to.
    `expert_replica`: index of the data-parallel replica that the rank's experts belong to.
    `nbytes`: number of bytes for each kind of memory. The constant ITEMS lists the kinds of memory.
    `held`: the rank's pieces of the Hugging Face tensors.
    `state`: the rank's parts of the model's checkpoint.
    `with_data`: names of tensors that are not on the meta device. The list should be empty.
    """

    rank: int
    tp_rank: int
    pp_rank: int
    replica: int
    expert_replica: int
    nbytes: dict[str, int]
    held: list[Held]
    state: list[StatePart]
    with_data: list[str]


def plan_rank(
    shape: ModelShape,
    model: ModelConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    rank: int,
) -> RankPlan:
    """Returns the plan of one of the `parallel.world_size` ranks. Builds only this rank.

    Raises:
        KeyError: a parameter is missing from the model family's table of names.
    """
    with pretend(parallel, rank) as layout:
        chunks = build_policy(shape, model, parallel, layout, optimizer.distributed)
        trained, _ = build_optimizer(chunks, optimizer, model.dtype, steps=1)
        held = held_pieces(shards(chunks, layout), shape, rank)
        return RankPlan(
            rank=rank,
            tp_rank=layout.tp_rank,
            pp_rank=layout.pp_rank,
            replica=layout.dp_rank * layout.cp + layout.cp_rank,
            expert_replica=layout.expert_dp_rank,
            nbytes=_nbytes(chunks, trained, optimizer),
            held=held,
            state=_state(chunks),
            with_data=[
                name
                for name, tensor in _everything(chunks, trained)
                if tensor.device.type != "meta"
            ],
        )


def _nbytes(
    chunks: list[nn.Module], optimizer: MegatronOptimizer, config: OptimizerConfig
) -> dict[str, int]:
    """Returns, for each kind of memory in ITEMS, how many bytes the rank's tensors of this kind
    take. The bytes include the padding of Megatron's buffers. A shared storage counts once."""
    parameters = _storages(parameter for chunk in chunks for parameter in chunk.parameters())
    gradients = _storages(buffer.grad_data for buffer in gradient_buffers(chunks))
    updated = list(_updated(optimizer))
    main = _storages(updated)  # views of the parameters, if these are float32 themselves
    # Adam's moments: float32 for each element that this rank updates
    moments = 2 if config.name == "adam" else 0
    return {
        "parameters": sum(parameters.values()),
        "gradients": sum(gradients.values()),
        "main parameters": sum(
            nbytes for storage, nbytes in main.items() if storage not in parameters
        ),
        "moments": moments * sum(tensor.numel() for tensor in updated) * torch.float32.itemsize,
    }


def _storages(tensors: Iterable[Tensor]) -> dict[StorageWeakRef, int]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


def _updated(optimizer: MegatronOptimizer) -> Iterable[Tensor]:
    """Yields the float32 parameters that this rank's optimizer updates. If the optimizer is
    distributed, this rank's optimizer updates only a share of the replica's parameters."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            yield from group["params"]


def _everything(
    chunks: list[nn.Module], optimizer: MegatronOptimizer
) -> Iterable[tuple[str, Tensor]]:
    for chunk in chunks:
        yield from chunk.named_parameters()
    for number, buffer in enumerate(gradient_buffers(chunks)):
        yield f"gradient buffer {number}", buffer.grad_data
    for number, tensor in enumerate(_updated(optimizer)):
        yield f"main parameter {number}", tensor


def _state(chunks: list[nn.Module]) -> list[StatePart]:
    """Returns this rank's parts of the model's checkpoint, in the form that
    megatron/checkpoint/checkpoint.py saves. If Megatron saves an expert's matrix or a gated matrix
    in two halves, the result contains both halves."""
    parts = []
    with backend():
        for chunk in chunks:
            state = unwrap(chunk).sharded_state_dict()
            apply_factories(state)
            for value in nested_values(state):
                main = is_main_replica(value.replica_id)
                if isinstance(value, ShardedTensor):
                    dims = value.prepend_axis_num
                    sizes = (*(1 for _ in range(dims)), *value.local_shape)
                    whole, start = tuple(value.global_shape), tuple(value.global_offset)
                    parts.append(StatePart(value.key, value.dtype, whole, start, sizes, main))
                elif isinstance(value, ShardedObject):
                    whole, start = tuple(value.global_shape), tuple(value.global_offset)
                    parts.append(
                        StatePart(value.key, None, whole, start, tuple(1 for _ in whole), main)
                    )
    return parts


@dataclass(frozen=True)
class Parts:
    """Element counts of the tensors on one rank, one tuple for each part of the model.

    `layer`: the tensors of one layer, except the tensors of the layer's experts.
    `experts`: the tensors of one layer's experts, limited to the experts that this rank holds.
    `whole`: all tensors of one layer (`layer` and `experts` together), in the order of the layer's
        parameters.
    `dense`: the tensors of a leading dense layer.
    `head`: the tensors of the last norm and of the output layer. The output layer is left out if it
        is tied to the embedding and the same stage holds the embedding.
    """

    embedding: tuple[int, ...]
    layer: tuple[int, ...]
    experts: tuple[int, ...]
    whole: tuple[int, ...]
    dense: tuple[int, ...]
    head: tuple[int, ...]


def build_parts(shape: ModelShape, model: ModelConfig, tensor: int, expert: int) -> Parts:
    """Builds the embedding, the head and one layer of each kind. Returns the number of elements of
    every tensor in these parts of the model."""
    parallel = ParallelConfig(
        tensor=tensor, sequence=tensor > 1, expert=expert, data=expert // math.gcd(expert, tensor)
    )
    sizes: dict[str, list[int]] = {part.name: [] for part in fields(Parts)}
    dense = 1 if shape.dense_layers else 0
    with pretend(parallel, 0) as layout:
        chunks = build_model(
            replace(shape, layers=1 + dense, dense_layers=dense), model, parallel, layout
        )
        for name, parameter in named_parameters(chunks):
            part = name.split(".")[0]
            if name.startswith(f"decoder.layers.{dense}."):
                part = "experts" if is_expert(name) else "layer"
                sizes["whole"].append(parameter.numel())
            elif name.startswith("decoder.layers."):
                part = "dense"
            sizes[part if part in sizes else "head"].append(parameter.numel())
    return Parts(**{part: tuple(found) for part, found in sizes.items()})


def stage_bytes(
    parts: Parts,
    shape: ModelShape,
    model: ModelConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    stage: int,
) -> dict[str, int]:
    """Returns, for each kind of memory in ITEMS, how many bytes the first rank of a pipeline stage
    needs."""
    chunks = [
        _chunk(parts, shape, parallel, stage, chunk) for chunk in range(parallel.virtual_pipeline)
    ]
    experts = parallel.tensor * parallel.replicas // parallel.expert
    held = updated = 0
    for dense, routed in chunks:
        for tensors, replicas in [*((one, parallel.replicas) for one in dense), (routed, experts)]:
            cut = replicas if optimizer.distributed else None
            held += _buffer(tensors, cut)
            updated += _share(tensors, cut)
    return {
        "parameters": held * _BYTES[model.dtype],
        "gradients": held * 4,
        "main parameters": 0 if model.dtype == "float32" else updated * 4,
        "moments": updated * 4 * (2 if optimizer.name == "adam" else 0),
    }


def _chunk(
    parts: Parts, shape: ModelShape, parallel: ParallelConfig, stage: int, chunk: int
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Returns the element counts of the tensors in one chunk of a pipeline stage. The first result
    is a list with one tuple for each gradient bucket. The second result is one tuple with the
    element counts of all expert tensors. If the layout gives experts no gradient buffers of their
    own, the second result is (), and the first result includes the expert tensors."""
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    layers = shape.layers // (stages * chunks)
    start = (chunk * stages + stage) * layers
    if (first := parallel.first_stage_layers) is not None:
        layers = first if stage == 0 else (shape.layers - first) // (stages - 1)
        start = 0 if stage == 0 else first + (stage - 1) * layers
    dense = min(max(shape.dense_layers - start, 0), layers)
    # experts have their own replicas and buffers only in these layouts
    apart = parallel.tensor > 1 or parallel.expert > 1
    body = [*parts.dense * dense, *(parts.layer if apart else parts.whole) * (layers - dense)]
    shared: list[int] = []
    starts, ends = stage == 0 and chunk == 0, stage == stages - 1 and chunk == chunks - 1
    across = shape.tied and stages > 1  # then both end stages hold the matrix, in its own bucket
    if across and (starts or ends):
        shared += parts.embedding
    elif starts:
        body = [*parts.embedding, *body]
    if ends:
        body += parts.head
    return [tuple(body), tuple(shared)], parts.experts * (layers - dense) if apart else ()


def _buffer(tensors: Sequence[int], replicas: int | None) -> int:
    """Returns the number of elements of a bucket, including padding. Megatron pads the bucket so
    that all replicas get parts of equal size. If `replicas` is None, the bucket is not cut and has
    no padding."""
    if replicas is None:
        return sum(tensors)
    unit = math.lcm(replicas, _BUCKET)
    return -(-sum(-(-size // _ALIGNED) * _ALIGNED for size in tensors) // unit) * unit


def _share(tensors: Sequence[int], replicas: int | None) -> int:
    """Counts the elements that the first replica updates in a bucket.

    Megatron lays out a bucket's tensors from last to first, and cuts the bucket into equal parts,
    one for each replica. The first replica updates the elements in the first part of the bucket.
    The count leaves out the padding between the aligned tensors.
    """
    if replicas is None:
        return sum(tensors)
    end = _buffer(tensors, replicas) // replicas
    position = updated = 0
    for size in reversed(tensors):
        position = -(-position // _ALIGNED) * _ALIGNED
        if position >= end:
            break
        updated += min(size, end - position)
        position += size
    return updated
