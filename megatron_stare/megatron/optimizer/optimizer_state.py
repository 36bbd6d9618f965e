"""The optimizer's state as parts of the whole model's tensors, in a form that does not depend on
the layout.

Megatron has an optimizer of its own for experts where they are cut over ranks, and one for
everything where they are not, and saves the settings of each. Here only tensors and the number of
steps are saved, under names without the optimizer's number: settings come from the configuration,
and rates from the schedule before every step.

Adam's bias correction needs the number of its steps, which is read and written whatever the Adam.
Torch's AdamW keeps a tensor for every parameter; Transformer Engine's and Apex's FusedAdam a number
for a group, and create it only as they step, so that a fresh one shows no place for it. The place
is found by letting the optimizer itself step a parameter of one element, instead of by its name.
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
    """The state that each optimizer of the chain saves or asks for, and the number of steps (None:
    it counts none).

    Args:
        parameters: the sharded state of the model that is optimised.
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
    """Restores what `sharded_state` named, once it is loaded.

    Args:
        parameters: as for `sharded_state`, made anew.
        step: that it gave when it was saved.
    """
    taken = 0 if step is None else int(step)
    for part, state in zip(chain(optimizer), states, strict=True):
        place = step_place(part.optimizer)
        if isinstance(part, DistributedOptimizer):
            load_shards(part, parameters, state["shards"])
        else:
            # torch's own loading reads it; Transformer Engine's accepts nothing else
            if place.state is not None:
                _inner(state)["state"]["common_step"] = like(place.state, taken)
            part.load_state_dict(state)
        write_step(part.optimizer, place, taken)


def chain(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that are stepped one after the other."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _begin(part: MegatronOptimizer, place: StepPlace) -> None:
    """Gives parameters that were not stepped the state of that, so that there is something to save
    or load."""
    taken = read_step(part.optimizer) or 0
    if part.config.use_precision_aware_optimizer:
        # Megatron's own function does nothing where the optimizer is offloaded, and calls
        # Transformer Engine's Adam with an argument too few.
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
    """The part of a state that is torch's; optimizers with float32 masters have it one level
    down."""
    return state.get("optimizer", state)


def _bare(value: Any) -> Any:
    return value.unwrap() if isinstance(value, LocalNonpersistentObject) else value


@dataclass(frozen=True)
class StepPlace:
    """The value that an optimizer has under "step" after one step.

    group: in its groups of parameters; None: nothing.
    state: in the state of each of its parameters; None: nothing.
    """

    group: Any = None
    state: Any = None


def step_place(optimizer: Optimizer) -> StepPlace:
    """Finds where this optimizer keeps its number of steps. The optimizer is left as it was."""
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
    """Finds where a hybrid optimizer's optimizers of one class keep their step on the host. After a
    step they look up a parameter's copy on the device, which only their own has; so an optimizer is
    made as Megatron makes them."""
    if not optimizer.cpu_optimizers:
        return StepPlace()
    (group,) = optimizer.cpu_optimizers[0].param_groups[:1]
    settings = {key: value for key, value in group.items() if key != "params"}
    return step_place(
        type(optimizer.cpu_optimizers[0])([settings | {"params": [nn.Parameter(torch.zeros(1))]}])
    )


@torch.no_grad()
def rest(optimizer: Optimizer) -> None:
    """Has an optimizer whose gradients Megatron lays aside make its state, by a step at rate 0 over
    gradients of 0: parameters stay as they are."""
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
    """The number of steps taken; None where there is none, before the first step or for an
    optimizer without one.

    Raises:
        ValueError: it differs between parameters, which a checkpoint does not hold.
    """
    found = {int(value) for value in _values(optimizer)}
    if len(found) > 1:
        raise ValueError(
            f"parameters of one optimizer have taken different numbers of steps: {sorted(found)}"
        )
    return found.pop() if found else None


def write_step(optimizer: Optimizer, place: StepPlace, step: int) -> None:
    """Makes every parameter's number of steps this one, in what belongs to it alone."""
    for group in optimizer.param_groups:
        if place.group is not None:
            group[STEP] = like(place.group, step)
        for parameter in group["params"]:
            if place.state is not None:
                optimizer.state[parameter][STEP] = like(place.state, step)


def like(kept: Any, step: int) -> Any:
    """The step as an optimizer keeps it, of whose steps `kept` is one: a tensor of its own, or a
    number."""
    return torch.full_like(kept, step) if torch.is_tensor(kept) else type(kept)(step)


def adam_name(optimizer: Optimizer) -> str:
    """Names an optimizer for people: 'AdamW of torch', 'FusedAdam of transformer_engine'."""
    kind = type(optimizer)
    return f"{kind.__name__} of {kind.__module__.partition('.')[0]}"


def _values(optimizer: Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # a group without parameters does not count its steps
            yield from (
                held[STEP] for held in (group, optimizer.state.get(parameter, {})) if STEP in held
            )
