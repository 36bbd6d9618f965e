"""An optimizer's state as parts of the whole model's tensors, in a form that does not depend on the layout.

Megatron has an optimizer of its own for experts where they are cut over ranks, and one for everything where they are
not, and saves the settings of each. Here only tensors and the number of steps are saved, under names without the
optimizer's number: settings come from the configuration, and rates from the schedule before every step.
"""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.optimizer import MegatronOptimizer

# of the forms of a DistributedOptimizer, the one whose tensors are the model's, not those of its buffers
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def sharded_state(optimizer: MegatronOptimizer, parameters: dict[str, Any], *, loading: bool) -> tuple[list[Any], Any]:
    """What each optimizer of the chain saves or asks for, and the number of steps (None before the first).

    Args:
        parameters: the sharded state of the model that is optimised.
    """
    states, step = [], None
    for part in _chain(optimizer):
        state = part.sharded_state_dict(parameters, is_loading=loading, metadata=_METADATA)
        inner = _inner(state)
        groups = [{key: _bare(value) for key, value in group.items()} for group in inner["param_groups"]]
        step = inner.get("state", {}).pop("common_step", groups[0].get("step"))
        inner["param_groups"] = LocalNonpersistentObject(groups)
        # of a DistributedOptimizer: the name of its form. In the file it would fix the number of optimizers
        states.append({key: LocalNonpersistentObject(x) if isinstance(x, str) else x for key, x in state.items()})
    return states, step


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
