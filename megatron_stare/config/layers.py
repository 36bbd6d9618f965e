"""Builds a configuration from layers. The files that a configuration file lists in `defaults` are
the lowest layers. The configuration file itself is a layer above the files in its `defaults`. The
overrides that a user gives on the command line are the highest layers.

Sections are merged key by key. If several layers set a key, the value of the highest layer is used.
The settings of two different methods are never merged. If the lower layers select a method and a
higher layer selects another method, the settings of the first method are discarded. The settings of
two different extensions, such as two verifiers, are never merged either. If the lower layers select
a verifier and a higher layer selects another verifier, the settings of the first verifier are
discarded.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_stare.config.formats import KEY, config_up_to_date
from megatron_stare.config.recipes import FOLDER, recipe_named, recipes
from megatron_stare.errors import ConfigError
from megatron_stare.process.shipped import SHIPPED, find_config, resolve_paths

DEFAULTS = "defaults"
GIVEN = "the dict"  # name of sections that no file has, in errors
_IN_TEXT = object()
# settings that name something and hold its own settings beside the name; a name alone is short for
# {name: ...}
NAMED = ("algorithm", "data.source", "rollout.engine", "rollout.environment", "reward.verifier")


@dataclass(frozen=True)
class Layer:
    """Settings of one file.

    `source`: the file's name, for error messages.
    `tree`: the file's sections.
    """

    source: str
    tree: dict[str, Any]

    def sets(self, setting: Sequence[str]) -> bool:
        """Tells whether this layer affects the value of a setting. The argument `setting` is the
        dotted name of the setting, split into its parts. A layer affects a setting if the layer
        contains the setting itself or a key inside the setting. A layer also affects a setting if
        the layer gives a single value to a section that contains the setting. For example, a layer
        with `algorithm: grpo` affects `algorithm.name`."""
        node: Any = self.tree
        for part in setting:
            if not isinstance(node, dict):
                return True
            if part not in node:
                return False
            node = node[part]
        return True


@dataclass(frozen=True)
class Override:
    """One override of a setting, such as `key.sub=value` on the command line. `source` is the text
    of the override.

    `value`: the new value of the setting. By default, the new value is read from the text after the
        = sign in `source`.
    """

    source: str
    value: Any = _IN_TEXT

    @classmethod
    def of(cls, key: str, value: Any) -> Override:
        """Returns the override that sets a dotted key to a value."""
        return cls(f"{key}={value}", value)

    def sets(self, setting: Sequence[str]) -> bool:
        """Tells whether the override affects the value of a setting. The argument `setting` is the
        dotted name of the setting, split into its parts. An override affects a setting if the key
        of the override names the setting itself, a section that contains the setting, or a key
        inside the setting."""
        keys = self.source.partition("=")[0].split(".")
        return all(mine == asked for mine, asked in zip(keys, setting, strict=False))


def read_layers(path: str | Path) -> list[Layer]:
    """Returns the layers of a configuration file or recipe, ordered from the lowest layer to the
    highest layer. The last layer in the list contains the settings that the file or recipe itself
    sets.

    A layer that is listed several times is applied only once, at its first position. For example,
    if two layers list the same base file, the base file is applied once, beneath both layers, and
    cannot undo the changes of either layer.

    Raises:
        ConfigError: a file is missing, is not a YAML mapping, or includes itself. The message
            contains the chain of files that led to the file.
    """
    found: dict[Path, Layer] = {}
    _collect(path, Path(), (), found)
    return list(found.values())


def _collect(
    name: str | Path, beside: Path, above: tuple[Path, ...], found: dict[Path, Layer]
) -> None:
    """Adds a file or recipe, and all layers beneath it, to `found`. `above` contains the chain of
    files through which the file or recipe is included, outermost first."""
    path = find_config(name, beside)
    if not path.is_file() and (recipe := recipe_named(name)) is not None:
        _compose(recipe, above, found)
        return
    chain, here = " > ".join(str(each) for each in (*above, path)), path.resolve()
    if here in (each.resolve() for each in above):
        raise ConfigError(
            "the configuration names itself as a layer",
            where=chain,
            fix=f"leave it out of `{DEFAULTS}`",
        )
    if here in found:
        return
    tree = read_yaml(path, chain)
    if KEY in tree:  # written by a run; files by users have no number and the current format
        tree = config_up_to_date(tree, path)
    resolve_paths(path, tree)
    _collect_beneath(tree, path, chain, above, found)
    found[here] = Layer(str(path), tree)


def layers_of(sections: Mapping[str, Any]) -> list[Layer]:
    """Returns the layers of a configuration that a program passes as the dict `sections`. The
    layers are ordered from the lowest layer to the highest layer. The last layer in the list
    contains the settings that `sections` itself sets. File names in the list `defaults` of the dict
    are relative to the current folder.

    Raises:
        ConfigError: as read_layers.
    """
    found: dict[Path, Layer] = {}
    tree = copy.deepcopy(dict(sections))
    if KEY in tree:
        tree = config_up_to_date(tree, GIVEN)
    _collect_beneath(tree, Path(GIVEN), GIVEN, (), found)
    return [*found.values(), Layer(GIVEN, tree)]


def _collect_beneath(
    tree: dict[str, Any],
    path: Path,
    chain: str,
    above: tuple[Path, ...],
    found: dict[Path, Layer],
) -> None:
    """Removes the key `defaults` from `tree`. The dict `tree` contains the sections of the file
    `path`. For each layer in the list `defaults`, adds the layer itself and the layers beneath it
    to `found`."""
    names = tree.pop(DEFAULTS, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"the layers are not a list of files (got {names!r})", where=f"{chain}: {DEFAULTS}"
        )
    for each in names:
        if not find_config(each, path.parent).is_file() and recipe_named(each) is None:
            raise ConfigError(
                f"there is no layer {each!r}",
                where=f"{chain}: {DEFAULTS}",
                fix=(
                    f"give a file relative to {path.parent.absolute()}, or the name of a config"
                    " that ships"
                ),
            )
        _collect(each, path.parent, (*above, path), found)


def _compose(name: str, above: tuple[Path, ...], found: dict[Path, Layer]) -> None:
    """Adds the layers of a recipe to `found`. The recipe's own settings are the highest layer."""
    recipe, path = recipes()[name], Path(FOLDER) / name
    if path in found:
        return
    if recipe.over is not None:
        _compose(recipe.over, above, found)
    for layer in recipe.layers:
        _collect(SHIPPED / "configs" / FOLDER / f"{layer}.yaml", Path(), (*above, path), found)
    run = {"name": name.replace("_", "-"), **recipe.settings.get("run", {})}
    found[path] = Layer(str(path), copy.deepcopy({**recipe.settings, "run": run}))


