"""Stable reinforcement learning of reasoning models on Megatron, with STARE and related methods."""

from __future__ import annotations

import typing

__version__ = "0.2.0"

if typing.TYPE_CHECKING:
    from megatron_stare.commands.train.from_python import run as run
    from megatron_stare.errors import UserError as UserError

_LAZY = {
    "UserError": "megatron_stare.errors",
    "run": "megatron_stare.commands.train.from_python",
}


def __getattr__(name: str) -> typing.Any:
    """Returns the attribute `run` or the attribute `UserError`. The module that defines the
    attribute is imported only when a program accesses the attribute, so importing the package
    itself stays fast."""
    import importlib

    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
