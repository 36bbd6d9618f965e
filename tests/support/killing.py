"""Kills or holds a process at a chosen moment: at an audit event
(docs.python.org/3/library/audit_events.html).

A hook is inherited by forked processes, so the moment may be one of a writer's. It stays for the
life of a process.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any


def kill_at(event: str, pattern: str) -> None:
    """Has this process killed (SIGKILL) when it, or what it forks, raises the event with a path of
    the pattern."""
    victim, looked_for = os.getpid(), re.compile(pattern)

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if name == event and looked_for.search(
            os.fspath(arguments[0]) if _is_path(arguments[0]) else ""
        ):
            os.kill(victim, signal.SIGKILL)
            if os.getpid() != victim:
                signal.pause()  # until the kernel ends it, because its parent is gone

    sys.addaudithook(hook)


def kill_child_at(event: str, pattern: str) -> None:
    """Has a process that this one forks killed (SIGKILL) when it raises the event with a path of
    the pattern."""
    parent, looked_for = os.getpid(), re.compile(pattern)

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if (
            name == event
            and os.getpid() != parent
            and _is_path(arguments[0])
            and looked_for.search(os.fspath(arguments[0]))
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def hold_children_at(event: str, pattern: str) -> Callable[[], None]:
    """Has every process that this one forks wait when it raises the event with a path of the
    pattern, until what this gives is called."""
    parent, looked_for = os.getpid(), re.compile(pattern)
    here, there = os.pipe()

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        held = name == event and os.getpid() != parent and _is_path(arguments[0])
        if held and looked_for.search(os.fspath(arguments[0])):
            os.close(there)  # so that the parent's is the last
            os.read(here, 1)

    sys.addaudithook(hook)
    return lambda: os.close(there)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)