class _OnceLoader(yaml.SafeLoader):
    """YAML loader that raises an error if a mapping contains a key twice. PyYAML itself would
    silently keep the second occurrence of the key, and drop the first occurrence with all settings
    beneath it."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} stands twice in one section", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path, where: str | None = None) -> dict[str, Any]:
    """Reads a YAML mapping. Raises ConfigError if the file cannot be read, is not a YAML mapping,
    or contains a key twice in one section.

    Args:
        where: the name of the file in error messages. None means the file's path.
    """
    path, where = Path(path), where or str(path)
    try:
        tree = yaml.load(path.read_text(), _OnceLoader)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration ({error.strerror})", where=where
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"not valid YAML{line}: {getattr(error, 'problem', error)}", where=where
        ) from error
    if not isinstance(tree, dict):
        raise ConfigError("the configuration is not a mapping of sections", where=where)
    return tree


def merged(layers: Iterable[Layer | Override]) -> dict[str, Any]:
    """Returns the sections that result from the layers and the overrides, without validation.

    Raises:
        ConfigError: an override is not of the form `key.sub=value`.
    """
    tree: dict[str, Any] = {}
    for layer in layers:
        if isinstance(layer, Override):
            _apply(tree, layer)
            continue
        above = copy.deepcopy(layer.tree)
        for setting in NAMED:
            _spell_out(above, setting)
            beneath, name = _name_of(tree, setting), _name_of(above, setting)
            if beneath is not None and name not in (None, beneath):
                _parent(tree, setting).pop(setting.rpartition(".")[2])
        tree = _laid_over(tree, above)
    return tree


def by_dotted_key(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Returns the values of nested sections by dotted key, such as `optimizer.lr`. A section
    without keys is left out."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= by_dotted_key(value, f"{above}{key}.")
        else:
            found[above + key] = value
    return found


def _parent(tree: dict[str, Any], setting: str) -> dict[str, Any]:
    """Returns the section that contains a dotted setting, or {} if there is no such section."""
    for part in setting.split(".")[:-1]:
        tree = tree.get(part, {})
        tree = tree if isinstance(tree, dict) else {}
    return tree


def _spell_out(tree: dict[str, Any], setting: str) -> None:
    """Replaces a setting's short form, which is a bare name, by the mapping {name: ...}."""
    section, key = _parent(tree, setting), setting.rpartition(".")[2]
    if isinstance(name := section.get(key), str):
        section[key] = {"name": name}


def _name_of(tree: dict[str, Any], setting: str) -> Any:
    """Returns the name of the method or extension that a setting selects, or None if the setting is
    absent."""
    section = _parent(tree, setting).get(setting.rpartition(".")[2])
    return section.get("name") if isinstance(section, dict) else section


def _laid_over(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: _laid_over(below.get(key), value) for key, value in above.items()}


def _value(text: str, override: str) -> Any:
    try:
        value = yaml.load(text, _OnceLoader)
    except yaml.YAMLError as error:
        raise ConfigError("the value is not valid YAML", where=override) from error
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)  # YAML 1.1 reads 1e-6 as a string
    return value


def breadth(given: Override) -> int:
    """Returns the number of parts in the dotted key of an override, such as 2 for `optimizer.lr`.
    `load_config` applies overrides with fewer parts first, so that an override of a whole section
    does not discard an override of a setting in this section. An override of `algorithm.name` can
    discard all settings of the section `algorithm`, as an override of `algorithm` does. The key
    `algorithm.name` therefore counts as one part, like the key `algorithm`. In the same way, the
    final part `name` is not counted in the keys of extensions, such as `reward.verifier.name`."""
    parents, _, leaf = given.source.partition("=")[0].rpartition(".")
    return parents.count(".") + 1 + (leaf != "name" or parents not in NAMED) if parents else 1


def _apply(tree: dict[str, Any], given: Override) -> None:
    """Applies one override `key.sub=value`. The value is read as YAML, so `1e-6` is a number,
    `true` is a Boolean and `[1, 2]` is a list."""
    override = given.source
    key, eq, text = override.partition("=")
    if not eq or not key:
        raise ConfigError("an override has the form section.key=value", where=override)
    if key == DEFAULTS:
        raise ConfigError(
            "layers are named in a file, which the command line can only override", where=override
        )
    value = _value(text, override) if given.value is _IN_TEXT else copy.deepcopy(given.value)
    *parents, leaf = key.split(".")
    node = tree
    for at, parent in enumerate(parents, start=1):
        if ".".join(parents[:at]) in NAMED:
            _spell_out(tree, ".".join(parents[:at]))
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{parent} is a value, not a section", where=override)
        node = child
    if leaf == "name" and ".".join(parents) in NAMED and value != node.get("name"):
        node.clear()
    node[leaf] = value
