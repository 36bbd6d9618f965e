"""Defines Llama 2 and 3, which need only the defaults of ModelFamily."""

from __future__ import annotations

from megatron_stare.models.family import ModelFamily


class Llama(ModelFamily):
    """Llama, with the defaults of ModelFamily."""

    model_type = "llama"


FAMILY = Llama()
