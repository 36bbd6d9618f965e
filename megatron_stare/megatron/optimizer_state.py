"""An optimizer's state as parts of the whole model's tensors, in a form that does not depend on the layout.

Megatron has an optimizer of its own for experts where they are cut over ranks, and one for everything where they are
not, and saves the settings of each. Here only tensors and the number of steps are saved, under names without the
optimizer's number: settings come from the configuration, and rates from the schedule before every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_stare.megatron.substitute import substituted

# of the forms of a DistributedOptimizer, the one whose tensors are the model's, not those of its buffers
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def sharded_state(optimizer: MegatronOptimizer, parameters: dict[str, Any], *, loading: bool) -> tuple[list[Any], Any]:
    """What each optimizer of the chain saves or asks for, and the number of steps (None before the first).

    Args:
        parameters: the sharded state of the model that is optimised.
    """
    states, step = [], None
    for part in _chain(optimizer):
        with _padding_kept(part):
            state = part.sharded_state_dict(parameters, is_loading=loading, metadata=_METADATA)
        inner = _inner(state)
        groups = [{key: _bare(value) for key, value in group.items()} for group in inner["param_groups"]]
        step = inner.get("state", {}).pop("common_step", groups[0].get("step"))
        inner["param_groups"] = LocalNonpersistentObject(groups)
        # of a DistributedOptimizer: the name of its form. In the file it would fix the number of optimizers
        states.append({key: LocalNonpersistentObject(x) if isinstance(x, str) else x for key, x in state.items()})
    return states, step


@contextlib.contextmanager
def _padding_kept(optimizer: Any) -> Iterator[None]:
    """While open, a DistributedOptimizer gathers its buffers with the padding that ends every bucket.

    megatron-core 0.16.1 leaves it out and then cuts parameters at places that count it: of several buckets, all after
    the first would be saved and loaded shifted, with a warning at the last.
    """
    if not isinstance(optimizer, DistributedOptimizer):
        yield
        return
    gather = optimizer.get_parameter_state_dp_zero

    def gather_padded(*args: Any, **kwargs: Any) -> dict[Any, Any] | None:
        state = gather(*args, **kwargs)
        if state is None:  # another rank has it
            return None
        for number, buffer in enumerate(optimizer.buffers):
            for tensors in state[number].values():
                for name, flat in tensors.items():
                    if torch.is_tensor(flat):
                        tensors[name] = _with_padding(flat, buffer.buckets)
        return state

    with substituted(optimizer, "get_parameter_state_dp_zero", gather_padded, absent=True):
        yield


def _with_padding(flat: Tensor, buckets: Sequence[Any]) -> Tensor:
    """The contents of buckets laid end to end as they lie in their buffer."""
    last = buckets[-1]
    whole = flat.new_zeros(last.offset + last.grad_data.numel())
    done = 0
    for bucket in buckets:
        whole[bucket.offset : bucket.offset + bucket.numel_unpadded] = flat[done : done + bucket.numel_unpadded]
        done += bucket.numel_unpadded
    return whole


def load_state(optimizer: MegatronOptimizer, states: list[Any], step: Any) -> None:
    """Restores what `sharded_state` named, once it is loaded."""
    for part, state in zip(_chain(optimizer), states, strict=True):
        inner = _inner(state)
        for group in inner["param_groups"]:
            if "step" in group:
                group["step"] = step
        if "state" in inner and step is not None:
            inner["state"]["common_step"] = step
        part.load_state_dict(state)


def _chain(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _inner(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a state that is torch's; optimizers with float32 masters have it one level down."""
    return state.get("optimizer", state)


def _bare(value: Any) -> Any:
    return value.unwrap() if isinstance(value, LocalNonpersistentObject) else value
