"""Prints a line to stderr before every part of the start-up that takes several seconds, so that the
user sees that the process works.

Nothing is printed to stdout, because programs parse stdout.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any


def say_loading(*, always: bool = False) -> None:
    """Tells the user that the process is now loading PyTorch and Megatron. Prints nothing if the
    process has already imported torch.

    Args:
        always: print even if stderr is not a terminal.
    """
    if "torch" not in sys.modules:
        say("loading PyTorch and Megatron ...", always=always)


def unsaid(text: str) -> Any:
    """Ignores `text` and prints nothing. Callers pass this function in place of `say` if they want
    no output."""


def counted(number: int, what: str) -> str:
    """Returns a number followed by a noun in the singular or plural: "1 trainer rank", "2 trainer
    ranks"."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def say(text: str, *, always: bool = False) -> None:
    """Prints a line to stderr if stderr is a terminal.

    Args:
        always: print even if stderr is not a terminal.
    """
    with contextlib.suppress(OSError, ValueError):  # of a terminal that is gone
        if always or sys.stderr.isatty():
            print(text, file=sys.stderr, flush=True)
