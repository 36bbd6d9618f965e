"""Lines on stderr that say what takes seconds to start, before it does.

stdout is left alone: programs parse it.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any


def say_loading(*, always: bool = False) -> None:
    """Says that the libraries of a run are imported next; once a process.

    Args:
        always: not on a terminal alone.
    """
    if "torch" not in sys.modules:
        say("loading PyTorch and Megatron ...", always=always)


def unsaid(text: str) -> Any:
    """Takes a line that nobody is to be told."""


def counted(number: int, what: str) -> str:
    """1 trainer rank, 2 trainer ranks."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def say(text: str, *, always: bool = False) -> None:
    """Prints a line where a person looks at stderr.

    Args:
        always: or where nobody does.
    """
    with contextlib.suppress(OSError, ValueError):  # of a terminal that is gone
        if always or sys.stderr.isatty():
            print(text, file=sys.stderr, flush=True)
