"""Builds every rank of a layout on the meta device, and checks that the ranks together hold the
model.

The layout may need more hardware than this machine has. The function `faults` checks all ranks
together. `faults` checks parameter names, the checkpoint, the weight stream, and the Hugging Face
tensors that the parameters form.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_stare.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_stare.megatron.backend.cpu_backend import has_transformer_engine
from megatron_stare.megatron.dry.planned_rank import RankPlan, StatePart, plan_rank
from megatron_stare.megatron.model.model import is_expert
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.files.blocks import places
from megatron_stare.weights.files.check import expected, rules
from megatron_stare.weights.files.processes import Advance, run_parts
from megatron_stare.weights.sync.stream_plan import Held, plan_of

_COLLECTED_EVERY = 4  # ranks between two collections: a model is a reference cycle


@dataclass(frozen=True)
class _Ranks:
    """Ranks whose parts of the model are built by one process, and the settings of the model."""

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
    """Returns the plans of all ranks of the layout, in rank order.

    Args:
        processes: number of processes that build ranks in parallel.
        advance: callback that receives the number of ranks built since its last call.
    """
    world = parallel.world_size
    split = [
        _Ranks(shape, model, parallel, optimizer, range(n, world, processes))
        for n in range(processes)
    ]
    built = run_parts(_build, [part for part in split if part.ranks], advance, where="the layout")
    return sorted((plan for part in built for plan in part), key=lambda plan: plan.rank)


def _build(part: _Ranks, advance: Advance) -> list[RankPlan]:
    plans = []
    collected = gc.isenabled()
    gc.disable()  # it would scan all imported modules again and again
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
    """Returns, for every kind of memory, the plan of the rank with the most bytes and the plan of
    the rank with the fewest bytes. The key "total" stands for the sum of all kinds of memory."""
    sizes = {item: [plan.nbytes[item] for plan in plans] for item in plans[0].nbytes}
    sizes["total"] = [sum(plan.nbytes.values()) for plan in plans]
    return {
        item: (plans[of.index(max(of))], plans[of.index(min(of))]) for item, of in sizes.items()
    }


def assumptions(
    shape: ModelShape, model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig
) -> list[str]:
    """Returns the assumptions of a plan as a list of texts for the user. The last text names the
    kinds of memory that the plan's byte counts leave out."""
    experts = parallel.tensor * parallel.replicas // parallel.expert
    shared = f"{parallel.replicas} data-parallel replicas" + (
        f" ({experts} of an expert's)" if shape.experts else ""
    )
    return [
        (
            f"parameters in {model.dtype}, gradients in float32, and what the optimizer updates and"
            " its moments in float32"
        ),
        (
            f"the optimizer's share is cut over {shared}"
            if optimizer.distributed
            else "every rank has all optimizer state"
        ),
        (
            "Adam keeps two moments of every element"
            if optimizer.name == "adam"
            else "the optimizer keeps no moments"
        ),
        (
            f"{shape.vocab_size} rows of the vocabulary, padded to"
            f" {shape.padded_vocab(parallel.tensor)}"
        ),
        (
            f"layers of {'Transformer Engine' if has_transformer_engine() else 'megatron-core'};"
            " both are of equal size"
        ),
        (
            "left out: activations, logits, collectives' and the weight stream's buffers, what CUDA"
            " and its allocator take"
        ),
    ]


def faults(
    plans: Sequence[RankPlan], shape: ModelShape, parallel: ParallelConfig, bucket_bytes: int
) -> list[str]:
    """Returns a list of the faults of a layout, in words. The list of faults is empty if the ranks
    together hold the whole model.

    Args:
        plans: plans of all ranks, in order.
        bucket_bytes: bucket size of the weight stream.
    """
    found = [f"rank {plan.rank}: {name} has data" for plan in plans for name in plan.with_data]
    found += _faults_of_replicas(plans, shape, parallel)
    found += _faults_of_checkpoint([part for plan in plans for part in plan.state], shape)
    found += _faults_of_stream(plans, shape, bucket_bytes)
    return found


def _faults_of_replicas(
    plans: Sequence[RankPlan], shape: ModelShape, parallel: ParallelConfig
) -> Iterator[str]:
    """Checks the Hugging Face tensors that the ranks of each data-parallel replica hold. Together,
    the ranks of a replica must hold all parts of every tensor of the model. The number of copies of
    each part must be the number that `_copies` returns. No rank may hold a part of any other
    tensor. There must be no more replicas than the layout requires. Yields a text for each
    fault."""
    replicas = {
        False: parallel.replicas,
        True: parallel.tensor * parallel.replicas // parallel.expert,
    }
    found: dict[tuple[str, int], list[Held]] = defaultdict(list)
    expert_tensors = set()
    for plan in plans:
        for held in plan.held:
            of_expert = is_expert(held.piece.parameter)
            found[held.hf, plan.expert_replica if of_expert else plan.replica].append(held)
            if of_expert:
                expert_tensors.add(held.hf)
    wanted = expected(shape)
    yield from (
        f"{name} is none of the model's tensors"
        for name in {name for name, _ in found} - wanted.keys()
    )
    layouts = {name: rule.layout for rule in rules(shape) for name in rule.hf}
    for name, size in wanted.items():
        for replica in range(replicas[name in expert_tensors]):
            held_here = found.pop((name, replica), [])
            # Transformer Engine keeps projections into latents whole on every rank
            whole = layouts[name] == "column" and all(one.parts == 1 for one in held_here)
            made = _made(
                held_here, _copies("replicated" if whole else layouts[name], shape, parallel)
            )
            if made != size:
                yield f"replica {replica} makes {name} {made}, not {size}"
    yield from (
        f"there is a replica {replica} of {name}" for name, replica in found if name in wanted
    )


