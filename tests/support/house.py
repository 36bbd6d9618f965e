"""Draws the house: every folder of the package, what it is for, and the folders below that it
imports.

    python tests/support/house.py    # writes the picture into docs/architecture.md

A folder's floor is one above the highest folder that it imports; an arrow is left out where a
longer way implies it.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_stare"
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- house: written by tests/support/house.py -->\n", "<!-- /house -->\n"


@cache
def imports(file: Path) -> frozenset[str]:
    """Dotted names that a file imports, of `from a import b` both `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def room(file: Path) -> str:
    """The folder that a module lies in, seen from the package; a module at top level is a room of
    its own."""
    path = file.relative_to(PACKAGE)
    return path.stem if path.parent == Path() else str(path.parent)


@cache
def arrows() -> dict[str, frozenset[str]]:
    """The rooms that each room imports."""
    files = {
        str(file.relative_to(PACKAGE.parent).with_suffix(""))
        .replace("/", ".")
        .removesuffix(".__init__"): file
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.parent != PACKAGE or file.stem != "__init__"
    }
    found: dict[str, set[str]] = {}
    for file in files.values():
        rooms = found.setdefault(room(file), set())
        rooms |= {room(files[name]) for name in imports(file) if name in files} - {room(file)}
    return {name: frozenset(rooms) for name, rooms in found.items()}


def circle() -> list[str]:
    """Rooms that import each other in a circle, the first one again at its end; none where there is
    no circle."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name not in done:
            for below in sorted(arrows()[name]):
                if found := walk(below, [*way, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in sorted(arrows()) if (found := walk(name, []))), [])


@cache
def reached(name: str) -> frozenset[str]:
    """All rooms below one, imported by it or by what it imports."""
    return arrows()[name].union(*(reached(below) for below in arrows()[name]))


@cache
def floor(name: str) -> int:
    return max((1 + floor(below) for below in arrows()[name]), default=0)


def direct(name: str) -> list[str]:
    """The arrows of a room that no longer way implies."""
    implied = frozenset[str]().union(*(reached(below) for below in arrows()[name]))
    return sorted(arrows()[name] - implied)


def purpose(name: str) -> str:
    """The first sentence of a room's docstring."""
    file = PACKAGE / name / "__init__.py" if (PACKAGE / name).is_dir() else PACKAGE / f"{name}.py"
    paragraph = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def picture() -> str:
    """The block of docs/architecture.md, top floor first."""
    rows = []
    for name in sorted(arrows(), key=lambda each: (-floor(each), each)):
        if not purpose(name):
            raise ValueError(f"{name} has no docstring that says what it is for")
        slash = "/" if (PACKAGE / name).is_dir() else ".py"
        below = ", ".join(direct(name)) or "nothing"
        rows.append(f"| {floor(name)} | `{name}{slash}` | {purpose(name)} | {below} |\n")
    return "| floor | folder | what it does | imports |\n|---|---|---|---|\n" + "".join(rows)


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{picture()}\n{END}{after}")


if __name__ == "__main__":
    main()
