"""What one rank of a layout holds, found by building it on the meta device: names, shapes and bytes, and no data.

Model, gradient buffers and optimizer are made by the functions that make them in a run, at the rank's own place in the
layout. Nothing is taken from another rank by symmetry.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories, is_main_replica
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_stare.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_stare.megatron.backend.cpu_backend import backend
from megatron_stare.megatron.dry.pretend import pretend
from megatron_stare.megatron.export.export import shards
from megatron_stare.megatron.model.model import build_policy, gradient_buffers, unwrap
from megatron_stare.megatron.optimizer.optimizer import build_optimizer
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.sync.stream_plan import Held, held_pieces

ITEMS = ("parameters", "gradients", "main parameters", "moments")


@dataclass(frozen=True)
class StatePart:
    """A part of a tensor of the whole model's checkpoint, or of a grid of objects, where `dtype` is None."""

    key: str
    dtype: torch.dtype | None
    whole: tuple[int, ...]  # the sizes of the tensor
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    main: bool  # whether this rank is the one of its replicas that writes it


@dataclass(frozen=True)
class RankPlan:
    """What a rank of a layout holds.

    replica: which of the data-parallel replicas its parameters belong to; expert_replica: and its experts.
    nbytes: by ITEMS.
    held: its pieces of the Hugging Face tensors.
    state: its parts of the model's checkpoint.
    with_data: what is not on the meta device, by name: nothing.
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
    shape: ModelShape, model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig, rank: int
) -> RankPlan:
    """Builds a rank of `parallel.world_size` without the others.

    Raises:
        KeyError: a parameter is not in the family's table of names.
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
            with_data=[name for name, tensor in _everything(chunks, trained) if tensor.device.type != "meta"],
        )


def _nbytes(chunks: list[nn.Module], optimizer: MegatronOptimizer, config: OptimizerConfig) -> dict[str, int]:
    """Bytes of the storages behind each item: padding of Megatron's buffers included, shared ones counted once."""
    parameters = _storages(parameter for chunk in chunks for parameter in chunk.parameters())
    gradients = _storages(buffer.grad_data for buffer in gradient_buffers(chunks))
    updated = list(_updated(optimizer))
    main = _storages(updated)  # views of the parameters, where these are float32 themselves
    moments = 2 if config.name == "adam" else 0  # Adam's, float32 for each element that this rank updates
    return {
        "parameters": sum(parameters.values()),
        "gradients": sum(gradients.values()),
        "main parameters": sum(nbytes for storage, nbytes in main.items() if storage not in parameters),
        "moments": moments * sum(tensor.numel() for tensor in updated) * torch.float32.itemsize,
    }


def _storages(tensors: Iterable[Tensor]) -> dict[StorageWeakRef, int]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


def _updated(optimizer: MegatronOptimizer) -> Iterable[Tensor]:
    """What the optimizer updates on this rank: float32, under the distributed optimizer a share of the replica's."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            yield from group["params"]


def _everything(chunks: list[nn.Module], optimizer: MegatronOptimizer) -> Iterable[tuple[str, Tensor]]:
    for chunk in chunks:
        yield from chunk.named_parameters()
    for number, buffer in enumerate(gradient_buffers(chunks)):
        yield f"gradient buffer {number}", buffer.grad_data
    for number, tensor in enumerate(_updated(optimizer)):
        yield f"main parameter {number}", tensor


def _state(chunks: list[nn.Module]) -> list[StatePart]:
    """Parts of the model's checkpoint as megatron/checkpoint/checkpoint.py saves it; where experts' or gated
    matrices are cut in two, both halves."""
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
                    parts.append(StatePart(value.key, None, whole, start, tuple(1 for _ in whole), main))
    return parts
