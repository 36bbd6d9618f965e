"""The configuration of a run's engines where there is no trainer beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_stare.config.schema import Config, SGLangConfig

# settings of servers that were started elsewhere, as far as they say how a run treats them
_OF_OTHERS = ("dtype", "sync", "sync_folder", "seeds", "agreement_limit", "canary_prompts")

SYNC_FOLDER = "weight_sync"  # in a run's directory
# sections that only an engine in front of servers may have, see Config
OF_SERVERS = ("sglang",)


def engines_alone(config: Config, folder: str | None = None) -> Config:
    """Engines that share no device with a trainer, and name nothing that only a trainer asks for.

    Args:
        folder: of Hugging Face, in place of model.path, for tokenizer and stop tokens go with
            weights; None: that one.
    """
    changed: dict[str, Any] = {
        "sglang": config.sglang.model_copy(update={"colocated": False}),
        "moe": config.moe.model_copy(update={"routing_replay": False}),
    }
    if folder is not None:
        changed["model"] = config.model.model_copy(update={"path": folder})
    return config.model_copy(update=changed)


def synced_in(config: Config, run_dir: Path) -> Config:
    """Names the folder through which weights go to servers, where none is set: one in the run's,
    which all of its nodes share."""
    if config.sglang.sync_folder is not None:
        return config
    sglang = config.sglang.model_copy(update={"sync_folder": str(run_dir.resolve() / SYNC_FOLDER)})
    return config.model_copy(update={"sglang": sglang})


def evaluation_engines(config: Config) -> Config | None:
    """The configuration of the engines that a run's evaluations have to themselves; None: there are
    none."""
    if not config.eval.engines and not config.eval.urls:
        return None
    alone = engines_alone(config)
    # of those that training attaches to, and of how it starts its own, nothing holds for these
    given = (
        {name: getattr(alone.sglang, name) for name in _OF_OTHERS}
        if config.eval.urls
        else dict(alone.sglang)
    )
    servers = SGLangConfig(**given | {"urls": config.eval.urls, "router": None})
    rollout = alone.rollout.model_copy(update={"engines": config.eval.engines or 1})
    return alone.model_copy(update={"sglang": servers, "rollout": rollout})
