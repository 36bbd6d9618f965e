"""Defines Mistral, which has Llama's layers. In some releases of Mistral, attention covers only a
window of the most recent positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_stare.models.family import ModelFamily


class Mistral(ModelFamily):
    """Mistral. The config.json of the first release sets an attention window. Later releases set
    null."""

    model_type = "mistral"

    def window(self, config: Mapping[str, Any]) -> int | None:
        # if the field is missing, transformers uses the first release's window
        return config.get("sliding_window", 4096)


FAMILY = Mistral()
