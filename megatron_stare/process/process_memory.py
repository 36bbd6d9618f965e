"""How much memory a run takes, its child processes included.

Comes from psutil; goes to the metric memory/tree_pss_gb. Proportional set size (Pss) is used because it may be summed:
a page shared by n processes, such as libtorch or Ray's object store, counts as 1/n in each. Resident size would count
it n times.
"""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def tree_pss_bytes(pid: int | None = None, extra_pids: Iterable[int] = ()) -> int | None:
    """Pss of a process and everything it started, bytes; None where the kernel does not tell: only Linux does.

    Ray's local head, raylet and actors are descendants of the driver that called ray.init(). Processes that vanish
    while being read, or belong to someone else, count as 0.

    Args:
        pid: root of the tree; default this process.
        extra_pids: roots of further trees, for what does not descend from `pid` (a cluster started elsewhere).
    """
    if not hasattr(psutil.Process().memory_full_info(), "pss"):
        return None
    processes: set[psutil.Process] = set()  # trees may overlap; every process counts once
    for root in (pid, *extra_pids):
        processes |= _tree(root)
    return sum(_pss_bytes(process) for process in processes)


def _tree(pid: int | None) -> set[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return {root, *root.children(recursive=True)}
    except psutil.Error:
        return set()


def _pss_bytes(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except (psutil.Error, OSError):  # gone, a zombie, or not ours to read
        return 0
