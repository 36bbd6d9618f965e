"""Findings, for people: lines for a terminal, and a section of docs/upstreams.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from upstream.compare import KINDS, Finding
from upstream.own_source import PACKAGE
from upstream.release import Release


def terminal(before: Release, after: Release, found: Sequence[Finding], uses: int) -> str:
    """A block a kind, a line a change, with the first place of ours that it touches."""
    lines = []
    for kind, group in groupby(found, key=lambda each: each.kind):
        lines.append(f"{kind}: what we use {KINDS[kind]}")
        for each in group:
            more = f" and {len(each.where) - 1} more" if len(each.where) > 1 else ""
            lines.append(f"  {_short(each, after)}: {each.what}")
            lines.append(f"      {each.where[0]}{more}")
        lines.append("")
    counts = Counter(each.kind for each in found)
    parts = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    changes = "1 change" if len(found) == 1 else f"{len(found)} changes"
    ending = f"{changes} of what is used: {parts}" if found else "nothing that is used has changed"
    lines.append(f"{before.title} → {after.version}, {uses} uses: {ending}")
    return "\n".join(lines) + "\n"


def markdown(before: Release, after: Release, found: Sequence[Finding]) -> str:
    """A heading and a table. Files of the package alone where it has some, and without line numbers, which would be out
    of date with every other commit."""
    lines = [f"## {before.title} → {after.version}", ""]
    if not found:
        return "\n".join([*lines, "Nothing that is used has changed.", ""])
    lines += ["| | name | change | used in |", "|---|---|---|---|"]
    for each in found:
        files = sorted({place.split(":")[0] for place in each.where})
        files = [file for file in files if file.startswith(f"{PACKAGE}/")] or files
        what = each.what.replace("|", "\\|")
        lines.append(f"| {each.kind} | `{_short(each, after)}` | {what} | {', '.join(files)} |")
    return "\n".join(lines) + "\n"


def _short(finding: Finding, release: Release) -> str:
    return finding.name.removeprefix(release.package + ".")
