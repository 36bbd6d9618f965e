"""Searches for layouts that fit into the memory of a run's GPUs and differ little from the run's
own layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.config.rules import check_layout, check_recompute
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.models.shape import ModelShape
from megatron_stare.planning.memory import PlannedFit, longest_sequence
from megatron_stare.planning.placement import Demand, Node, check_possible

_CUTS = ("tensor", "pipeline", "context", "data", "expert")
_DEFAULT = ("recompute_method", "recompute_layers", "recompute_modules")


@dataclass(frozen=True)
class Candidate:
    """A layout that fits into the GPUs' memory.

    `distance`: distance of this layout from the run's own layout.
    `peak`: memory of the phase that uses most memory, in bytes.
    """

    run: ResolvedRun
    distance: float
    peak: int

    def settings(self, base: Config) -> dict[str, str | int | bool]:
        """Returns the settings in which this candidate differs from `base`, with the candidate's
        values. The keys of the returned dict are full names of settings, such as
        `parallel.tensor`."""
        found: dict[str, str | int | bool] = {}
        for section in ("parallel", "model", "batch", "optimizer", "rollout"):
            before, after = getattr(base, section), getattr(self.run.config, section)
            for name, value in after:
                if value != getattr(before, name):
                    found[f"{section}.{name}"] = value
        return found


def search(
    run: ResolvedRun, ranks: int, nodes: int, node_size: int, fit: PlannedFit
) -> tuple[int, list[Candidate]]:
    """Returns the number of layouts that were tried, and the layouts that fit. The layouts that fit
    are sorted by their `distance` from the run's own layout, smallest distance first."""
    tried, found = 0, []
    for config in candidates(run, ranks):
        try:
            check_layout(config.parallel, run.shape)
            check_recompute(config.model, config.parallel, run.shape)
            check_nodes(config, nodes, node_size)
        except ConfigError:
            continue
        tried += 1
        other = ResolvedRun(config, run.shape)
        if not fit.faults(other):
            budget = fit.budget(other)
            found.append(
                Candidate(
                    other, distance(run.config, config), max(map(budget.total, budget.phases))
                )
            )
    return tried, sorted(found, key=lambda each: (each.distance, each.peak))


def check_nodes(config: Config, nodes: int, node_size: int) -> None:
    """Raises ConfigError if the run would not fit on a cluster of the given size even if no other
    job used the cluster.

    Args:
        nodes: number of nodes of the cluster.
        node_size: number of GPUs per node.
    """
    empty = [Node(f"{n:08}", f"node {n + 1}", node_size, node_size) for n in range(nodes)]
    check_possible(Demand.of(config), empty)


def candidates(run: ResolvedRun, ranks: int) -> Iterator[Config]:
    """Yields layouts over `ranks` ranks. In each layout, a micro-batch has room for the longest
    sequence, and an update has at least one sequence per data-parallel replica. Other rules are not
    checked."""
    config, shape = run.config, run.shape
    batch = config.batch
    sequences = (batch.mini_batch_prompts or batch.prompts) * batch.samples_per_prompt
    for tensor, pipeline, context in product(_powers(ranks), _divisors(shape.layers), _powers(8)):
        if ranks % (tensor * pipeline * context):
            continue
        data = ranks // (tensor * pipeline * context)
        if data > sequences:
            continue
        for expert in _experts(shape, tensor * data * context):
            parallel = config.parallel.model_copy(
                update={
                    "tensor": tensor,
                    "pipeline": pipeline,
                    "virtual_pipeline": config.parallel.virtual_pipeline
                    if pipeline == config.parallel.pipeline
                    else 1,
                    "first_stage_layers": config.parallel.first_stage_layers
                    if pipeline == config.parallel.pipeline
                    else None,
                    "context": context,
                    "data": data,
                    "expert": expert,
                    "sequence": tensor > 1,
                }
            )
            for recompute, tokens, cut in product(
                dict.fromkeys((config.model.recompute, "none", "full")),
                _micro_batches(config, parallel.sequence_multiple),
                dict.fromkeys((config.optimizer.distributed, config.optimizer.name == "adam")),
            ):
                yield config.model_copy(
                    update={
                        "parallel": parallel,
                        "model": _recomputing(config, recompute),
                        "batch": batch.model_copy(update={"micro_batch_tokens": tokens}),
                        "optimizer": config.optimizer.model_copy(update={"distributed": cut}),
                    }
                )


def distance(base: Config, other: Config) -> float:
    """Returns the distance between two layouts. The distance is a sum of terms. For each parallel
    size, such as the tensor-parallel size, the distance contains the term |log2(a / b)|, where a
    and b are the sizes in the two layouts. For the micro-batch sizes a and b of the two layouts,
    the distance contains the term |log2(a / b)| / 2. If the two layouts differ in the setting
    `model.recompute`, the distance contains the term 1. If the two layouts differ in the setting
    `optimizer.distributed`, the distance also contains the term 1."""
    far = sum(
        abs(math.log2(getattr(base.parallel, cut) / getattr(other.parallel, cut))) for cut in _CUTS
    )
    far += abs(math.log2(base.batch.micro_batch_tokens / other.batch.micro_batch_tokens)) / 2
    return (
        far
        + (base.model.recompute != other.model.recompute)
        + (base.optimizer.distributed != other.optimizer.distributed)
    )


def _recomputing(config: Config, recompute: str) -> object:
    if recompute == config.model.recompute:
        return config.model
    fields = type(config.model).model_fields
    return config.model.model_copy(
        update={"recompute": recompute, **{name: fields[name].get_default() for name in _DEFAULT}}
    )


def _micro_batches(config: Config, multiple: int) -> list[int]:
    """Returns micro-batch sizes to try, in tokens: the run's own size, half the run's size, twice
    the run's size, and the smallest size that holds the longest sequence."""
    longest = longest_sequence(config)
    least, asked = longest + -longest % multiple, config.batch.micro_batch_tokens
    return [
        tokens for tokens in dict.fromkeys((asked, asked // 2, 2 * asked, least)) if tokens >= least
    ]


def _experts(shape: ModelShape, ranks: int) -> list[int]:
    return [ep for ep in _powers(shape.experts) if ranks % ep == 0] if shape.experts else [1]


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length())]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
