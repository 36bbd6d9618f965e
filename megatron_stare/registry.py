"""Finds the function or class for a name in the configuration. The name is either a short name that
this package defines, or a path to an object in the user's own code. The module does not import
torch."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from megatron_stare.errors import ConfigError, in_words, unknown_name, users_line

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

_FILE = "file:"  # begins the module names of files
_caches: list[Callable[[], None]] = []  # functions that empty caches; see forgotten_with_files
Cached = TypeVar("Cached", bound="_lru_cache_wrapper[Any]")

# Current paths of renamed modules by former path, which a user's files may still name.
MOVED = {
    "megatron_stare.batch": "megatron_stare.records.batch",
    "megatron_stare.bisecting.late_engine": "megatron_stare.commands.bisect.causes",
    "megatron_stare.commands.bisect.late_engine": "megatron_stare.commands.bisect.causes",
    "megatron_stare.metric": "megatron_stare.records.metric",
    "megatron_stare.observability.alerts": "megatron_stare.observability.sink",
    "megatron_stare.observability.rollout_files": "megatron_stare.run_dir.rollout_files",
    "megatron_stare.observability.service": "megatron_stare.observability.sinks.service",
    "megatron_stare.orchestration.guarded_batches": "megatron_stare.driver.guards",
    "megatron_stare.resolved": "megatron_stare.config.resolved",
    "megatron_stare.rollout.engine": "megatron_stare.rollout.engines.engine",
    "megatron_stare.rollout.local": "megatron_stare.rollout.engines.local",
    "megatron_stare.rollout.replicas": "megatron_stare.rollout.engines.replicas",
    "megatron_stare.rollout.sglang.replica": "megatron_stare.rollout.engines.sglang.replica",
    "megatron_stare.rollout.turns": "megatron_stare.rollout.sources.turns",
    "megatron_stare.shipped": "megatron_stare.process.shipped",
}


@dataclass(frozen=True)
class Extension:
    """Name and settings of an extension. An extension is a function or class that this package or
    the user defines.

    In YAML an extension is a name or `{name: ..., setting: value}`. The possible settings are the
    keyword-only parameters of the function or class that the extension names; see `settings_of`.

    `name`: a short name, or a path for `resolve`.
    `settings`: unchecked settings.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, value: Any) -> Extension:
        """Reads an extension from its YAML value. Raises ValueError if the YAML value does not name
        an extension."""
        if isinstance(value, cls):
            return value
        written = {"name": value} if isinstance(value, str) else value
        if not isinstance(written, Mapping) or not isinstance(written.get("name"), str):
            raise ValueError(
                "must be a name, or {name: ...} with settings of its own beside the name"
            )
        return cls(written["name"], {key: each for key, each in written.items() if key != "name"})

    @classmethod
    def parse(cls, text: str) -> Extension:
        """Parses a text that `str(extension)` returned. Returns an Extension that is equal to
        `extension`."""
        return cls.read(json.loads(text) if text.startswith("{") else text)

    def written(self) -> str | dict[str, Any]:
        """Returns the extension as a YAML value. If the extension has no settings, the YAML value
        is the extension's name, a string. If the extension has settings, the YAML value is a
        mapping that contains the name and the settings. The method `read` converts the YAML value
        back to an Extension with the same name and the same settings."""
        return {"name": self.name, **self.settings} if self.settings else self.name

    def __str__(self) -> str:
        return json.dumps(self.written(), sort_keys=True) if self.settings else self.name

    def __hash__(self) -> int:
        return hash(str(self))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            cls.read, serialization=core_schema.plain_serializer_function_ser_schema(cls.written)
        )


def settings_of(
    extension: Extension, reader: Callable[..., Any], where: str, given: Collection[str] = ()
) -> dict[str, Any]:
    """Checks and converts the settings of an extension.

    The settings are the keyword-only parameters of `reader`, with their types and defaults.

    Args:
        reader: function or class that the extension names.
        where: configuration key that error messages name.
        given: keyword-only parameters that the run passes itself. These parameters are not
            settings.

    Returns:
        The settings in the configuration, by name. Settings that the configuration lacks keep their
        defaults.

    Raises:
        ConfigError: a setting is unknown or missing, or the value of a setting has the wrong type
            or is out of range. The error for an unknown setting suggests a known setting.
    """
    parameters: Collection[inspect.Parameter] = ()
    with contextlib.suppress(TypeError, ValueError):  # no Python signature
        parameters = inspect.signature(reader).parameters.values()
    known = {
        each.name: each
        for each in parameters
        if each.kind is each.KEYWORD_ONLY and each.name not in given
    }
    for key in extension.settings:
        if key not in known and known:
            raise unknown_name(str(key), known, f"{where}.{key}")
        if key not in known:
            raise ConfigError(
                f"{extension.name!r} has no settings of its own",
                where=f"{where}.{key}",
                fix="leave it out",
            )
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in extension.settings:
            raise ConfigError(
                f"{extension.name!r} needs this setting, and it is missing", where=f"{where}.{key}"
            )
    return {
        key: _typed(reader, key, value, f"{where}.{key}")
        for key, value in extension.settings.items()
    }


