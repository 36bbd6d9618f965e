"""Mistral: Llama's layers, and in some releases attention that sees a window of the last
positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_stare.models.family import ModelFamily


class Mistral(ModelFamily):
    """A window is set in the first release's config.json, and null in later ones."""

    model_type = "mistral"

    def window(self, config: Mapping[str, Any]) -> int | None:
        # where the field is missing, transformers takes the first release's
        return config.get("sliding_window", 4096)


FAMILY = Mistral()
