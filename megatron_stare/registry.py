"""Finds what a configuration names: ours by its short name, a user's own by its dotted path. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from megatron_stare.errors import ConfigError, unknown_name


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
        raise unknown_name(name, known, where)
    module, _, attribute = known.get(name, name).rpartition(".")
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # whatever a user's module raises while it is imported
        raise ConfigError(f"cannot import {module!r}: {type(error).__name__}: {error}", where=where) from error
    if not hasattr(imported, attribute):
        raise unknown_name(attribute, (n for n in vars(imported) if not n.startswith("_")), where)
    return getattr(imported, attribute)
