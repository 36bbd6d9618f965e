"""The configuration of a run's engines where there is no trainer beside them."""

from __future__ import annotations

from typing import Any

from megatron_stare.config.schema import Config


def engines_alone(config: Config, folder: str | None = None) -> Config:
    """Engines that share no device with a trainer, and name nothing that only a trainer asks for.

    Args:
        folder: of Hugging Face, in place of model.path, for tokenizer and stop tokens go with weights; None: that one.
    """
    changed: dict[str, Any] = {
        "sglang": config.sglang.model_copy(update={"colocated": False}),
        "moe": config.moe.model_copy(update={"routing_replay": False}),
    }
    if folder is not None:
        changed["model"] = config.model.model_copy(update={"path": folder})
    return config.model_copy(update=changed)
