"""Checks this project's maths against a file of worked numbers, with the functions that training
uses.

    python tools/check_vectors.py tests/algorithms/algorithm_vectors.json

Every group of the file is evaluated and its largest error printed. A number passes if |got - want|
is at most 1e-6 max(1, |want|); everything the file expects must be there, have the same shape, and
pass.

Exit status: 0 all passed; 1 a number is off, or a group or a field cannot be evaluated; 2 no such
file, or not one of this shape.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from vector_groups import GROUPS
from vector_groups.fields import FOR_PEOPLE, TOLERANCE, CannotEvaluateError, Fields, Found


def evaluate(name: str, file: dict[str, Any]) -> Found:
    """Compares one group. What cannot be evaluated is among the places that are off."""
    found = Found()
    try:
        if name not in GROUPS:
            raise CannotEvaluateError("no such group is known")
        values = file[name]
        groups = Fields({name: values}, "", found).items(name) if isinstance(values, list) else None
        whole = groups if groups is not None else [Fields(values, name, found)]
        GROUPS[name](whole if groups is not None else whole[0], file)
        if unread := [path for each in whole for path in each.unread()]:
            raise CannotEvaluateError(f"not evaluated: {', '.join(unread)}")
        if not found.numbers:
            raise CannotEvaluateError("it holds nothing to compare")
    except Exception as error:
        found.largest = math.inf
        what = (
            str(error)
            if isinstance(error, CannotEvaluateError)
            else f"{type(error).__name__}: {error}"
        )
        found.where.append(f"{name} cannot be evaluated: {what}")
    return found


def read(path: Path) -> dict[str, Any]:
    """The file's groups by name. Raises ValueError, in one sentence, where it is not a file of this
    shape."""
    try:
        file = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    groups = (
        {k: v for k, v in file.items() if k not in FOR_PEOPLE} if isinstance(file, dict) else {}
    )
    if not groups:
        raise ValueError(
            f"{path}: no groups of vectors in it; the file must be an object of groups by name"
        )
    return groups


def main(arguments: list[str] | None = None) -> int:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE.json",
        help="worked numbers, shaped as algorithm_vectors.json",
    )
    try:
        file = read(parser.parse_args(arguments).file)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    failed = 0
    for name in file:
        found = evaluate(name, file)
        failed += bool(found.where)
        print(
            f"{name:28} {found.numbers:5} numbers   largest error {found.largest:.1e}  "
            f" {verdict(found)}"
        )
        for line in found.where[:5]:
            print(f"    {line}")
        if len(found.where) > 5:
            print(f"    and {len(found.where) - 5} more")
    print(
        f"{len(file) - failed} of {len(file)} groups passed (tolerance {TOLERANCE:g} max(1,"
        " |want|))"
    )
    return 1 if failed else 0


def verdict(found: Found) -> str:
    return "FAILED" if found.where else "ok"


if __name__ == "__main__":
    sys.exit(main())
