"""From a YAML file and dotted overrides to a checked Config, with one clear message for everything that is wrong."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from megatron_stare.config.formats import FORMAT, KEY, config_up_to_date
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError, unknown_name
from megatron_stare.shipped import find_config, resolve_paths


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Reads `path`, applies `key.sub=value` overrides and validates.

    Args:
        path: a file, or the name of a config that ships, whose files are then found wherever it is used.
        overrides: their paths are relative to the current folder.

    Raises:
        ConfigError: missing file, bad YAML, unknown key (with a suggestion), value out of range.
    """
    path, overrides = find_config(path), list(overrides)
    tree = read_yaml(path)
    if KEY in tree:  # a run wrote it; what people write has no number, and is of today's format
        tree = config_up_to_date(tree, path)
    resolve_paths(path, tree)
    for override in overrides:
        apply_override(tree, override)
    return validate(tree, str(path), overrides)


def load_recorded(path: str | Path) -> Config:
    """Reads the config.yaml of a run, of whatever format.

    Raises:
        UserError: as load_config, or a newer release wrote it.
    """
    return validate(config_up_to_date(read_yaml(path), path), str(path))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The file's mapping. Raises ConfigError where there is none."""
    path = Path(path)
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration ({error.strerror})", where=str(path)) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"not valid YAML{line}: {getattr(error, 'problem', error)}", where=str(path)) from error
    if not isinstance(tree, dict):
        raise ConfigError("the configuration is not a mapping of sections", where=str(path))
    return tree


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets one `key.sub=value`; the value is read as YAML, so `1e-6`, `true` and `[1, 2]` mean what they look like."""
    key, eq, text = override.partition("=")
    if not eq or not key:
        raise ConfigError("an override has the form section.key=value", where=override)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError("the value is not valid YAML", where=override) from error
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML 1.1 reads 1e-6 as a string
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if isinstance(child, str) and parent == "algorithm":  # `algorithm: stare` is short for {name: stare}
            child = node[parent] = {"name": child}
        if not isinstance(child, dict):
            raise ConfigError(f"{parent} is a value, not a section", where=override)
        node = child
    if key == "algorithm" and isinstance(value, str):
        value = {"name": value}  # another method: settings of the one before would not fit it
    node[leaf] = value


def validate(tree: Mapping[str, Any], source: str, overrides: Sequence[str] = ()) -> Config:
    """Raises ConfigError naming the first thing that is wrong, and where it was set: `source` or an override."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise config_error(error, Config, source, overrides) from error


def config_error(
    error: ValidationError, model: type[BaseModel] | Iterable[str], source: str, overrides: Sequence[str] = ()
) -> ConfigError:
    """Turns pydantic's report into one ConfigError.

    Args:
        model: says which keys exist, for suggestions.
        source: the file that was read.
        overrides: what replaced settings of it; the last one that set what is wrong is blamed in its place.
    """
    first = min(error.errors(), key=lambda e: e["type"] not in ("extra_forbidden", "unexpected_keyword_argument"))
    loc = [str(part) for part in first["loc"]]
    setting = ".".join(loc)
    source = next((override for override in reversed(overrides) if loc and _touches(override, setting)), source)
    where = f"{source}: {setting}" if loc else source
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _keys_at(model, loc[:-1]) if isinstance(model, type) else list(model)
        return unknown_name(loc[-1], known, where)
    if first["type"] in ("missing", "missing_argument"):
        return ConfigError("this key is required and missing", where=where)
    message = first["msg"].removeprefix("Value error, ")
    return ConfigError(f"{message} (got {first['input']!r})", where=where)


def _touches(override: str, setting: str) -> bool:
    """Whether an override sets this, what it is in, or something in it."""
    key = override.partition("=")[0] + "."
    return key.startswith(f"{setting}.") or f"{setting}.".startswith(key)


def _keys_at(model: type[BaseModel], loc: list[str]) -> list[str]:
    for part in loc:
        annotation = model.model_fields[part].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
    return list(model.model_fields)


def with_absolute_paths(config: Config) -> Config:
    """The same configuration, with the files and folders it reads named from the root, so that it means the same
    wherever it is read. Symbolic links stay: the Python of an environment is one."""
    data = {"path": config.data.path, "eval_path": config.data.eval_path} if config.data.source == "jsonl" else {}
    python = config.sglang.python
    found: dict[str, dict[str, str | None]] = {
        "model": {"path": config.model.path, "reference_path": config.model.reference_path},
        "data": data,  # to a source of the user's own they are what it makes of them
        "sglang": {"python": python} if python and os.sep in python else {},
    }
    sections = {
        section: getattr(config, section).model_copy(
            update={key: path and os.path.abspath(path) for key, path in paths.items()}
        )
        for section, paths in found.items()
    }
    return config.model_copy(update=sections)


def dump_yaml(config: Config) -> str:
    """The resolved configuration, readable by load_config and load_recorded."""
    return yaml.safe_dump({KEY: FORMAT, **config.model_dump(mode="json")}, sort_keys=False)
