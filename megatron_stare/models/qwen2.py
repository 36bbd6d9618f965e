"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from megatron_stare.models.family import ModelFamily


class Qwen2(ModelFamily):
    """`attention_bias`, where it is there, says what the family does anyway: its output projection
    has no bias."""

    model_type = "qwen2"
    qkv_bias = True
    unsupported: ClassVar[Mapping[str, str]] = {
        key: what for key, what in ModelFamily.unsupported.items() if key != "attention_bias"
    }


FAMILY = Qwen2()
