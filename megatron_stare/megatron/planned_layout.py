"""Every rank of a layout built on the meta device, for layouts that this machine could not run."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_stare.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_stare.megatron.planned_rank import RankPlan, plan_rank
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.processes import Advance, run_parts

_COLLECTED_EVERY = 4  # ranks: a model is a reference cycle


@dataclass(frozen=True)
class _Ranks:
    """Those that one process builds."""

    shape: ModelShape
    model: ModelConfig
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    ranks: range


def plan_layout(
    shape: ModelShape,
    model: ModelConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    processes: int = 1,
    advance: Advance = lambda ranks: None,
) -> list[RankPlan]:
    """What every rank of the layout holds, in order of rank.

    Args:
        processes: that build ranks side by side.
        advance: called with the number of ranks that were built since it was called last.
    """
    world = parallel.world_size
    split = [_Ranks(shape, model, parallel, optimizer, range(n, world, processes)) for n in range(processes)]
    built = run_parts(_build, [part for part in split if part.ranks], advance, where="the layout")
    return sorted((plan for part in built for plan in part), key=lambda plan: plan.rank)


def _build(part: _Ranks, advance: Advance) -> list[RankPlan]:
    plans = []
    collected = gc.isenabled()
    gc.disable()  # which would go over all that is imported, again and again
    gc.freeze()
    try:
        for number, rank in enumerate(part.ranks):
            plans.append(plan_rank(part.shape, part.model, part.parallel, part.optimizer, rank))
            if number % _COLLECTED_EVERY == 0:
                gc.collect()
            advance(1)
    finally:
        gc.unfreeze()
        if collected:
            gc.enable()
    return plans


def in_bytes(plans: Sequence[RankPlan]) -> dict[str, dict[str, int]]:
    """The bytes of every item on the rank that holds most of it and on the one that holds least, and of their sum."""
    items = {item: [plan.nbytes[item] for plan in plans] for item in plans[0].nbytes}
    items["total"] = [sum(plan.nbytes.values()) for plan in plans]
    return {item: {"max": max(of_ranks), "min": min(of_ranks)} for item, of_ranks in items.items()}
