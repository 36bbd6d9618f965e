"""Contains code that several adapters to other trainers use. This module checks the functions and
settings of an installed trainer, and saves and loads the state of a Selector."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_stare.algorithms.stare import Stare
from megatron_stare.errors import ConfigError, UserError
from megatron_stare.select.selector import METHODS, Selector

STATE_FILE = "stare_select.json"


class UpstreamChangedError(UserError):
    """Raised if an installed trainer differs from the release that its adapter was written for."""


def missing(of: Any, called: Mapping[str, Sequence[str]]) -> str | None:
    """Checks that a class or module has the functions and parameters that the adapter uses. Returns
    a message about the first function that is missing or lacks a parameter, or None if nothing is
    missing.

    Args:
        of: the class or module to check.
        called: parameters that the adapter passes, by name of the function.
    """
    for name, wanted in called.items():
        function = getattr(of, name, None)
        if function is None:
            return f"{of.__name__} has no {name}"
        lacks = [each for each in wanted if each not in inspect.signature(function).parameters]
        if lacks:
            return f"{of.__name__}.{name} has no parameter {', '.join(lacks)}"
    return None


def upstream_of(trainer: type, adapter: type) -> type:
    """Returns the upstream class, whose methods the adapter overrides. In the method resolution
    order of `trainer`, the upstream class comes after the class `adapter`."""
    order = trainer.__mro__
    return order[order.index(adapter) + 1]


def expect(changed: str | None, trainer: str, release: str, trusts: bool) -> None:
    """Raises UpstreamChangedError with the message `changed`, unless `changed` is None. If `trusts`
    is True (setting `trust_upstream`), the function issues a warning with the message instead of
    raising an error."""
    if changed is None:
        return
    if not trusts:
        raise UpstreamChangedError(
            changed,
            where=trainer,
            fix=f"install {trainer} {release}, or set trust_upstream to train all the same",
        )
    warnings.warn(
        f"{trainer} changed ({changed}); trust_upstream trains all the same", stacklevel=3
    )


def refuse(
    faults: Mapping[str, tuple[bool, str]], settings: Mapping[str, Any], trainer: str
) -> None:
    """Raises ConfigError for the first wrong setting of a trainer. Also raises ConfigError for a
    method that removes tokens from the denominator of the loss, because the trainer's own
    denominator counts all tokens.

    Args:
        faults: maps the name of each setting of the trainer to a pair: True if the setting is
            wrong, and the reason why it is wrong.
        settings: the selector's settings.
    """
    for name, (wrong, why) in faults.items():
        if wrong:
            raise ConfigError(why, where=name)
    method = METHODS.get(settings.get("method", "stare"), Stare)  # Selector refuses other names
    if method is not Stare and settings.get("denominator") != "all":
        raise ConfigError(
            f"{trainer} divides by all tokens, also by those that the method takes out",
            where="stare",
            fix="set denominator: all; method stapo_stare: use stare",
        )


def save_state(selector: Selector, folder: Path) -> None:
    """Writes the selector's state into the folder of a checkpoint. A missing folder is created."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE_FILE).write_text(json.dumps(selector.state_dict()))


def load_state(selector: Selector, folder: Path, trainer: str, may_begin: bool) -> None:
    """Loads the selector's state from the folder of a checkpoint. If `may_begin` is True, a folder
    without a state is no error, and the selector keeps its initial state.

    Raises:
        ConfigError: the checkpoint has no state of the selector, or a state with other settings.
    """
    file = folder / STATE_FILE
    if file.is_file():
        selector.load_state_dict(json.loads(file.read_text()))
    elif not may_begin:
        raise ConfigError(
            "the checkpoint has no state of the selector",
            where=str(file),
            fix=f"resume from a checkpoint that {trainer} wrote, or set fresh_state to begin here",
        )
