"""Recipes of published runs: what each is composed of, what it reproduces, and what was published
of its settings.

`configs/recipes/index.yaml` composes them, of a method, a regime of lengths, a model and a cluster,
or of another recipe and what changes; a configuration names one as recipes/NAME.
`configs/recipes/published.yaml` has the published values by layer, each with its source's line. A
value that differs from the published one says why.
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

    layers: of `configs/recipes`, the lowest first, such as methods/stare; they lie over the recipe
    `over`, if any.
    settings: what the recipe itself sets, on top of all.
    reproduces, result: the run in words, and the figures that were published of it, with their
    marks.
    """

    name: str
    layers: Sequence[str]
    settings: Mapping[str, Any]
    reproduces: str
    result: str
    over: str | None = None

    def all_layers(self) -> list[str]:
        """Layers of the recipe beneath, and then its own."""
        beneath = recipes()[self.over].all_layers() if self.over else []
        return [*beneath, *self.layers]


@dataclass(frozen=True)
class Published:
    """A value that a source publishes.

    setting: dotted; an entry of a list of sections stands by its name, as in
    eval.tasks.aime24.samples.
    source: a mark of published.yaml's `sources` and, behind a colon, the line or the place in it.
    here: what the recipe has, where that is another; `because` says why.
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
    """The name in `recipes/NAME` or `configs/recipes/NAME.yaml`; None where the path names no
    recipe.

    Raises:
        ConfigError: a name directly in recipes/ that the index does not have, with the nearest that
            it has, or why what was asked for is refused.
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
    """All recipes by name, in the index's order."""
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
    """Rows of the papers that are not made, and why."""
    return dict(_index()["refused"])


def sources() -> Mapping[str, str]:
    """Sources of published values, by their marks."""
    return dict(_tables()["sources"])


def published(recipe: Recipe) -> list[Published]:
    """Published values of a recipe's settings, sorted by setting.

    Of two layers the upper one counts. Where a layer names a method, lower layers' settings of
    `algorithm` go.
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
    """The value of a dotted setting in a dumped configuration; None where a section on the way is
    null.

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
