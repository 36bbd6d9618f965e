"""Every rank of a layout built on the meta device, for layouts that this machine could not run."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_stare.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_stare.megatron.backend.cpu_backend import has_transformer_engine
from megatron_stare.megatron.dry.planned_rank import RankPlan, plan_rank
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.files.processes import Advance, run_parts

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


def extremes(plans: Sequence[RankPlan]) -> dict[str, tuple[RankPlan, RankPlan]]:
    """The ranks that hold most and least of every item, and of their sum, "total"."""
    sizes = {item: [plan.nbytes[item] for plan in plans] for item in plans[0].nbytes}
    sizes["total"] = [sum(plan.nbytes.values()) for plan in plans]
    return {item: (plans[of.index(max(of))], plans[of.index(min(of))]) for item, of in sizes.items()}


def assumptions(
    shape: ModelShape, model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig
) -> list[str]:
    """What the bytes of a plan rest on, and what they leave out."""
    experts = parallel.tensor * parallel.replicas // parallel.expert
    shared = f"{parallel.replicas} data-parallel replicas" + (f" ({experts} of an expert's)" if shape.experts else "")
    return [
        f"parameters in {model.dtype}, gradients in float32, and what the optimizer updates and its moments in float32",
        f"the optimizer's share is cut over {shared}"
        if optimizer.distributed
        else "every rank has all optimizer state",
        "Adam keeps two moments of every element" if optimizer.name == "adam" else "the optimizer keeps no moments",
        f"{shape.vocab_size} rows of the vocabulary, padded to {shape.padded_vocab(parallel.tensor)}",
        f"layers of {'Transformer Engine' if has_transformer_engine() else 'megatron-core'}; both are of equal size",
        "left out: activations, logits, collectives' and the weight stream's buffers, what CUDA and its allocator take",
    ]
