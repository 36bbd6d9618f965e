"""Describes each rank's optimizer state as blocks of global tensors, which belong to the whole
model and are not divided over ranks. A checkpoint of the optimizer state therefore does not depend
on the parallel layout.

If experts are divided over ranks, Megatron has a separate optimizer for experts. If experts are not
divided over ranks, one optimizer updates all parameters. Megatron's own checkpoints contain the
settings of each optimizer. This module saves only tensors and the step count. The name of a saved
tensor does not contain the index of the optimizer that updates the tensor. On a resume, the
optimizers' settings come from the configuration, and the schedule sets the learning rates before
every step.

Adam's bias correction needs the step count, which is saved and restored for every kind of Adam.
Torch's AdamW stores the step count once per parameter, as a tensor. The FusedAdam optimizers of
Transformer Engine and Apex store the step count once per parameter group, as a number. FusedAdam
creates the step count only when it takes its first step, so a new FusedAdam does not show where it
stores the step count. `step_place` therefore lets the optimizer update a dummy parameter with one
element. `step_place` then looks where the optimizer has stored the step count. AdamW and both
FusedAdam optimizers can update a dummy parameter, but a HybridDeviceOptimizer cannot. For a
HybridDeviceOptimizer, `step_place` creates a new optimizer of the same class as the host
optimizers, and lets the new optimizer update a dummy parameter (see `_place_on_the_host`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn
from torch.optim import Optimizer

from megatron_stare.megatron.optimizer.distributed_optimizer import load_shards, sharded_shards

STEP = "step"


def sharded_state(
    optimizer: MegatronOptimizer, parameters: dict[str, Any], *, loading: bool
) -> tuple[list[Any], Any]:
    """Returns the state that each optimizer of the chain saves or loads, and the step count. The
    step count is None if the optimizers do not count steps.

    Args:
        parameters: sharded state of the trained model.
    """
    states, steps = [], []
    for part in chain(optimizer):
        place = step_place(part.optimizer)
        if any(
            not part.optimizer.state.get(one)
            for group in part.param_groups
            for one in group["params"]
        ):
            _begin(part, place)
        steps.append(read_step(part.optimizer))
        shards = _distributed(part, parameters) if isinstance(part, DistributedOptimizer) else None
        states.append(_whole(part, parameters, loading=loading) if shards is None else shards)
    return states, next((step for step in steps if step is not None), None)


def load_state(
    optimizer: MegatronOptimizer, parameters: dict[str, Any], states: list[Any], step: Any
) -> None:
    """Restores the optimizers from a loaded state, which has the form that `sharded_state`
    describes.

    Args:
        parameters: sharded state of the model, as in `sharded_state`, built again for loading.
        step: the step count that `sharded_state` returned when the checkpoint was saved.
    """
    taken = 0 if step is None else int(step)
    for part, state in zip(chain(optimizer), states, strict=True):
        place = step_place(part.optimizer)
        if isinstance(part, DistributedOptimizer):
            load_shards(part, parameters, state["shards"])
        else:
            # torch's own loading reads the step from here; Transformer Engine's accepts it only
            # here
            if place.state is not None:
                _inner(state)["state"]["common_step"] = like(place.state, taken)
            part.load_state_dict(state)
        write_step(part.optimizer, place, taken)


def chain(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Returns the optimizers that are stepped one after another. Optimizers without parameters are
    left out. For example, the expert optimizer of a pipeline stage without experts has no
    parameters."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if any(group["params"] for group in part.param_groups)]


def _begin(part: MegatronOptimizer, place: StepPlace) -> None:
    """Creates the optimizer state of parameters that were never stepped, so that this state can be
    saved or loaded."""
    taken = read_step(part.optimizer) or 0
    if part.config.use_precision_aware_optimizer:
        # Megatron's own function does nothing if the optimizer is offloaded, and calls Transformer
        # Engine's Adam with one argument too few.
        rest(part.optimizer)
    else:
        part.init_state_fn(part.optimizer, part.config)
    write_step(part.optimizer, place, taken)


def _distributed(part: DistributedOptimizer, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"shards": sharded_shards(part, parameters)}


def _whole(part: MegatronOptimizer, parameters: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    state = part.sharded_state_dict(parameters, is_loading=loading)
    inner = _inner(state)
    inner["state"].pop("common_step", None)
    groups = [
        {key: _bare(x) for key, x in group.items() if key != STEP}
        for group in inner["param_groups"]
    ]
    inner["param_groups"] = LocalNonpersistentObject(groups)
    return state


def _inner(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state dict of the torch optimizer that a Megatron optimizer wraps. If the
    Megatron optimizer has float32 masters, `state` contains the torch optimizer's state dict under
    the key "optimizer". For other Megatron optimizers, `state` is itself the torch optimizer's
    state dict."""
    return state.get("optimizer", state)