def _typed(reader: Callable[..., Any], key: str, value: Any, where: str) -> Any:
    """Converts `value` to the annotated type of the parameter `key` in the signature of `reader`.
    Returns `value` unchanged if the parameter `key` has no annotation."""
    from pydantic import TypeAdapter, ValidationError  # only needed for extensions with settings
    from pydantic.errors import PydanticUserError

    annotated = reader.__init__ if isinstance(reader, type) else reader  # type: ignore[misc]
    try:
        hints = get_type_hints(
            annotated if inspect.isroutine(annotated) else type(reader).__call__,
            include_extras=True,
        )
        return TypeAdapter(hints.get(key, Any)).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        below = "".join(f".{part}" for part in first["loc"])
        raise ConfigError(
            f"{in_words(first)} (got {first['input']!r})", where=where + below
        ) from error
    except (NameError, PydanticUserError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"the type of this setting cannot be read: {reason}", where=where
        ) from error


def resolve(name: str, known: Mapping[str, str], where: str) -> Any:
    """Returns the object called `name`.

    Args:
        name: a key of `known`, `package.module.attribute` or `path/to/file.py:attribute`. The
            former path of a module that MOVED lists is accepted too.
        known: dotted paths by short name.
        where: configuration key that error messages name.

    Raises:
        ConfigError: the name is unknown, or the import fails. The error for an unknown name
            suggests a known name. The error for a failed import names the line that failed.
    """
    path, _, attribute = name.rpartition(":")
    if path.endswith(".py") and name not in known:
        return _attribute(_imported_file(path, where), attribute, where)
    if name not in known and "." not in name:
        raise unknown_name(name, known, where)
    module, _, attribute = known.get(name, name).rpartition(".")
    module = MOVED.get(module, module)
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise _not_imported(module, error, where) from error
    return _attribute(imported, attribute, where)


def _attribute(module: ModuleType, name: str, where: str) -> Any:
    if not hasattr(module, name):
        raise unknown_name(name, (n for n in vars(module) if not n.startswith("_")), where)
    return getattr(module, name)


def forget_files() -> None:
    """Makes `resolve` import users' files anew. One process, such as a notebook, can start several
    runs, and the user may edit a file between two runs. Without `forget_files`, the process would
    keep using the file's old contents, but the worker processes of the new run would import the
    file's new contents."""
    for name in [each for each in sys.modules if each.startswith(_FILE)]:
        del sys.modules[name]
    for clear in _caches:
        clear()


def forgotten_with_files(cached: Cached) -> Cached:
    """Decorates a function that has a functools cache, so that `forget_files` empties this cache.
    Use the decorator if the function returns objects that users' Python files define."""
    _caches.append(cached.cache_clear)
    return cached


def _imported_file(path: str, where: str) -> ModuleType:
    """Imports a Python file as a module, and returns the module. If the file was already imported,
    returns the same module again, until `forget_files` is called. The module gets a name that no
    import statement can contain. The file therefore cannot replace a module that other code
    imports."""
    file = Path(path).expanduser().resolve()
    name = f"{_FILE}{file}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(
            f"there is no file {path!r}",
            where=where,
            fix="correct the path, or give an absolute path",
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # a user's file may raise anything
        del sys.modules[name]
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise _not_imported(str(file), error, where) from error
    return module


def _not_imported(module: str, error: Exception | SystemExit, where: str) -> ConfigError:
    """Returns an error for a failed import. The error says either that the module is missing, or
    which line of the module failed."""
    if isinstance(error, SystemExit):  # raised in a library if the file parses its arguments
        return ConfigError(
            f"cannot import {module!r}: it calls sys.exit({error.code!r}) {users_line(error)}",
            where=where,
            fix='move what the file does as a program below `if __name__ == "__main__":`',
        )
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    # rows of MOVED whose former module is the missing module or lies in the missing package
    if missing and (
        moved := {old: new for old, new in MOVED.items() if f"{old}.".startswith(f"{missing}.")}
    ):
        return ConfigError(
            f"cannot import {module!r}: there is no {missing!r} in this release",
            where=where,
            fix="; ".join(f"import {new} instead of {old}" for old, new in moved.items()),
        )
    if missing and f"{module}.".startswith(f"{missing}."):
        return ConfigError(
            f"cannot import {module!r}: there is no module {missing!r} on Python's path",
            where=where,
            fix=(
                f"correct the dotted path, or name the folder that {missing!r} lies in:"
                " PYTHONPATH=FOLDER"
            ),
        )
    if isinstance(error, SyntaxError) and error.filename:
        line = f"{error.filename}:{error.lineno}"
    else:
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename
        ]
        # the first frame is `resolve` itself
        line = f"{frames[-1].filename}:{frames[-1].lineno}" if frames[1:] else module
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    return ConfigError(
        f"cannot import {module!r}: {type(error).__name__}: {said} ({line})",
        where=where,
        fix=f"mend {line}",
    )
