"""How much memory a run takes, its child processes included.

Comes from /proc; goes to the metric memory/tree_pss_gb. Proportional set size (Pss) is used because it may be summed:
a page shared by n processes, such as libtorch or Ray's object store, counts as 1/n in each. Resident size would count
it n times.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil

_PROC = Path("/proc")


def tree_pss_bytes(pid: int | None = None, extra_pids: Iterable[int] = ()) -> int | None:
    """Pss of a process and everything it started, bytes; None where the kernel does not tell (no Linux /proc).

    Ray's local head, raylet and actors are descendants of the driver that called ray.init(). Processes that vanish
    while being read, or belong to someone else, count as 0.

    Args:
        pid: root of the tree; default this process.
        extra_pids: roots of further trees, for what does not descend from `pid` (a cluster started elsewhere).
    """
    if not (_PROC / "self" / "smaps_rollup").exists():
        return None
    pids: set[int] = set()  # trees may overlap; every process counts once
    for root in (os.getpid() if pid is None else pid, *extra_pids):
        pids |= _tree(root)
    return sum(_pss_bytes(p) for p in pids)


def _tree(pid: int) -> set[int]:
    try:
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.Error:
        return set()


def _pss_bytes(pid: int) -> int:
    try:
        text = (_PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:  # gone, a zombie, or not ours to read
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024  # "Pss:   1234 kB", where kB is 1024 bytes
    return 0
