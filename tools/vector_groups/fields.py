"""An object of the file of worked numbers, and the comparison of what is computed with what it
expects."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-6
FOR_PEOPLE = {"crosscheck", "note", "strict", "clip_cov_note", "meta"}
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"


class CannotEvaluateError(Exception):
    """The file holds something that this tool does not know how to compute, or lacks what it
    needs."""


@dataclass
class Found:
    """Result of comparing a group."""

    numbers: int = 0
    largest: float = 0.0  # |got - want| / max(1, |want|)
    where: list[str] = field(default_factory=list)  # the places that are off


class Fields:
    """An object of the file that remembers which of its keys were read, so that none is passed
    over."""

    def __init__(self, values: Any, path: str, found: Found) -> None:
        if not isinstance(values, dict):
            raise CannotEvaluateError(f"{path} is not an object")
        self.values, self.path, self.found = values, path, found
        self.read: set[str] = set()
        self.children: list[Fields] = []

    def __getitem__(self, key: str) -> Any:
        if key not in self.values:
            raise CannotEvaluateError(f"{self.path}.{key} is missing")
        self.read.add(key)
        return self.values[key]

    def tensor(self, key: str) -> Tensor:
        return torch.tensor(self[key], dtype=torch.float64)

    def mask(self, key: str) -> Tensor:
        return self.tensor(key) > 0.5

    def below(self, key: str) -> Fields:
        child = Fields(self[key], f"{self.path}.{key}", self.found)
        self.children.append(child)
        return child

    def items(self, key: str) -> list[Fields]:
        if not isinstance(self[key], list):
            raise CannotEvaluateError(f"{self.path}.{key} is not a list")
        rows = [
            Fields(row, f"{self.path}.{key}[{i}]", self.found) for i, row in enumerate(self[key])
        ]
        self.children += rows
        return rows

    def keys(self, pattern: str) -> list[tuple[str, list[float]]]:
        """The keys that match, with the numbers their groups hold (`0p2` reads 0.2)."""
        hits = [(key, re.fullmatch(pattern, key)) for key in self.values]
        return [
            (key, [float(g.replace("p", ".")) for g in hit.groups()]) for key, hit in hits if hit
        ]

    def expect(self, key: str, got: Any) -> None:
        compare(
            got.tolist() if isinstance(got, Tensor) else got,
            self[key],
            f"{self.path}.{key}",
            self.found,
        )

    def unread(self) -> list[str]:
        here = [f"{self.path}.{key}" for key in self.values if key not in self.read | FOR_PEOPLE]
        return here + [each for child in self.children for each in child.unread()]


def compare(got: Any, want: Any, path: str, found: Found) -> None:
    """Adds the difference of two nested lists of numbers, or of two texts, to `found`."""
    if isinstance(want, list) or isinstance(got, list):
        if not (isinstance(want, list) and isinstance(got, list) and len(want) == len(got)):
            raise CannotEvaluateError(f"{path} has another shape than what is computed")
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            compare(one, other, f"{path}[{i}]", found)
        return
    found.numbers += 1
    if isinstance(want, str) or isinstance(got, str):
        error = 0.0 if got == want else math.inf
    else:
        one, other = (math.nan if x is None else float(x) for x in (got, want))
        same = one == other or (math.isnan(one) and math.isnan(other))
        error = 0.0 if same else abs(one - other) / max(1.0, abs(other))
    error = math.inf if math.isnan(error) else error
    found.largest = max(found.largest, error)
    if error > TOLERANCE:
        found.where.append(f"{path}: got {got}, want {want}")


def other(file: dict[str, Any], name: str) -> Fields:
    """The inputs that a group takes from another one of the same file."""
    if name not in file:
        raise CannotEvaluateError(f"group {name}, whose inputs are needed, is missing")
    return Fields(file[name], name, Found())
