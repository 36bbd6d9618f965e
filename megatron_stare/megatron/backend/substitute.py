"""Puts another object under a name of a module for a while: how unpatched upstreams are run where they need it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def substituted(owner: Any, name: str, value: Any, *, absent: bool = False) -> Iterator[None]:
    """While open, `owner.name` is `value`; afterwards what it was, or absent again.

    Args:
        absent: whether the name may be missing before.

    Raises:
        AttributeError: the name is missing: this release of the upstream is not the one that was looked at.
    """
    before = vars(owner).get(name, _ABSENT)
    if before is _ABSENT and not absent:
        raise AttributeError(f"{owner.__name__} has no {name} to substitute")
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
