"""Mistral: Llama's layers; in some releases attention sees a window of the last positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_stare.models.family import ModelFamily


class Mistral(ModelFamily):
    """Mistral. The first release's config.json sets a window; later ones have null."""

    model_type = "mistral"

    def window(self, config: Mapping[str, Any]) -> int | None:
        # if the field is missing, transformers uses the first release's window
        return config.get("sliding_window", 4096)


FAMILY = Mistral()
