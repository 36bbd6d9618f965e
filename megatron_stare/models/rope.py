"""Frequencies of rotary embeddings whose range was extended after pretraining, by transformers' own
formulas."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_stare.models.shape import ModelShape


def scaled_frequencies(shape: ModelShape) -> tuple[Tensor, float]:
    """Inverse frequencies and attention scale of a model with RoPE scaling.

    Returns:
        [half of what is rotated of a head] float32 radians a position, and what queries times keys
        are multiplied by before the softmax: YaRN's factor on cosines and sines, which meets
        queries and keys alike, squared, over sqrt(head_dim). Latent attention has a scale of its
        own.
    """
    if shape.rope_scaling is None:
        raise ValueError("the model's RoPE is not scaled")
    # imported here, as it takes seconds and few models need it
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
