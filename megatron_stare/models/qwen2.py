"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from megatron_stare.models.family import ModelFamily


class Qwen2(ModelFamily):
    """Qwen2. `attention_bias`, if set, changes nothing: queries, keys and values always have a
    bias, and the output projection never does."""

    model_type = "qwen2"
    qkv_bias = True
    unsupported: ClassVar[Mapping[str, str]] = {
        key: what for key, what in ModelFamily.unsupported.items() if key != "attention_bias"
    }


FAMILY = Qwen2()
