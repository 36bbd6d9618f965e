"""Reads the recipes of published runs. Each recipe reproduces one published run, and is stored with
the published values of the run's settings.

`configs/recipes/index.yaml` lists the recipes. There are two kinds of recipes. A recipe of the
first kind lists four files: the settings of the method, the limits of prompt and response lengths,
the settings of the model, and the settings of the cluster. A recipe of the second kind names
another recipe and changes some settings of this other recipe. A configuration names a recipe as
recipes/NAME. `configs/recipes/published.yaml` contains the published values of settings, grouped by
the recipe layer that contains the setting. Each published value is stored with its source and with
the line or place in the source. If a recipe's value differs from the published value,
`published.yaml` gives the reason.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatron_stare.errors import ConfigError
from megatron_stare.process.shipped import SHIPPED

FOLDER = "recipes"


@dataclass(frozen=True)
class Recipe:
    """A row of the index.

    `layers`: files of `configs/recipes`, such as methods/stare. Later layers override earlier
        layers.
    `settings`: the recipe's own settings, which override the settings of all layers of this recipe.
    `reproduces`: the published run, in words.
    `result`: text with the run's published results, followed by the short name of their source in
        brackets, such as [R].
    `over`: name of the recipe on which this recipe is based, or None if this recipe is based on no
        other recipe.
    """

    name: str
    layers: Sequence[str]
    settings: Mapping[str, Any]
    reproduces: str
    result: str
    over: str | None = None

    def all_layers(self) -> list[str]:
        """Returns the layers of this recipe, lowest first. If the field `over` names another
        recipe, the layers of the other recipe come first."""
        beneath = recipes()[self.over].all_layers() if self.over else []
        return [*beneath, *self.layers]


@dataclass(frozen=True)
class Published:
    """A published value of a setting.

    `setting`: the dotted name of the setting. Entries of a list are selected by their names, as in
        eval.tasks.aime24.samples.
    `source`: text that gives the source of the value and the position of the value in the source.
        The text 'R:96' means line 96 of the source with the short name R. The table `sources` of
        published.yaml explains the short names.
    `here`: the recipe's value if it differs from the published value.
    `because`: the reason why the recipe's value differs from the published value.
    `wanted`: the value that the setting must have in the recipe.
    """

    setting: str
    value: Any
    source: str
    here: Any = None
    because: str | None = None
    wanted: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "wanted", self.value if self.because is None else self.here)


def recipe_named(path: str | Path) -> str | None:
    """Returns NAME for the path `recipes/NAME` or `configs/recipes/NAME.yaml`, and None for any
    other path.

    Raises:
        ConfigError: the index has no such recipe. The message suggests similar names, or contains
            the reason why the run is not offered.
    """
    path = Path(path)
    if path.parent.name != FOLDER or path.parent.parent.name not in ("", "configs"):
        return None
    name = path.name.removesuffix(".yaml")
    if name in recipes():
        return name
    if (reason := _index()["refused"].get(name)) is not None:
        raise ConfigError(
            f"there is no recipe {name}: {reason}",
            where=str(path),
            fix="megatron-stare recipes lists all recipes",
        )
    near = difflib.get_close_matches(name, recipes(), n=3)
    raise ConfigError(
        f"there is no recipe {name}",
        where=str(path),
        fix=f"did you mean {' or '.join(near)}?" if near else "megatron-stare recipes lists them",
    )


@cache
def recipes() -> Mapping[str, Recipe]:
    """Returns a dict from recipe names to recipes. The recipes are in the same order as in
    configs/recipes/index.yaml."""
    index, found = _index(), {}
    for name, row in index["recipes"].items():
        found[name] = Recipe(
            name, row["layers"], row.get("settings", {}), row["reproduces"], row["result"]
        )
    for row in index["variants"]:
        layers, settings = [row["layer"]] if "layer" in row else [], row.get("settings", {})
        for over, result in row["over"].items():
            model = found[over].layers[2].partition("/")[2]
            said = f"{row['reproduces']}; model {model}"
            name = over + row["suffix"]
            found[name] = Recipe(name, layers, settings, said, result, over)
    for row in index["ablations"]:
        settings = {"run": {"steps": 4000}} | row.get("settings", {})
        said = f"STARE's ablation: {row['reproduces']}"
        found[row["name"]] = Recipe(row["name"], [], settings, said, row["result"], row["over"])
    return found


def refused() -> Mapping[str, str]:
    """Returns the published runs that have no recipe, and for each of these runs the reason why it
    has none."""
    return dict(_index()["refused"])


def sources() -> Mapping[str, str]:
    """Returns the sources of published values as a dict. The keys are the short names of the
    sources, such as 'R-readme'."""
    return dict(_tables()["sources"])


def published(recipe: Recipe) -> list[Published]:
    """Returns the published values of a recipe's settings, sorted by setting.

    A value in a higher layer overrides the values of the same setting in lower layers. A layer that
    names a method discards the `algorithm` settings of lower layers.
    """
    found = {row.setting: row for row in published(recipes()[recipe.over])} if recipe.over else {}
    for layer in [*recipe.layers, recipe.name]:
        rows = [Published(**row) for row in _tables()["layers"].get(layer, [])]
        if any(row.setting == "algorithm.name" for row in rows):
            found = {name: row for name, row in found.items() if not name.startswith("algorithm.")}
        for row in rows:
            found[row.setting] = row
    return [found[name] for name in sorted(found)]


def value_of(tree: Mapping[str, Any], setting: str) -> Any:
    """Returns the value of a dotted setting in a dumped configuration. Returns None if a section
    that contains the setting is null.

    Raises:
        KeyError: there is no such setting.
    """
    node: Any = tree
    for part in setting.split("."):
        if node is None:
            return None
        if isinstance(node, list):
            node = next((each for each in node if each.get("name") == part), None)
            if node is None:
                raise KeyError(setting)
        else:
            node = node[part]
    return node


@cache
def _index() -> Mapping[str, Any]:
    return _read("index.yaml")


@cache
def _tables() -> Mapping[str, Any]:
    return _read("published.yaml")


def _read(name: str) -> Mapping[str, Any]:
    return yaml.safe_load((SHIPPED / "configs" / FOLDER / name).read_text())
