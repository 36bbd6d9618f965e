"""Computes the frequencies of rotary embeddings whose context length was extended after
pretraining. Uses transformers' own formulas."""

from __future__ import annotations

import math

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
    # imported here, because it takes seconds and few models need it
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # any config serves: the formulas read sizes and rope parameters only
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        head_dim=shape.rotated_dim,
        max_position_embeddings=shape.max_positions,
        rope_parameters={**shape.rope_scaling, "rope_theta": shape.rope_theta},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[shape.rope_scaling["rope_type"]](
        config, torch.device("cpu")
    )
    return frequencies, factor**2 / math.sqrt(shape.head_dim)
