"""Describes the state of Megatron's DistributedOptimizer as ShardedTensors, without gathering the
state. A ShardedTensor contains a block of a global tensor, and the position of the block in the
global tensor. The global tensor belongs to the whole model, and is not divided over ranks.

A data-parallel rank updates a contiguous range of a parameter's elements, called a stretch. A
stretch may begin and end within a row of the parameter. Megatron's checkpoint formats for the
optimizer's state have disadvantages. By default, the format `fully_reshardable` gathers the
complete optimizer state on every data-parallel rank. The format `dp_reshardable` saves the
optimizer's own buckets. A run that resumes from a checkpoint in the format `dp_reshardable` may
change the number of data-parallel ranks, but no other part of the layout. The format
`fully_sharded_model_space` was designed to work without a gather and to allow any change of the
layout, but megatron-core 0.16 and 0.19 raise an error for this format.

This module instead divides the elements that a rank updates into rectangular blocks, called boxes.
The complete rows that a rank updates form one box. If the rank's range begins or ends within a row,
the elements of the incomplete row form further boxes. Each box has a start and a size in every
dimension, as a ShardedTensor requires. A rank saves and loads only the optimizer state of the
elements that this rank updates, so no rank gathers the state.

The float32 master weights (masters) of 16-bit parameters are saved as float32. On load, the masters
are converted to the form in which the optimizer stores masters. By default, Megatron's distributed
optimizer holds the master weights, and passes the master weights to the inner optimizer as the
tensors to update. A precision-aware distributed optimizer holds no master weights, and passes the
16-bit parameters to the inner optimizer as the tensors to update. The inner optimizer then keeps
the master weights in its own state, under the key "master_param". A bfloat16 parameter is its
float32 master, rounded to bfloat16. For a bfloat16 parameter, Transformer Engine's FusedAdam
therefore keeps only the lower 16 bits of the master. For parameters that are not bfloat16,
FusedAdam keeps the masters in float32. HybridDeviceOptimizer updates its masters on the host, and
its state contains the masters as "master_param".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

MASTER = "master_param"
_LOW = 0xFFFF  # the bits of a float32 number that bfloat16 lacks
Box = tuple[tuple[int, ...], tuple[int, ...]]  # (start in a tensor, shape)
MOMENTS = ("exp_avg", "exp_avg_sq")


def read_master(updated: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Returns the float32 master weights [n] of the n elements that this rank updates in one
    parameter. If the optimizer stores complete float32 master weights, the returned tensor shares
    memory with the optimizer's tensor. If the optimizer stores only the lower 16 bits of each
    master weight, the returned tensor is a new tensor. The new tensor is computed from the stored
    lower bits and from the bfloat16 parameter, which is the master weight rounded to bfloat16.

    Args:
        updated: [n] tensor that the optimizer updates.
        state: state that the optimizer keeps for the tensor `updated`.
    """
    kept = state.get(MASTER)
    if kept is None:
        return updated.detach()
    return joined(updated.detach(), kept) if kept.dtype == torch.int16 else kept.detach()


@torch.no_grad()
def write_master(updated: Tensor, state: Mapping[str, Any], values: Tensor | None) -> None:
    """Stores the master `values`. The function `read_master` can return the optimizer's own tensor.
    If the caller has already written the values into the optimizer's own tensor, `write_master`
    does nothing.

    Args:
        values: float32 [n], or None for a float32 parameter, which is its own master. If the
            optimizer keeps a copy of such a parameter, the copy is refreshed.
    """
    kept = state.get(MASTER)
    if kept is None:
        return
    if values is None:
        kept.copy_(updated)
    elif kept.dtype == torch.int16:
        rounded, low = parted(values, updated)
        updated.copy_(rounded)
        kept.copy_(low)
    elif kept.data_ptr() != values.data_ptr():
        kept.copy_(values)


def joined(rounded: Tensor, low: Tensor) -> Tensor:
    """Joins float32 numbers from their two halves, as Transformer Engine's kernel does.

    Args:
        rounded: bfloat16 [n], the numbers rounded to nearest, with ties away from zero.
        low: int16 [n], the lower 16 bits. A value is negative if the upper 16 bits were rounded up.
    """
    high = rounded.view(torch.int16) - (low < 0).to(torch.int16)
    return ((high.to(torch.int32) << 16) | (low.to(torch.int32) & _LOW)).view(torch.float32)


