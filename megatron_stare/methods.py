"""From the `algorithm` section of a configuration to a method, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pydantic

from megatron_stare.algorithms import METHODS
from megatron_stare.algorithms.method import Method
from megatron_stare.config.load import config_error
from megatron_stare.errors import ConfigError, unknown_name
from megatron_stare.registry import resolve


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
            raise unknown_name(key, known, f"{where}.{key}")
    try:
        return pydantic.TypeAdapter(method).validate_python(settings)
    except pydantic.ValidationError as error:
        raise config_error(error, known, where) from error