def _copies(layout: str, shape: ModelShape, parallel: ParallelConfig) -> int:
    """Returns the number of ranks in one data-parallel replica that hold the same part of a tensor.
    If a tensor is not cut, every tensor-parallel rank holds a copy of the whole tensor. If the
    embedding is tied, the first and the last pipeline stage each hold a copy of the embedding."""
    tied = shape.tied and layout == "vocab" and parallel.pipeline > 1
    return (parallel.tensor if layout == "replicated" else 1) * (2 if tied else 1)


def _made(held: list[Held], copies: int) -> tuple[int, ...] | str:
    """Returns the size of the tensor that a replica's pieces form, or a description of what is
    wrong with the pieces."""
    counts = Counter((one.piece.number, one.part) for one in held)
    if not held:
        return "nowhere"
    if set(counts.values()) != {copies}:
        return f"{dict(counts)} times (piece, part), each should be {copies}"
    numbers = {one.piece.number for one in held}
    if (
        len(counts) != len(numbers) * held[0].parts
        or len({(one.parts, one.cut, one.dtype) for one in held}) > 1
    ):
        return "in parts that do not belong together"
    pieces = {(one.piece.number, one.part): one.piece.shape for one in held}
    size = list(held[0].piece.shape)
    size[held[0].cut] = sum(piece[held[0].cut] for piece in pieces.values())
    return tuple(size)


def _faults_of_checkpoint(parts: Sequence[StatePart], shape: ModelShape) -> Iterator[str]:
    """Yields faults of the checkpoint. The parts that ranks write must cover every tensor exactly
    once. A part that a rank holds but does not write must be written by another rank. The
    checkpoint must have exactly the tensors that the code in weights/ converts."""
    by_key: dict[str, list[StatePart]] = defaultdict(list)
    for part in parts:
        by_key[part.key].append(part)
    wholes = {key: of_key[0].whole for key, of_key in by_key.items() if of_key[0].dtype is not None}
    for key, of_key in by_key.items():
        if len({(part.whole, part.dtype) for part in of_key}) > 1:
            yield f"checkpoint: ranks disagree on the size or dtype of {key}"
            continue
        written = {(part.start, part.sizes) for part in of_key if part.main}
        if stray := {(part.start, part.sizes) for part in of_key} - written:
            yield f"checkpoint: no rank writes {key} at {min(stray)}"
        if not _tiled(of_key[0].whole, [(part.start, part.sizes) for part in of_key if part.main]):
            yield f"checkpoint: the parts of {key} leave gaps or overlap"
    sizes, known = expected(shape), set()
    for rule in rules(shape):
        found = [place for place in places(rule.megatron) if place.key in wholes]
        if len(found) != 1:
            yield f"checkpoint: {len(found)} places for {rule.megatron}"
            continue
        known.add(found[0].key)
        counts = tuple(
            shape.experts if what == "experts" else shape.layers for what in found[0].dims
        )
        rows, rest = sum(sizes[name][0] for name in rule.hf), sizes[rule.hf[0]][1:]
        lead, own = wholes[found[0].key][: len(counts)], wholes[found[0].key][len(counts) :]
        if (
            lead != counts
            or own[1:] != rest
            or not (own[0] >= rows if rule.layout == "vocab" else own[0] == rows)
        ):
            yield (
                f"checkpoint: {found[0].key} is {wholes[found[0].key]}, not"
                f" {(*counts, rows, *rest)}"
            )
    yield from (
        f"checkpoint: {key} is none of the model's tensors" for key in wholes.keys() - known
    )


def _tiled(
    whole: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> bool:
    """Returns True if boxes (start, sizes) cover every element of a tensor exactly once. Cuts the
    tensor into cells along the edges of all boxes, and counts the boxes that cover each cell."""
    edges = []
    for dim, size in enumerate(whole):
        edges.append(
            sorted(
                {0, size, *(start[dim] for start, _ in boxes), *(s[dim] + n[dim] for s, n in boxes)}
            )
        )
        if edges[dim][0] < 0 or edges[dim][-1] > size:
            return False
    at = [{edge: index for index, edge in enumerate(of_dim)} for of_dim in edges]
    covered = np.zeros([len(of_dim) - 1 for of_dim in edges], dtype=np.int64)
    for start, sizes in boxes:
        covered[tuple(slice(a[s], a[s + n]) for a, s, n in zip(at, start, sizes, strict=True))] += 1
    return bool((covered == 1).all())


def _faults_of_stream(
    plans: Sequence[RankPlan], shape: ModelShape, bucket_bytes: int
) -> Iterator[str]:
    """Checks that the weight stream sends every Hugging Face tensor whole and exactly once. Yields
    each fault."""
    try:
        plan = plan_of([plan.held for plan in plans], shape, bucket_bytes)
    except ValueError as error:
        yield f"weight stream: {error}"
        return
    wanted, sent = expected(shape), Counter[str]()
    for slot in (slot for layout in plan.layouts for slot in layout.slots):
        sent[slot.name] += 1
        if slot.shape != wanted.get(slot.name):
            yield f"weight stream: {slot.name} is {slot.shape}, not {wanted.get(slot.name)}"
    yield from (
        f"weight stream: {name} is sent {sent[name]} times" for name in wanted if sent[name] != 1
    )
