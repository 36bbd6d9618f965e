"""Defines Llama 2 and 3, which have the layers of ModelFamily."""

from __future__ import annotations

from typing import ClassVar

from megatron_stare.models.family import ModelFamily


class Llama(ModelFamily):
    """Llama. The first config.json of Llama 2 has no rope_theta; transformers and servers then use
    10,000."""

    model_type = "llama"
    rope_theta: ClassVar[float | None] = 10_000.0


FAMILY = Llama()
