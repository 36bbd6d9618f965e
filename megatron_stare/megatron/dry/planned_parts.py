"""What a rank of any layout holds, put together from parts that were built once on the meta device.

All layers of a model are alike, and a rank has a number of them, with the embedding on the first stage and the norm and
the output layer on the last. So the tensors of one layer, cut as the layout cuts them, say what every rank of every
pipeline, data and context layout holds: a build for each way to cut a layer (tensor and expert ranks) takes the place
of one for each layout. tests/megatron/test_planned_parts.py holds the sums against whole ranks, to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_stare.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_stare.megatron.dry.pretend import pretend
from megatron_stare.megatron.model.model import build_model, is_expert, named_parameters
from megatron_stare.models.shape import ModelShape

_ALIGNED = 64  # elements that a parameter starts at a multiple of, in a buffer that is cut over replicas
_BUCKET = 128  # and that a bucket ends at a multiple of
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Parts:
    """Elements of each tensor, on one rank.

    layer: of a layer without its experts; experts: of the experts of a layer that lie on the rank.
    head: the norm after the last layer and the output layer, which tied embeddings do not have on one stage.
    """

    embedding: tuple[int, ...]
    layer: tuple[int, ...]
    experts: tuple[int, ...]
    head: tuple[int, ...]


def build_parts(shape: ModelShape, model: ModelConfig, tensor: int, expert: int) -> Parts:
    """Builds one layer with all that is around it."""
    parallel = ParallelConfig(
        tensor=tensor, sequence=tensor > 1, expert=expert, data=expert // math.gcd(expert, tensor)
    )
    sizes: dict[str, list[int]] = {"embedding": [], "layer": [], "experts": [], "head": []}
    with pretend(parallel, 0) as layout:
        chunks = build_model(replace(shape, layers=1), model, parallel, layout)
        for name, parameter in named_parameters(chunks):
            layer = "experts" if is_expert(name) else "layer"
            part = layer if name.startswith("decoder.layers.") else name.split(".")[0]
            sizes[part if part in sizes else "head"].append(parameter.numel())
    return Parts(**{part: tuple(found) for part, found in sizes.items()})


def stage_bytes(
    parts: Parts,
    shape: ModelShape,
    model: ModelConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    stage: int,
) -> dict[str, int]:
    """Bytes of the first rank of a pipeline stage, by the items of planned_rank.py."""
    chunks = [_chunk(parts, shape, parallel, stage, chunk) for chunk in range(parallel.virtual_pipeline)]
    experts = parallel.tensor * parallel.replicas // parallel.expert
    held = updated = 0
    for dense, routed in chunks:
        for tensors, replicas in [*((one, parallel.replicas) for one in dense), (routed, experts)]:
            cut = replicas if optimizer.distributed else None
            held += _buffer(tensors, cut)
            updated += _share(tensors, cut)
    return {
        "parameters": held * _BYTES[model.dtype],
        "gradients": held * 4,
        "main parameters": 0 if model.dtype == "float32" else updated * 4,
        "moments": updated * 4 * (2 if optimizer.name == "adam" else 0),
    }


def _chunk(
    parts: Parts, shape: ModelShape, parallel: ParallelConfig, stage: int, chunk: int
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Tensors of a stage's chunk, by the bucket they lie in, and its experts."""
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    layers = shape.layers // (stages * chunks)
    if (first := parallel.first_stage_layers) is not None:
        layers = first if stage == 0 else (shape.layers - first) // (stages - 1)
    apart = parallel.tensor > 1 or parallel.expert > 1  # only then have experts replicas, and buffers, of their own
    body = list((parts.layer if apart else parts.layer + parts.experts) * layers)
    shared: list[int] = []
    starts, ends = stage == 0 and chunk == 0, stage == stages - 1 and chunk == chunks - 1
    across = shape.tied and stages > 1  # both ends have the matrix then, in a bucket of its own
    if across and (starts or ends):
        shared += parts.embedding
    elif starts:
        body = [*parts.embedding, *body]
    if ends:
        body += parts.head
    return [tuple(body), tuple(shared)], parts.experts * layers if apart else ()


def _buffer(tensors: Sequence[int], replicas: int | None) -> int:
    """Elements of a bucket, padded as Megatron pads what it cuts over `replicas`; None: it is not cut."""
    if replicas is None:
        return sum(tensors)
    unit = math.lcm(replicas, _BUCKET)
    return -(-sum(-(-size // _ALIGNED) * _ALIGNED for size in tensors) // unit) * unit


def _share(tensors: Sequence[int], replicas: int | None) -> int:
    """Elements that the first replica updates, of the first of as many equal parts of the bucket, in which Megatron
    lays tensors from the last to the first; gaps between tensors are not updated."""
    if replicas is None:
        return sum(tensors)
    end = _buffer(tensors, replicas) // replicas
    position = updated = 0
    for size in reversed(tensors):
        position = -(-position // _ALIGNED) * _ALIGNED
        if position >= end:
            break
        updated += min(size, end - position)
        position += size
    return updated
