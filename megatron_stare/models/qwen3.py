"""Defines dense Qwen3 models, which normalise the queries and keys of each head."""

from __future__ import annotations

from megatron_stare.models.family import PROJECTIONS, ModelFamily


class Qwen3(ModelFamily):
    """Qwen3. The head size is a setting of config.json, and does not follow from the other
    sizes."""

    model_type = "qwen3"
    qk_norm = True
    served_by_groups = True
    quantized = PROJECTIONS


FAMILY = Qwen3()
