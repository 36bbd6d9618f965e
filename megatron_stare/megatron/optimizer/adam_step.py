"""Where an Adam keeps the number of its steps, which its bias correction needs: read and written whatever the Adam.

Torch's AdamW keeps a tensor for every parameter; Transformer Engine's and Apex's FusedAdam a number for a group, and
create it only as they step, so that a fresh one shows no place for it. The place is found by letting the optimizer
itself step a parameter of one element, instead of by its name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import nn
from torch.optim import Optimizer

STEP = "step"


@dataclass(frozen=True)
class StepPlace:
    """What an optimizer has under "step" after one step.

    group: in its groups of parameters; None: nothing.
    state: in the state of each of its parameters; None: nothing.
    """

    group: Any = None
    state: Any = None


def step_place(optimizer: Optimizer) -> StepPlace:
    """Where this optimizer keeps its number of steps. It is left as it was."""
    if isinstance(optimizer, HybridDeviceOptimizer):
        return _place_on_the_host(optimizer)
    groups = optimizer.param_groups
    one = next(parameter for group in groups for parameter in group["params"])
    probe = nn.Parameter(torch.zeros(1, dtype=one.dtype, device=one.device))
    probe.grad = torch.zeros_like(probe)
    group = {key: copy.deepcopy(value) for key, value in groups[0].items() if key != "params"} | {"params": [probe]}
    optimizer.param_groups = [group]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
        state = optimizer.state.pop(probe, {})
    return StepPlace(group.get(STEP), state.get(STEP))


def _place_on_the_host(optimizer: HybridDeviceOptimizer) -> StepPlace:
    """Of an optimizer that has others, of one class, step parameters on the host. They look a parameter's copy on the
    device up after a step, which none but their own has, so one is made as Megatron makes them."""
    if not optimizer.cpu_optimizers:
        return StepPlace()
    (group,) = optimizer.cpu_optimizers[0].param_groups[:1]
    settings = {key: value for key, value in group.items() if key != "params"}
    return step_place(type(optimizer.cpu_optimizers[0])([settings | {"params": [nn.Parameter(torch.zeros(1))]}]))


@torch.no_grad()
def rest(optimizer: Optimizer) -> None:
    """Has an optimizer whose gradients Megatron lays aside make its state, by a step at rate 0 over gradients of 0:
    parameters stay as they are."""
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
    """The number of steps taken; None where there is none, before the first step or for an optimizer without one.

    Raises:
        ValueError: it differs between parameters, which a checkpoint does not hold.
    """
    found = {int(value) for value in _values(optimizer)}
    if len(found) > 1:
        raise ValueError(f"parameters of one optimizer have taken different numbers of steps: {sorted(found)}")
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
    """The step as an optimizer keeps it, of whose steps `kept` is one: a tensor of its own, or a number."""
    return torch.full_like(kept, step) if torch.is_tensor(kept) else type(kept)(step)


def adam_name(optimizer: Optimizer) -> str:
    """Whose optimizer it is, for people: 'AdamW of torch', 'FusedAdam of transformer_engine'."""
    kind = type(optimizer)
    return f"{kind.__name__} of {kind.__module__.partition('.')[0]}"


def _values(optimizer: Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # a group without parameters does not count its steps
            yield from (held[STEP] for held in (group, optimizer.state.get(parameter, {})) if STEP in held)
