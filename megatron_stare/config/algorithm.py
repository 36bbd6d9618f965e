"""Defines the section `algorithm`, which contains a method's name and the settings of this method.

Each field of a method's class is a setting of the method. Users can write their own method classes.
Method classes import torch, so reading the section `algorithm` imports torch. Importing this file
does not import torch.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

from megatron_stare.errors import ConfigError, unknown_name
from megatron_stare.registry import resolve

if TYPE_CHECKING:
    from megatron_stare.algorithms.method import Method

WHERE = "algorithm.name"


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """The method and its settings.

    `name`: a method's short name, or the dotted path of a user's class.
    `method`: the method as an object, whose fields are the values of the method's settings.
    """

    name: str
    method: Method

    @property
    def supervised(self) -> bool:
        """Tells whether the method learns from given responses instead of sampled responses; see
        Method."""
        return self.method.supervised

    def settings(self) -> dict[str, Any]:
        """Returns the section `algorithm` as a dict that contains the method's name and all
        settings of the method."""
        return {"name": self.name, **dataclasses.asdict(self.method)}

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.settings(),)

    @classmethod
    def read(cls, section: Any) -> AlgorithmConfig:
        """Checks a section and returns the method with its settings. The section is either the name
        of a method, or a mapping with the key `name` and the method's settings.

        Raises:
            pydantic.ValidationError: the method or a setting is unknown, or a value is out of
                range.
        """
        if isinstance(section, cls):
            return section
        section = {"name": section} if isinstance(section, str) else section
        if not isinstance(section, Mapping):
            raise _refusal(
                ConfigError("this is neither a method's name nor its settings"), (), section
            )
        settings = dict(section)
        name = settings.pop("name", None)
        try:
            method = _method_named(name)
        except ConfigError as error:
            raise _refusal(error, ("name",), name) from error
        _refuse_unknown(method, settings)
        try:
            return cls(name, TypeAdapter(method).validate_python(settings))
        except PydanticUserError as error:
            reason = str(error).splitlines()[0]
            broken = ConfigError(f"a setting of {name!r} has a type that cannot be read: {reason}")
            raise _refusal(broken, ("name",), name) from error

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.read, serialization=core_schema.plain_serializer_function_ser_schema(cls.settings)
        )


def _unpickled(settings: dict[str, Any]) -> AlgorithmConfig:
    """Rebuilds a pickled section `algorithm`. Raises ConfigError if the current process cannot
    import the method."""
    _method_named(settings["name"])
    return AlgorithmConfig.read(settings)


def _method_named(name: Any) -> type[Method]:
    """Returns the method's class. Raises ConfigError for an unknown name."""
    from megatron_stare.algorithms import METHODS, SUPERVISED
    from megatron_stare.algorithms.method import Method

    if not isinstance(name, str):
        raise ConfigError(
            "the method's name is missing", where=WHERE, fix=f"one of {', '.join(METHODS)}"
        )
    method = resolve(name, METHODS | SUPERVISED, WHERE)
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise ConfigError(f"{name!r} is not a subclass of Method", where=WHERE)
    return method


def _refuse_unknown(
    settings_class: type, settings: Mapping[Any, Any], loc: tuple[str, ...] = ()
) -> None:
    """Raises ValidationError if `settings` has a key that is not a field of `settings_class`.
    Checks the keys of nested dataclasses in the same way."""
    known = [field.name for field in dataclasses.fields(settings_class) if field.init]
    for key, value in settings.items():
        if key not in known:
            raise _refusal(
                unknown_name(str(key), known, ""), (*loc, str(key)), value, "extra_forbidden"
            )
        if isinstance(value, Mapping):
            for option in _options(settings_class, key):
                _refuse_unknown(option, value, (*loc, key))


def _options(settings_class: type, key: str) -> list[type]:
    """Returns a list with one element, the dataclass in the type annotation of the field `key` of
    `settings_class`. Returns [] if the annotation contains no dataclass or several dataclasses, or
    if the annotation cannot be resolved."""
    try:
        annotation = typing.get_type_hints(settings_class)[key]
    except NameError:
        return []  # validation reports the unreadable type by name
    found = [
        option
        for option in (typing.get_args(annotation) or (annotation,))
        if dataclasses.is_dataclass(option)
    ]
    return [option for option in found if isinstance(option, type)] if len(found) == 1 else []


def _refusal(
    error: ConfigError, loc: tuple[str, ...], value: Any, kind: str = "refused"
) -> ValidationError:
    """Wraps a ConfigError, so that pydantic can report this error together with errors in other
    sections. `config_error` unwraps the error."""
    told = PydanticCustomError(kind, "{what}", {"what": error.what, "error": error})
    return ValidationError.from_exception_data(
        "algorithm", [InitErrorDetails(type=told, loc=loc, input=value)]
    )
