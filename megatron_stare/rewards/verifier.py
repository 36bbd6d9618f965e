"""What a verifier is, and the one that a configuration names. Runs in reward workers, so torch stays out.

A verifier is any function `(response text, reference answer) -> reward`. It may be slow, hang or raise:
`rewards/pool.py` runs it in a process of its own and bounds it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import SupportsFloat

from megatron_stare.errors import ConfigError

Verifier = Callable[[str, str], SupportsFloat]

VERIFIERS = {
    "arithmetic": "megatron_stare.rewards.arithmetic.verify",
    "math": "megatron_stare.rewards.math.verify",
}


def make_verifier(name: str) -> Verifier:
    """The verifier called `name`.

    This is not `registry.resolve`, for two reasons: the registry imports the methods and so torch, 200 MB a worker;
    and a user's module may fail to import in any way, which the user wants to read about.

    Args:
        name: 'arithmetic', 'math', or the dotted path of a function.

    Raises:
        ConfigError: unknown short name (with a suggestion), a module that does not import, or not a function.
    """
    where = "reward.verifier"
    if name not in VERIFIERS and "." not in name:
        from megatron_stare.config.load import unknown_key  # imports pydantic, which no healthy worker needs

        raise unknown_key(name, VERIFIERS, where)
    module_name, _, attribute = VERIFIERS.get(name, name).rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(f"cannot import {module_name!r}: {type(error).__name__}: {error}", where=where) from error
    verify = getattr(module, attribute, None)
    if not callable(verify):
        problem = f"{module_name!r} has no {attribute!r}" if verify is None else f"{name!r} is not a function"
        raise ConfigError(problem, where=where)
    return verify
