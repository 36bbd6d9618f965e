"""Which code this is: releases of packages, and a digest of this package's own modules. Free of torch."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import megatron_stare


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@functools.cache
def code_digest() -> str:
    """SHA-256 of the package's modules, as they are when it is first asked for."""
    package, digest = Path(megatron_stare.__file__).parent, hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()
