"""The policy, or its gradients, as whole Hugging Face tensors: gathered over tensor-parallel ranks, mapped back."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_stare.megatron.layout import Layout
from megatron_stare.megatron.model import is_expert, named_parameters
from megatron_stare.weights.mapping import rule_for, unshard
from megatron_stare.weights.shape import ModelShape


@torch.no_grad()
def export_hf(
    model: list[nn.Module],
    shape: ModelShape,
    layout: Layout,
    of: Callable[[nn.Parameter], Tensor] = lambda parameter: parameter.detach(),
) -> dict[str, Tensor]:
    """Whole tensors by Hugging Face name, on the CPU. One rank gives each tensor; all ranks must call this.

    Args:
        of: what is exported of a parameter: itself, or its gradient. Must have the parameter's shape.
    """
    mine = [(name, of(p).contiguous()) for name, p in named_parameters(model) if _gives(name, shape, layout)]
    shared = [(name, tensor) for name, tensor in mine if not is_expert(name)]
    gathered = _gather([tensor for _, tensor in shared], layout)
    whole = [(name, [tensor]) for name, tensor in mine if is_expert(name)]
    if layout.tp_rank == 0:
        whole += [(name, shards) for (name, _), shards in zip(shared, gathered, strict=True)]
    tensors: dict[str, Tensor] = {}
    for name, shards in whole:
        for hf, tensor in unshard(rule_for(name, shape), shards, shape).items():
            tensors[hf] = tensor.to("cpu", copy=True).contiguous()
    return tensors


def _gives(name: str, shape: ModelShape, layout: Layout) -> bool:
    """Whether this rank, with the others of its tensor-parallel group, is the one that exports a parameter it holds."""
    if shape.tied and name == "output_layer.weight":
        return False  # the last pipeline stage's copy of the embedding
    return (layout.expert_dp_rank if is_expert(name) else layout.dp_rank) == 0


def _gather(tensors: list[Tensor], layout: Layout) -> list[list[Tensor]]:
    """Every tensor's shards of all tensor-parallel ranks, in one collective over a flat buffer a dtype."""
    if layout.tp == 1:
        return [[t] for t in tensors]
    result: list[list[Tensor]] = [[] for _ in tensors]
    for dtype in sorted({t.dtype for t in tensors}, key=str):  # the same order on every rank
        chosen = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        flat = torch.cat([tensors[i].flatten() for i in chosen])
        parts = flat.new_empty(layout.tp, flat.numel())
        dist.all_gather_into_tensor(parts.view(-1), flat, group=layout.tp_group)
        sizes = [tensors[i].numel() for i in chosen]
        for part in parts:
            for i, piece in zip(chosen, part.split(sizes), strict=True):
                result[i].append(piece.view_as(tensors[i]))
    return result
