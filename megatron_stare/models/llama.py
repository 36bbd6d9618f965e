"""Llama 2 and 3: what every other family is described against."""

from __future__ import annotations

from megatron_stare.models.family import ModelFamily


class Llama(ModelFamily):
    """Nothing but the defaults."""

    model_type = "llama"


FAMILY = Llama()
