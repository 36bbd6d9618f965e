"""Distributed checkpoints of model, optimizer, schedule and random states, by megatron.core.dist_checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from megatron_stare.megatron.cpu_backend import backend
from megatron_stare.megatron.layout import Layout
from megatron_stare.megatron.model import unwrap


def save(
    folder: str,
    model: list[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    layout: Layout,
) -> None:
    """Writes the checkpoint into `folder`, which exists and is empty. The caller makes it visible when all is done."""
    with backend():
        dist_checkpointing.save(_state(model, optimizer, scheduler, layout, loading=False), folder)


def load(
    folder: str,
    model: list[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    layout: Layout,
) -> None:
    """Restores what `save` wrote."""
    with backend():
        state = dist_checkpointing.load(_state(model, optimizer, scheduler, layout, loading=True), folder)
        for i, chunk in enumerate(model):
            unwrap(chunk).load_state_dict(state[f"model{i}"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        _set_random_states(state["random"])


def _state(
    model: list[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    layout: Layout,
    *,
    loading: bool,
) -> dict[str, Any]:
    # by chunk: two chunks of a virtual pipeline name their layers alike
    parameters = {f"model{i}": unwrap(chunk).sharded_state_dict() for i, chunk in enumerate(model)}
    state: dict[str, Any] = dict(parameters)
    state["optimizer"] = optimizer.sharded_state_dict(parameters, is_loading=loading)
    state["scheduler"] = scheduler.state_dict()
    state["random"] = ShardedObject("random", _random_states(), (layout.world,), (layout.rank,))
    return state


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
        states["tracker"] = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
        tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
