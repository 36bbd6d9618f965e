"""Finds what a configuration names: one of ours by its short name, a user's own by its dotted path."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import pydantic

from megatron_stare.algorithms import METHODS
from megatron_stare.algorithms.method import Method
from megatron_stare.config.load import config_error, unknown_key
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
        imported = importlib.import_module(module)
    except Exception as error:  # whatever a user's module raises while it is imported
        raise ConfigError(f"cannot import {module!r}: {type(error).__name__}: {error}", where=where) from error
    if not hasattr(imported, attribute):
        raise unknown_key(attribute, (n for n in vars(imported) if not n.startswith("_")), where)
    return getattr(imported, attribute)


def build_method(settings: Mapping[str, Any], where: str = "algorithm") -> Method:
    """The method that the `algorithm` section describes.

    Args:
        settings: `name` and the method's own fields.

    Raises:
        ConfigError: unknown method, unknown setting (with a suggestion), or a value out of range.
    """
    settings = dict(settings)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError("the method's name is missing", where=f"{where}.name", fix=f"one of {', '.join(METHODS)}")
    method = resolve(name, METHODS, f"{where}.name")
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise ConfigError(f"{name!r} is not a subclass of Method", where=f"{where}.name")
    known = {f.name for f in dataclasses.fields(method)}
    for key in settings:
        if key not in known:
            raise unknown_key(key, known, f"{where}.{key}")
    try:
        return pydantic.TypeAdapter(method).validate_python(settings)
    except pydantic.ValidationError as error:
        raise config_error(error, known, where) from error