def _bare(value: Any) -> Any:
    return value.unwrap() if isinstance(value, LocalNonpersistentObject) else value


@dataclass(frozen=True)
class StepPlace:
    """Tells where an optimizer stores its step count. In a parameter group, and in the state of a
    parameter, the step count has the key "step". If a field is not None, the type of its value
    shows whether the optimizer stores the step count as a tensor or as a number.

    `group`: step count of one parameter group, or None if parameter groups have no step count.
    `state`: step count in the state of one parameter, or None if the states of parameters have no
        step count.
    """

    group: Any = None
    state: Any = None


def step_place(optimizer: Optimizer) -> StepPlace:
    """Finds where this optimizer keeps its step count. Leaves the optimizer unchanged."""
    if isinstance(optimizer, HybridDeviceOptimizer):
        return _place_on_the_host(optimizer)
    groups = optimizer.param_groups
    one = next(parameter for group in groups for parameter in group["params"])
    probe = nn.Parameter(torch.zeros(1, dtype=one.dtype, device=one.device))
    probe.grad = torch.zeros_like(probe)
    group = {key: copy.deepcopy(value) for key, value in groups[0].items() if key != "params"} | {
        "params": [probe]
    }
    optimizer.param_groups = [group]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
        state = optimizer.state.pop(probe, {})
    return StepPlace(group.get(STEP), state.get(STEP))


def _place_on_the_host(optimizer: HybridDeviceOptimizer) -> StepPlace:
    """Finds where the host optimizers of a hybrid optimizer keep their step count. All host
    optimizers have the same class.

    After a step, a host optimizer looks up the device copy of each of its parameters. The dummy
    parameter of `step_place` has no device copy, so a host optimizer cannot update the dummy
    parameter. The function `_place_on_the_host` therefore calls `step_place` with a new optimizer,
    which has no device copies. The new optimizer has the same class and settings as the first host
    optimizer.
    """
    if not optimizer.cpu_optimizers:
        return StepPlace()
    (group,) = optimizer.cpu_optimizers[0].param_groups[:1]
    settings = {key: value for key, value in group.items() if key != "params"}
    return step_place(
        type(optimizer.cpu_optimizers[0])([settings | {"params": [nn.Parameter(torch.zeros(1))]}])
    )


@torch.no_grad()
def rest(optimizer: Optimizer) -> None:
    """Steps an optimizer with learning rate 0 and zero gradients, so that the optimizer creates its
    state. Because the learning rate is 0, the parameters do not change.

    Use `rest` only for optimizers whose gradients Megatron keeps outside `.grad`.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    ones = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [getattr(parameter, "decoupled_grad", None) for parameter in ones]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in ones:
        parameter.decoupled_grad = torch.zeros_like(parameter, dtype=torch.float32)
    try:
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in zip(ones, gradients, strict=True):
            parameter.decoupled_grad = gradient


def read_step(optimizer: Optimizer) -> int | None:
    """Returns the number of steps that the optimizer has taken. Returns None before the first step,
    or if the optimizer does not count steps.

    Raises:
        ValueError: parameters have taken different numbers of steps. A checkpoint can contain only
            one step count.
    """
    found = {int(value) for value in _values(optimizer)}
    if len(found) > 1:
        raise ValueError(
            f"parameters of one optimizer have taken different numbers of steps: {sorted(found)}"
        )
    return found.pop() if found else None


def write_step(optimizer: Optimizer, place: StepPlace, step: int) -> None:
    """Sets the step count in every place where the optimizer keeps a step count. If the optimizer
    stores step counts as tensors, each step count becomes a separate new tensor."""
    for group in optimizer.param_groups:
        if place.group is not None:
            group[STEP] = like(place.group, step)
        for parameter in group["params"]:
            if place.state is not None:
                optimizer.state[parameter][STEP] = like(place.state, step)


def like(kept: Any, step: int) -> Any:
    """Converts a new step count, `step`, to the type of a stored step count, `kept`. An optimizer
    stores its step count either as a tensor or as a number. If `kept` is a tensor, the result is a
    new tensor; otherwise, the result is a number."""
    return torch.full_like(kept, step) if torch.is_tensor(kept) else type(kept)(step)


def adam_name(optimizer: Optimizer) -> str:
    """Returns an optimizer's name for messages, e.g. 'AdamW of torch' or 'FusedAdam of
    transformer_engine'."""
    kind = type(optimizer)
    return f"{kind.__name__} of {kind.__module__.partition('.')[0]}"


def _values(optimizer: Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # a group without parameters does not count its steps
            yield from (
                held[STEP] for held in (group, optimizer.state.get(parameter, {})) if STEP in held
            )
