"""From the name in the configuration (`rollout.engine`) to an engine."""

from __future__ import annotations

from typing import Any

from megatron_stare.config.schema import Config
from megatron_stare.registry import resolve
from megatron_stare.rollout.engine import Engine

SGLANG = "sglang"
ENGINES = {
    "local": "megatron_stare.rollout.local.LocalEngine",
    SGLANG: "megatron_stare.rollout.sglang.engine.SGLangEngine",  # built by sglang.build: it takes servers
}


def make_engine(name: str, **kwargs: Any) -> Engine:
    """A new, DIRTY engine in this process.

    Args:
        name: a key of ENGINES, or the dotted path of an Engine.
        kwargs: its constructor's arguments.

    Raises:
        ConfigError: no such engine.
    """
    engine: Engine = resolve(name, ENGINES, "rollout.engine")(**kwargs)
    return engine


def engine_of(config: Config) -> Engine:
    """The engine that a run's configuration asks for, DIRTY; see make_engine and sglang.build."""
    if config.rollout.engine == SGLANG:
        from megatron_stare.rollout.sglang.build import build_engine

        return build_engine(config)
    return make_engine(
        config.rollout.engine,
        model_path=config.model.path,
        max_batch=config.rollout.max_batch,
        threads=config.rollout.threads,
    )


def engine_workers(config: Config) -> int:
    """How many workers host the run's engines: one engine speaks for all SGLang servers, which balance its load."""
    return 1 if config.rollout.engine == SGLANG else config.rollout.engines


def requests_per_call(config: Config) -> int | None:
    """Requests an engine is given at a time; None: all, as SGLang's servers take the next when one is answered."""
    return None if config.rollout.engine == SGLANG else config.rollout.max_batch
