"""Defines the model family Llama (Llama 2 and 3). The base class ModelFamily already describes the
layers of Llama models."""

from __future__ import annotations

from typing import ClassVar

from megatron_stare.models.family import ModelFamily


class Llama(ModelFamily):
    """Llama. The first published config.json of Llama 2 lacks the key rope_theta. If the key is
    missing, the library transformers and the engines' servers use 10,000."""

    model_type = "llama"
    rope_theta: ClassVar[float | None] = 10_000.0


FAMILY = Llama()
