"""For how long a run's processes could have gone on and were given no CPU: other programs have it. Ray starts its
workers with a low priority (nice 15), so a few busy programs can make them a hundred times as slow."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_stare.hangs import proc_files
from megatron_stare.run_dir.heartbeat import DRIVER, beats_of


class Starvation:
    """Looked at again and again."""

    def __init__(self) -> None:
        self._waited: dict[int, dict[int, float]] = {}  # by process, of its threads

    def since(self, pids: Iterable[int]) -> float:
        """Seconds since the last look that these processes waited for a CPU, each its thread that waited longest; 0 for
        one that was not looked at then. A thread that sleeps until something comes does not wait for one."""
        before, self._waited = self._waited, {pid: proc_files.waited_for_cpu(pid) for pid in pids}
        total = 0.0
        for pid, threads in self._waited.items():
            known = before.get(pid, {})
            total += max((waited - known[thread] for thread, waited in threads.items() if thread in known), default=0.0)
        return total

    def forget(self) -> None:
        """The next look is a first one."""
        self._waited = {}


def of_the_run(folder: Path) -> set[int]:
    """The processes of this node that a phase may wait for: the driver, ranks and engines, and what these have started:
    servers and writers. Those too that are in no call: one may be asked and not know it for want of a CPU.

    Args:
        folder: of this node's beats.
    """
    beats = beats_of(folder)
    workers = [beat.pid for beat in beats if beat.role != DRIVER]
    return {beat.pid for beat in beats} | proc_files.below(workers, proc_files.everything())
