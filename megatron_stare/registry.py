"""Finds what a configuration names: one of ours by its short name, a user's own by its dotted path."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from megatron_stare.config.load import unknown_key
from megatron_stare.errors import ConfigError


def resolve(name: str, known: Mapping[str, str], where: str) -> Any:
    """The object called `name`.

    Args:
        name: a key of `known`, or `package.module.attribute`.
        known: short name to dotted path.
        where: the configuration key, for the error.

    Raises:
        ConfigError: unknown short name (with a suggestion), or a path that does not import.
    """
    if name not in known and "." not in name:
        raise unknown_key(name, known, where)
    module, _, attribute = known.get(name, name).rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(f"cannot import {module!r}: {error}", where=where) from error
    except AttributeError as error:
        raise ConfigError(f"{module!r} has no {attribute!r}", where=where) from error
