"""How many bytes of activations a rank keeps from a micro-batch's forward to its backward, recomputed or not.

Counted from what is saved in the layers that run without Transformer Engine, on a CPU: our RMSNorm and SwiGLU, and
packed attention over groups of equal length. Fused kernels keep less, padding within a group more.
tests/megatron/test_recompute.py holds the figures against the tensors that are saved, within 1 %.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stare.config.performance import WHOLE_UP_TO
from megatron_stare.config.schema import Config
from megatron_stare.models.shape import ModelShape


@dataclass(frozen=True)
class ActivationMemory:
    """Of one micro-batch on one rank.

    kept: bytes from forward to backward; a pipeline's stage holds several micro-batches (planning/memory_check.py).
    again: bytes of the largest part that backward computes again, which live beside `kept` meanwhile.
    """

    kept: int
    again: int


def activation_memory(
    config: Config, shape: ModelShape, tokens: int, longest: int, rows: int = 1
) -> ActivationMemory | None:
    """Of a micro-batch of so many tokens, on the last stage of the pipeline, without the logits.

    Args:
        tokens: positions of the micro-batch, padding included.
        longest: positions of its longest sequence.
        rows: sequences beside one another; 1 where they are packed.

    Returns:
        None for a mixture of experts, whose experts' shares are not known before.
    """
    if shape.experts:
        return None
    model, parallel = config.model, config.parallel
    size = 2 if model.dtype == "bfloat16" else 4
    chunks = parallel.virtual_pipeline
    layers = shape.layers // (parallel.pipeline * chunks)
    if parallel.first_stage_layers is not None:
        layers = (shape.layers - parallel.first_stage_layers) // (parallel.pipeline - 1)
    hidden = shape.hidden / (parallel.tensor if parallel.sequence else 1)
    whole = sum(layer_parts(config, shape, rows, longest).values())
    kept, again = layers * whole, 0.0
    if model.recompute == "full":
        uniform, number = model.recompute_method == "uniform", min(model.recompute_layers, layers)
        kept = layers // number * hidden if uniform else number * hidden + (layers - number) * whole
        again = (number if uniform else 1) * whole
    elif model.recompute == "selective":
        parts = layer_parts(config, shape, rows, longest, recomputed=frozenset(model.recompute_modules))
        kept, again = layers * sum(parts.values()), whole - sum(parts.values())
    last_norm = hidden + 1
    angles = 4 * longest * shape.head_dim if model.recompute == "full" else 0  # float32, an argument of every layer
    return ActivationMemory(
        round((chunks * kept + last_norm) * tokens * size) + angles, max(round(again * tokens * size), 0)
    )


def layer_parts(
    config: Config, shape: ModelShape, rows: int, longest: int, recomputed: frozenset[str] = frozenset()
) -> dict[str, float]:
    """How many numbers a token each part of a layer keeps on a rank."""
    parallel, packed = config.parallel, config.batch.packed
    tp, cut = parallel.tensor, parallel.tensor if parallel.sequence else 1
    heads, groups = shape.heads / tp, max(shape.kv_heads / tp, 1)
    q, k = heads * shape.head_dim, groups * shape.head_dim
    product = q + 2 * k  # of hidden states and the weights of all three projections; kept whole where a view of it is
    if "core_attn" in recomputed:
        attention = product + q + k + q  # arguments, values being a view, and the output
    elif longest <= WHOLE_UP_TO and config.model.dtype == "float32" and parallel.context == 1:
        attention = q + 2 * k + heads * longest + q  # arguments laid anew, what became of the scores, the output
    elif packed:  # gathered arguments, output before and after it is scattered, the sum of each row
        attention = q + 2 * k + 2 * q + heads
    else:
        attention = product + q + k + q + heads
    return {
        # input by its root, the root; and the output, which the linear layer keeps
        "norms": (4 * shape.hidden + 2) / cut,
        # what becomes of queries and keys, and their roots
        "norms of heads": (q + heads + k + groups) if shape.qk_norm else 0,
        "rotation": 4 * shape.head_dim / (1 if packed else rows),  # sines and cosines
        "attention": attention,
        # both halves of the first product, the activation, their product
        "feed forward": 0 if "mlp" in recomputed else 4 * shape.ffn / tp,
    }
