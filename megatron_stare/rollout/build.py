"""From the name in the configuration (`rollout.engine`) to an engine."""

from __future__ import annotations

from typing import Any

from megatron_stare.registry import resolve
from megatron_stare.rollout.engine import Engine

ENGINES = {"local": "megatron_stare.rollout.local.LocalEngine"}


def make_engine(name: str, **kwargs: Any) -> Engine:
    """A new, DIRTY engine.

    Args:
        name: a key of ENGINES, or the dotted path of an Engine.
        kwargs: its constructor's arguments.

    Raises:
        ConfigError: no such engine.
    """
    engine: Engine = resolve(name, ENGINES, "rollout.engine")(**kwargs)
    return engine