def parted(values: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
    """Splits float32 numbers [n] into two tensors of 16 bits per number, a bfloat16 tensor [n] and
    an int16 tensor [n]. The function `joined` rebuilds the float32 numbers from the bfloat16 tensor
    and the int16 tensor.

    Args:
        near: bfloat16 [n], the numbers rounded by any rule. All data-parallel ranks hold these
            rounded values, so the bfloat16 result must equal `near`. If the rule rounded a tie
            towards zero, the int16 half cannot represent the number exactly, and the last of the
            number's 32 bits is lost.
    """
    bits = values.contiguous().view(torch.int32)
    low = ((bits & _LOW) ^ 0x8000) - 0x8000  # as a signed 16-bit number
    high = bits >> 16
    towards_zero = (low == -0x8000) & (near.view(torch.int16).to(torch.int32) == high)
    low = torch.where(towards_zero, 0x7FFF, low)
    return (high + (low < 0)).to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yields rectangular blocks (boxes) that together cover the elements [start, stop) of a tensor
    of this `shape`. Elements are numbered in row-major order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # both ends within one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], number: int, start: int, stop: int) -> Iterator[Box]:
    for at, size in boxes(shape[1:], start, stop):
        yield (number, *at), (1, *size)


@dataclass(frozen=True)
class _Stretch:
    """The range [start, stop) of a parameter's elements that this rank updates.

    `updated`: [stop - start] tensor that the optimizer updates, which is either the float32 master
        or the parameter's own elements.
    `state`: state that the optimizer keeps for the tensor `updated`.
    """

    parameter: nn.Parameter
    start: int
    stop: int
    updated: Tensor
    state: Mapping[str, Any]

    def held(self) -> dict[str, Tensor]:
        """Returns the tensors that a checkpoint saves for the stretch, keyed by kind. The stretch
        is the contiguous range of a parameter's elements from `start` to `stop`. The number of
        elements in each tensor is `stop - start`. For a float32 parameter, the dict contains only
        the moments, because the parameter itself is saved with the model."""
        held = {name: self.state[name] for name in MOMENTS}
        if self.parameter.dtype != torch.float32:
            held["param"] = read_master(self.updated, self.state)
        return held


def sharded_shards(
    optimizer: DistributedOptimizer, parameters: Mapping[str, Any]
) -> list[list[ShardedTensor]]:
    """Returns this rank's parts of Adam's moments and of the float32 master weights, as one list
    per parameter.

    The data of each part is a view of one of the optimizer's tensors, with one exception. If the
    optimizer stores only the lower 16 bits of each master weight, `read_master` returns the
    complete master weights as a new tensor. The data of each part of the master weights is then a
    view of this new tensor. The keys of the parts match the keys in Megatron's `fully_reshardable`
    format, so this module and Megatron can load each other's checkpoints. A float32 parameter is
    its own master, and is saved only with the model.

    Args:
        parameters: sharded state of the trained model, which must hold the parameters themselves
            instead of copies.
    """
    return [parts for _, _, parts in _shards(optimizer, parameters)]


def _shards(
    optimizer: DistributedOptimizer, parameters: Mapping[str, Any]
) -> Iterator[tuple[_Stretch, dict[str, Tensor], list[ShardedTensor]]]:
    """Yields three values for each stretch of this rank: the _Stretch, a dict of the tensors that a
    checkpoint saves for the stretch, and a list of ShardedTensors. Each ShardedTensor contains a
    block of one of the saved tensors, and the position of the block in the global tensor."""
    found, _ = extract_sharded_tensors_and_factories(dict(parameters))
    whole = {id(part.data): part for part in nested_values(found)}
    for stretch in _stretches(optimizer):
        held = stretch.held()
        yield (
            stretch,
            held,
            list(_parts(whole[id(stretch.parameter)], stretch.start, stretch.stop, held)),
        )


def _stretches(optimizer: DistributedOptimizer) -> Iterator[_Stretch]:
    """Yields one _Stretch for each parameter of which this rank updates at least one element."""
    for ranges_by_dtype in optimizer.gbuf_ranges:
        for buckets in ranges_by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    group, order = optimizer.model_param_group_index_map[parameter]
                    updated = optimizer.optimizer.param_groups[group]["params"][order]
                    state = optimizer.optimizer.state[updated]
                    yield _Stretch(
                        parameter, ranges["param"].start, ranges["param"].end, updated, state
                    )


def _parts(
    whole: ShardedTensor | ShardedTensorFactory, start: int, stop: int, held: Mapping[str, Tensor]
) -> Iterator[ShardedTensor]:
    """Yields ShardedTensors for the elements [start, stop) of a parameter. Each ShardedTensor
    contains a rectangular block of one of the tensors in `held`. The ShardedTensor also states the
    position of the block in the global tensor, which is not divided over ranks.

    Args:
        held: tensors [stop - start] by kind.

    Raises:
        ValueError: the model's checkpoint holds a copy of the parameter. No layer of the supported
            Megatron release saves a copy.
    """
    pieces = nested_values(whole.build()) if isinstance(whole, ShardedTensorFactory) else [whole]
    for piece in pieces:  # gate and up rows of one parameter are apart in the model's tensor
        if piece.data.untyped_storage().data_ptr() != whole.data.untyped_storage().data_ptr():
            raise ValueError(
                f"{whole.key} is saved from a copy, so where its moments belong cannot be told"
            )
        # elements of the parameter before this piece
        before = piece.data.storage_offset() - whole.data.storage_offset()
        lead = piece.global_offset[: piece.prepend_axis_num]  # the layer, if layers are stacked
        at = max(start, before)
        for offset, size in boxes(
            piece.data.shape, at - before, min(stop, before + piece.data.numel()) - before
        ):
            begins = tuple(
                a + b for a, b in zip(piece.global_offset[len(lead) :], offset, strict=True)
            )
            for name, values in held.items():
                data = values[at - start : at - start + prod(size)].view((1,) * len(lead) + size)
                yield replace(
                    piece,
                    key=f"optimizer.state.{name}.{piece.key}",
                    data=data,
                    dtype=data.dtype,
                    local_shape=tuple(data.shape),
                    global_offset=(*lead, *begins),
                    axis_fragmentations=None,  # not a grid
                    prepend_axis_num=0,
                    replica_id=(*piece.replica_id[:2], 0),  # no other data-parallel rank has it
                )
            at += prod(size)


@torch.no_grad()
def load_shards(
    optimizer: DistributedOptimizer, parameters: Mapping[str, Any], loaded: list[list[Tensor]]
) -> None:
    """Copies loaded tensors into the optimizer's tensors. Load the model's parameters first.

    Args:
        parameters: sharded state as for `sharded_shards`. Build this state again, because loading
            consumed the first state.
    """
    for (stretch, held, parts), tensors in zip(_shards(optimizer, parameters), loaded, strict=True):
        for part, tensor in zip(parts, tensors, strict=True):
            part.data.copy_(tensor.view(part.data.shape))
        write_master(stretch.updated, stretch.state, held.get("param"))
