"""Finds what a configuration names: ours by its short name, a user's own by its dotted path. Imports no torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_stare.errors import ConfigError, unknown_name

# Modules of earlier releases that configurations name or a user's files import, and where they are now.
MOVED = {
    "megatron_stare.batch": "megatron_stare.records.batch",
    "megatron_stare.bisecting.late_engine": "megatron_stare.commands.bisect.changed_parts",
    "megatron_stare.commands.bisect.late_engine": "megatron_stare.commands.bisect.changed_parts",
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


def resolve(name: str, known: Mapping[str, str], where: str) -> Any:
    """The object called `name`.

    Args:
        name: a key of `known`, `package.module.attribute` or `path/to/file.py:attribute`; of a module that is in MOVED
            the former name too.
        known: short name to dotted path.
        where: the configuration key, for the error.

    Raises:
        ConfigError: unknown short name (with a suggestion), or a path that does not import (with the line that fails).
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
    except Exception as error:  # whatever a user's module raises while it is imported
        raise _not_imported(module, error, where) from error
    return _attribute(imported, attribute, where)


def _attribute(module: ModuleType, name: str, where: str) -> Any:
    if not hasattr(module, name):
        raise unknown_name(name, (n for n in vars(module) if not n.startswith("_")), where)
    return getattr(module, name)


def _imported_file(path: str, where: str) -> ModuleType:
    """The module that a file makes, once a process. It is found by no `import`, and shadows none."""
    file = Path(path).expanduser().resolve()
    name = f"file:{file}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"there is no file {path!r}", where=where, fix="correct the path, or give it from the root")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file raises while it is imported
        del sys.modules[name]
        raise _not_imported(str(file), error, where) from error
    return module


def _not_imported(module: str, error: Exception, where: str) -> ConfigError:
    """Says whether the module was not found, or was found and failed, and then at which line."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    # rows of MOVED whose former module is the missing one, or lies in the missing package
    if missing and (moved := {old: new for old, new in MOVED.items() if f"{old}.".startswith(f"{missing}.")}):
        return ConfigError(
            f"cannot import {module!r}: there is no {missing!r} in this release",
            where=where,
            fix="; ".join(f"import {new} instead of {old}" for old, new in moved.items()),
        )
    if missing and f"{module}.".startswith(f"{missing}."):
        return ConfigError(
            f"cannot import {module!r}: there is no module {missing!r} on Python's path",
            where=where,
            fix=f"correct the dotted path, or name the folder that {missing!r} lies in: PYTHONPATH=FOLDER",
        )
    if isinstance(error, SyntaxError) and error.filename:
        line = f"{error.filename}:{error.lineno}"
    else:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
        line = f"{frames[-1].filename}:{frames[-1].lineno}" if frames[1:] else module  # the first frame is `resolve`
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    return ConfigError(
        f"cannot import {module!r}: {type(error).__name__}: {said} ({line})", where=where, fix=f"mend {line}"
    )
