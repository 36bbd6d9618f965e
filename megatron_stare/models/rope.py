"""Computes the frequencies of rotary embeddings whose context length was extended after
pretraining. Uses transformers' own formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_stare.models.shape import ModelShape


def scaled_frequencies(shape: ModelShape) -> tuple[Tensor, float]:
    """Returns the inverse frequencies and the attention scale of a model with RoPE scaling.

    Returns:
        The inverse frequencies, [half of the rotated columns of a head] float32 radians a position,
        and the factor on queries times keys before the softmax. The factor is the square of YaRN's
        factor on cosines and sines, divided by sqrt(head_dim). The square arises because YaRN's
        factor multiplies both queries and keys. Latent attention does not use this factor, because
        Megatron computes the scale of latent attention.
    """
    if shape.rope_scaling is None:
        raise ValueError("the model's RoPE is not scaled")
    frequencies, factor = _by_transformers(
        {**shape.rope_scaling, "rope_theta": shape.rope_theta},
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        head_dim=shape.rotated_dim,
        max_position_embeddings=shape.max_positions,
    )
    return frequencies, factor**2 / math.sqrt(shape.head_dim)


def yarn_factors(rope: Mapping[str, Any]) -> tuple[float, float]:
    """Returns two scale factors for YaRN's cosines and sines. The library transformers computes
    both factors. The first factor is computed from the given parameters `rope`. The second factor
    is computed from a copy of `rope` without the parameter `attention_factor`. Neither factor
    depends on the parameter `attn_factor`.

    Args:
        rope: rotary parameters of type yarn.
    """
    # this length keeps transformers from warning about `factor`
    longest = rope.get("original_max_position_embeddings", 1)
    given = {**rope, "rope_theta": 1.0e4}  # the factors do not depend on the base
    return (
        _by_transformers(given, max_position_embeddings=longest)[1],
        _by_transformers({**given, "attention_factor": None}, max_position_embeddings=longest)[1],
    )


def _by_transformers(rope: Mapping[str, Any], **sizes: int) -> tuple[Tensor, float]:
    """Computes a model's RoPE scaling from the rotary parameters in `rope`, with the formulas of
    the library transformers. Returns the inverse frequencies, and the factor by which the cosines
    and sines must be multiplied."""
    # imported here, because it takes seconds and few models need it
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # transformers warns about this key of the servers
    known = {key: value for key, value in rope.items() if key != "attn_factor"}
    # any config serves: the formulas read sizes and rope parameters only
    config = LlamaConfig(**sizes, rope_parameters=known)
    found: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
        config, torch.device("cpu")
    )
    return found
