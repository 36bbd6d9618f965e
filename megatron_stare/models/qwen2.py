"""Defines Qwen2 and Qwen2.5, which have biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from megatron_stare.models.family import PROJECTIONS, ModelFamily


class Qwen2(ModelFamily):
    """Qwen2. The setting `attention_bias` changes nothing. Queries, keys and values always have a
    bias, and the output projection never has a bias."""

    model_type = "qwen2"
    qkv_bias = True
    quantized = PROJECTIONS
    unsupported: ClassVar[Mapping[str, str]] = {
        key: what for key, what in ModelFamily.unsupported.items() if key != "attention_bias"
    }


FAMILY = Qwen2()
