"""Cuts the pages under docs/ into what can be checked: links, headings, blocks of code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]

_FENCE = re.compile(r"^```(\w*)\s*$")
_MARK = re.compile(r"^<!-- (file|not run): (.+) -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    line: of the page, from 1.
    file: what its text is called, where the line above says `<!-- file: NAME -->`.
    not_run: why it is not run, where that line says `<!-- not run: WHY -->`.
    """

    line: int
    language: str
    text: str
    file: str | None = None
    not_run: str | None = None


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    lines = page.read_text().splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if start is None and (fence := _FENCE.match(line)):
            start, language = number, fence.group(1)
        elif start is not None and line == "```":
            mark = _MARK.match(lines[start - 1])
            said = {mark.group(1): mark.group(2)} if mark else {}
            text = "\n".join(lines[start + 1 : number]) + "\n"
            found.append(Block(start + 1, language, text, said.get("file"), said.get("not run")))
            start = None
    assert start is None, f"{page}:{start}: a block without an end"
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks and indented code."""
    inside, kept = False, []
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside and not line.startswith("    "):
            kept.append(line)
    return "\n".join(kept)


def commands(page: Path) -> list[str]:
    """The shell commands in a page's blocks and indented code, continued lines joined, comments
    left out."""
    lines = [line[4:] for line in page.read_text().splitlines() if line.startswith("    ")]
    lines += [
        line
        for block in blocks(page)
        if block.language == "bash"
        for line in block.text.splitlines()
    ]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [re.sub(r"\s+#.*", "", line).strip() for line in joined.splitlines()]


def anchors(page: Path) -> dict[str, set[str]]:
    """Anchors that a link may name behind `#`, by who makes them of the headings: GitHub, and
    mkdocs."""
    found: dict[str, set[str]] = {"GitHub": set(), "mkdocs": set()}
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        plain = re.sub(r"[^\w\s-]", "", words)
        found["GitHub"].add(re.sub(r"\s", "-", plain))
        found["mkdocs"].add(
            re.sub(r"[-\s]+", "-", plain.encode("ascii", "ignore").decode()).strip("-")
        )
    return found


def links(page: Path) -> list[str]:
    """The targets of its links."""
    return re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(page)))
