"""`megatron-stare recipes` lists the recipes of published runs, or compares one recipe with its
published values."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from typing import Any

from megatron_stare.config.load import load_config, load_section
from megatron_stare.config.recipes import (
    FOLDER,
    Recipe,
    published,
    recipe_named,
    recipes,
    refused,
    sources,
    value_of,
)
from megatron_stare.process.signs_of_life import say_loading

_BESIDE = (  # settings shown for every recipe, published or not
    "model.path",
    "parallel.tensor",
    "parallel.data",
    "rollout.engines",
)

_NARROWEST = 24  # characters of a column that is wrapped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `recipes`."""
    parser.add_argument("name", nargs="?", help="one recipe; without it all are listed")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run_recipes(args: argparse.Namespace) -> None:
    """Prints the list of all recipes, or one recipe if a name is given. Raises UserError for an
    unknown recipe."""
    if args.name is None:
        found: Any = [_row(recipe) for recipe in recipes().values()]
        if args.json:
            print(
                json.dumps(
                    {"recipes": found, "refused": dict(refused())}, indent=1, ensure_ascii=False
                )
            )
        else:
            print("\n".join(_fitted(_listed(found), _terminal_width())))
        return
    name = recipe_named(f"{FOLDER}/{args.name.removeprefix(FOLDER + '/')}")
    assert name is not None  # recipe_named raises for an unknown name
    found = _held(recipes()[name])
    print(json.dumps(found, indent=1, ensure_ascii=False) if args.json else "\n".join(_told(found)))


def _row(recipe: Recipe) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "gpus": load_section(f"{FOLDER}/{recipe.name}", "parallel").world_size,
        "reproduces": recipe.reproduces,
        "published": recipe.result,
    }


def _listed(rows: list[dict[str, Any]]) -> list[str]:
    wide = max(len(row["name"]) for row in rows)
    lines = [f"{'recipe':{wide}}  GPUs  reproduces (published result)"]
    lines += [
        f"{row['name']:{wide}}  {row['gpus']:4}  {row['reproduces']} ({row['published']})"
        for row in rows
    ]
    lines += [
        "",
        f"{len(rows)} recipes; none of their results has been reproduced with this package.",
        "",
        "Refused:",
    ]
    return [*lines, *(f"{name:{wide}}  {reason}" for name, reason in refused().items())]


def _terminal_width() -> int | None:
    """Returns the number of columns of the terminal. Returns None if standard output is not a
    terminal, so that each row of the table stays on one line."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _fitted(lines: list[str], width: int | None) -> list[str]:
    """Wraps each line of a table to a width of `width` characters. The wrapped text continues below
    the start of the last column of the table. If `width` is None or the last column would be too
    narrow to read, the lines stay as they are."""
    indent = lines[0].index("reproduces")
    if width is None or width - indent < _NARROWEST:
        return lines
    return [
        part
        for line in lines
        for part in textwrap.wrap(
            line,
            width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        or [""]
    ]


def _held(recipe: Recipe) -> dict[str, Any]:
    """Returns the recipe and all its published settings as a dict for JSON."""
    config = load_config(f"{FOLDER}/{recipe.name}", before_method=say_loading)
    tree = config.model_dump(mode="json")
    rows = [
        {
            "setting": row.setting,
            "published": row.value,
            "here": value_of(tree, row.setting),
            "source": row.source,
            **({"because": row.because} if row.because else {}),
        }
        for row in published(recipe)
    ]
    marks = {row["source"].partition(":")[0] for row in rows}
    return {
        **_row(recipe),
        "layers": recipe.all_layers(),
        "settings": rows,
        "ours": {setting: value_of(tree, setting) for setting in _BESIDE},
        "sources": {mark: text for mark, text in sources().items() if mark in marks},
    }


def _told(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{found['name']}: {found['reproduces']}",
        f"published: {found['published']}",
        f"layers: {', '.join(found['layers'])}",
        "",
    ]
    table = [("setting", "published", "here", "source")]
    table += [
        (row["setting"], _short(row["published"]), _short(row["here"]), row["source"])
        for row in found["settings"]
    ]
    notes = {row["setting"]: row["because"] for row in found["settings"] if "because" in row}
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for setting, value, here, source in table:
        cells = (
            f"{text:{width}}" for text, width in zip((setting, value, here), widths, strict=True)
        )
        lines.append(f"{'* ' if setting in notes else '  '}{'  '.join(cells)}  {source}")
    if notes:
        lines += ["", "* differs from the published setting, or needs an explanation:"]
        lines += [f"  {setting}: {reason}" for setting, reason in notes.items()]
    lines += ["", "Sources:", *(f"  {mark}: {text}" for mark, text in found["sources"].items())]
    ours = ", ".join(f"{setting} {value}" for setting, value in found["ours"].items())
    return [*lines, "", f"Our choice: {ours}. Start: bash scripts/run_recipe.sh {found['name']}"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 30 else text[:27] + "..."
