"""The two releases of megatron-core that are supported, each with its Python, on one machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEWER = (3, 12)  # the first Python of the newer release


def python_of(newer: bool) -> str:
    """The Python of an environment of this checkout that has the newer release, or the older one:
    this one, or that of the environment that scripts/setup_env.sh makes beside it. Skips the test
    where there is none."""
    if newer == (sys.version_info[:2] >= NEWER):
        return sys.executable
    named = os.environ.get("MEGATRON_STARE_OTHER_PYTHON")
    beside = ["3.12", "3.13"] if newer else ["3.11"]
    places = [ROOT / f".venv-{version}/bin/python" for version in beside]
    # the first that was made is .venv, whatever its version
    places += [ROOT / ".venv/bin" / f"python{version}" for version in beside]
    for place in [Path(named)] if named else places:
        if place.exists():
            return str(place)
    pytest.skip(
        f"no environment of Python {beside[0]}: PYTHON=python{beside[0]} bash scripts/setup_env.sh"
        " makes one"
    )
