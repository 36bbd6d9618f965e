"""An optimizer's state as parts of the whole model's tensors, in a form that does not depend on the layout.

Megatron has an optimizer of its own for experts where they are cut over ranks, and one for everything where they are
not, and saves the settings of each. Here only tensors and the number of steps are saved, under names without the
optimizer's number: settings come from the configuration, and rates from the schedule before every step.
"""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_stare.megatron.optimizer.adam_step import STEP, StepPlace, like, read_step, rest, step_place, write_step
from megatron_stare.megatron.optimizer.distributed_optimizer import load_shards, sharded_shards


def sharded_state(optimizer: MegatronOptimizer, parameters: dict[str, Any], *, loading: bool) -> tuple[list[Any], Any]:
    """What each optimizer of the chain saves or asks for, and the number of steps taken (None: it counts none).

    Args:
        parameters: the sharded state of the model that is optimised.
    """
    states, steps = [], []
    for part in chain(optimizer):
        place = step_place(part.optimizer)
        if any(not part.optimizer.state.get(one) for group in part.param_groups for one in group["params"]):
            _begin(part, place)
        steps.append(read_step(part.optimizer))
        shards = _distributed(part, parameters) if isinstance(part, DistributedOptimizer) else None
        states.append(_whole(part, parameters, loading=loading) if shards is None else shards)
    return states, next((step for step in steps if step is not None), None)


def load_state(optimizer: MegatronOptimizer, parameters: dict[str, Any], states: list[Any], step: Any) -> None:
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
            if place.state is not None:  # torch's own loading looks for it; Transformer Engine's takes nothing else
                _inner(state)["state"]["common_step"] = like(place.state, taken)
            part.load_state_dict(state)
        write_step(part.optimizer, place, taken)


def chain(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that are stepped one after the other."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _begin(part: MegatronOptimizer, place: StepPlace) -> None:
    """Gives parameters that were not stepped the state of that, so that there is something to save or load."""
    taken = read_step(part.optimizer) or 0
    if part.config.use_precision_aware_optimizer:
        # what Megatron has for this is none where the optimizer is offloaded, and calls Transformer Engine's Adam with
        # an argument too few
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
    groups = [{key: _bare(x) for key, x in group.items() if key != STEP} for group in inner["param_groups"]]
    inner["param_groups"] = LocalNonpersistentObject(groups)
    return state


def _inner(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a state that is torch's; optimizers with float32 masters have it one level down."""
    return state.get("optimizer", state)


def _bare(value: Any) -> Any:
    return value.unwrap() if isinstance(value, LocalNonpersistentObject) else value
