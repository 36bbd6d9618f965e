"""Configuration of engines that do not share GPUs with a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_stare.config.schema import Config, SGLangConfig

# server settings that also apply to servers started elsewhere
_OF_OTHERS = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "sync",
    "sync_folder",
    "seeds",
    "agreement_limit",
    "canary_prompts",
)

SYNC_FOLDER = "weight_sync"  # in the run directory
# sections that only an engine with servers may have, see Config
OF_SERVERS = ("sglang",)


def engines_alone(config: Config, folder: str | None = None) -> Config:
    """Returns a copy of the configuration without colocation and routing replay, which need a
    trainer. The weight sync `tensor` of colocated servers is replaced by `disk`, because `tensor`
    reaches only servers on the sender's own GPU.

    Args:
        folder: Hugging Face folder that replaces model.path, so that tokenizer and stop tokens
            match the weights. None keeps model.path.
    """
    of_servers: dict[str, Any] = {"colocated": False}
    if config.sglang.colocated and config.sglang.sync == "tensor":
        of_servers["sync"] = "disk"
    changed: dict[str, Any] = {
        "sglang": config.sglang.model_copy(update=of_servers),
        "moe": config.moe.model_copy(update={"routing_replay": False}),
    }
    if folder is not None:
        changed["model"] = config.model.model_copy(update={"path": folder})
    return config.model_copy(update=changed)


def synced_in(config: Config, run_dir: Path) -> Config:
    """Sets sglang.sync_folder to a folder in the run directory, unless sglang.sync_folder is
    already set. All nodes share the run directory."""
    if config.sglang.sync_folder is not None:
        return config
    sglang = config.sglang.model_copy(update={"sync_folder": str(run_dir.resolve() / SYNC_FOLDER)})
    return config.model_copy(update={"sglang": sglang})


def evaluation_engines(config: Config) -> Config | None:
    """Returns the configuration of the engines that are reserved for evaluation, or None if no
    engines are reserved."""
    if not config.eval.engines and not config.eval.urls:
        return None
    alone = engines_alone(config)
    # attached servers keep only the settings in _OF_OTHERS, none about how training starts servers
    given = (
        {name: getattr(alone.sglang, name) for name in _OF_OTHERS}
        if config.eval.urls
        else dict(alone.sglang)
    )
    servers = SGLangConfig(**given | {"urls": config.eval.urls, "router": None})
    rollout = alone.rollout.model_copy(update={"engines": config.eval.engines or 1})
    return alone.model_copy(update={"sglang": servers, "rollout": rollout})
