"""Needs of a check, and the bounds that its figures must keep. Imports nothing that a bare machine
lacks."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence

Bound = tuple[str, float]  # ("<=" or ">=", value)


def lacking(needs: Sequence[str]) -> list[str]:
    """Which of the modules, or `cuda`, or `nccl 2.30` or newer, this machine does not have."""
    return [name for name in ("torch", *needs) if not _there(name)]


def _there(name: str) -> bool:
    if name == "cuda" or name.startswith("nccl "):
        return importlib.util.find_spec("torch") is not None and _device_has(name)
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def _device_has(name: str) -> bool:
    import torch

    if not torch.cuda.is_available() or name == "cuda":
        return torch.cuda.is_available()
    wanted = tuple(map(int, name.removeprefix("nccl ").split(".")))
    return torch.distributed.is_nccl_available() and torch.cuda.nccl.version() >= wanted


def verdict_of(figures: Mapping[str, float], bounds: Mapping[str, Bound]) -> tuple[str, list[str]]:
    """`pass` where every bound has its figure, which is a number and within it; else `fail` and
    what is broken."""
    broken = []
    for name, (sign, value) in bounds.items():
        figure = figures.get(name, math.nan)
        if not (figure <= value if sign == "<=" else figure >= value):
            broken.append(f"{name} is {figure:.4g}, wanted {sign} {value:g}")
    return ("fail" if broken or not bounds else "pass"), broken
