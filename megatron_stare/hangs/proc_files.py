"""Reads facts about a process from Linux's /proc (proc(5)). Most /proc files that this module reads
never block the reader, whatever the state of the process.

A read of /proc/PID/cmdline, /proc/PID/mem or /proc/PID/smaps_rollup can block, because the kernel
takes the memory lock of process PID for the read. A page fault of process PID may hold the memory
lock while the page fault waits for a dead file system. The function `command` reads cmdline,
`pss_bytes` reads smaps_rollup, and `stuck_at` reads mem. Each of these three functions can
therefore block forever. Call `command`, `pss_bytes` and `stuck_at` only on a thread that can be
abandoned.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
LONGEST_PATH = 4096
# x86-64 numbers of system calls that wait for a file system (asm/unistd_64.h), with the index of
# the argument that names the file
BY_PATH = {2: 0, 4: 0, 6: 0, 21: 0, 80: 0, 82: 0, 83: 0, 84: 0, 87: 0, 89: 0} | {
    257: 1, 258: 1, 262: 1, 263: 1, 264: 1, 269: 1, 316: 1, 332: 1, 439: 1
}  # fmt: skip
BY_FD = dict.fromkeys(
    (0, 1, 3, 5, 17, 18, 19, 20, 40, 72, 73, 74, 75, 76, 77, 217, 285, 295, 296, 326), 0
)
NAMES = {
    0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 6: "lstat", 17: "pread",
    18: "pwrite", 19: "readv", 20: "writev", 21: "access", 40: "sendfile", 72: "fcntl", 73: "flock",
    74: "fsync", 75: "fdatasync", 76: "truncate", 77: "ftruncate", 80: "chdir", 82: "rename",
    83: "mkdir", 84: "rmdir", 87: "unlink", 89: "readlink", 217: "getdents", 257: "open",
    258: "mkdir", 262: "stat", 263: "unlink", 264: "rename", 269: "access", 285: "fallocate",
    295: "preadv", 296: "pwritev", 316: "rename", 326: "copy_file_range", 332: "statx",
    439: "access",
}  # fmt: skip


@dataclass(frozen=True)
class Status:
    """A process or a thread.

    Args:
        state: R running, S sleeping, D in uninterruptible sleep, T stopped, t stopped by a
            debugger, Z ended but not reaped, I idle in the kernel.
        cpu_s: CPU seconds used.
        started: start time in ticks after boot. The start time and the pid together identify a
            process.
    """

    pid: int
    name: str
    state: str
    parent: int
    cpu_s: float
    started: int
    rss_bytes: int


def status(pid: int, thread: int | None = None) -> Status | None:
    """Reads the status of a process or thread. Returns None if the process or thread does not
    exist."""
    file = PROC / str(pid) / ("stat" if thread is None else f"task/{thread}/stat")
    try:
        head, _, tail = file.read_text(errors="replace").rpartition(")")
    except OSError:
        return None
    rest = tail.split()  # from field 3 on
    rss = int(rest[21]) * PAGE
    cpu = (int(rest[11]) + int(rest[12])) / TICKS
    return Status(pid, head.partition("(")[2], rest[0], int(rest[1]), cpu, int(rest[19]), rss)


def everything() -> dict[int, Status]:
    """Returns all processes of this machine, by pid."""
    pids = (int(entry) for entry in os.listdir(PROC) if entry.isdigit())
    return {pid: found for pid in pids if (found := status(pid)) is not None}


def below(roots: Iterable[int], processes: dict[int, Status]) -> set[int]:
    """Returns the pids of those `roots` that exist, and the pids of all their descendants."""
    children: dict[int, list[int]] = {}
    for each in processes.values():
        children.setdefault(each.parent, []).append(each.pid)
    found: set[int] = set()
    left = [root for root in roots if root in processes]
    while left:
        pid = left.pop()
        if pid not in found:
            found.add(pid)
            left += children.get(pid, [])
    return found


def kill(pid: int) -> None:
    """Kills a process and all its descendants. The descendants must die too, because a descendant
    that hangs would keep the inherited sockets open. While a descendant keeps an inherited socket
    open, the peer of the socket cannot notice that the killed process has ended."""
    for each in (pid, *below([pid], everything())):
        with contextlib.suppress(OSError):
            os.kill(each, signal.SIGKILL)


def waited_for_cpu(pid: int) -> dict[int, float]:
    """Returns the seconds that each thread has waited for a CPU since the thread started
    (schedstat). A thread waits for a CPU if it is ready to run but does not run. Returns {} if the
    kernel does not report waiting times."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(PROC / str(pid) / "task"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                line = (PROC / str(pid) / "task" / thread / "schedstat").read_text()
                found[int(thread)] = int(line.split()[1]) / 1e9
    return found


def waits_in(pid: int) -> str:
    """Returns the kernel function in which the process sleeps. Returns "" if the function is
    unknown."""
    with contextlib.suppress(OSError):
        name = (PROC / str(pid) / "wchan").read_text()
        return "" if name == "0" else name
    return ""


def system_call(pid: int) -> str:
    """Returns the system call in which the main thread of the process waits. The result has the
    format of /proc/PID/syscall, and includes the arguments of the system call. Returns "" if the
    main thread does not wait in a system call. The caller needs permission to trace the process."""
    with contextlib.suppress(OSError):
        line = (PROC / str(pid) / "syscall").read_text().strip()
        return "" if line.startswith(("running", "-1")) else line
    return ""


def sleeping_threads(pid: int) -> list[str]:
    """Lists all threads in uninterruptible sleep except the main thread. Only a device or a file
    system can wake a thread in uninterruptible sleep."""
    found = []
    with contextlib.suppress(OSError):
        for thread in (int(entry) for entry in os.listdir(PROC / str(pid) / "task")):
            told = status(pid, thread)
            if thread != pid and told is not None and told.state == "D":
                found.append(f"thread {thread} ({told.name})")
    return found


def command(pid: int) -> list[str]:
    """Returns the command line of a process."""
    with contextlib.suppress(OSError):
        return (
            (PROC / str(pid) / "cmdline")
            .read_bytes()
            .decode(errors="replace")
            .rstrip("\0")
            .split("\0")
        )
    return []


def pss_bytes(pid: int) -> int | None:
    """Returns the process's proportional set size (PSS), or None if the kernel does not report the
    PSS."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return None


def runs_python(pid: int) -> bool:
    """Returns True if the process is a Python interpreter. py-spy reads only stacks of Python
    interpreters."""
    with contextlib.suppress(OSError):
        return "python" in os.path.basename(os.readlink(PROC / str(pid) / "exe"))
    return False


def stuck_at(pid: int, call: str) -> tuple[str, str] | None:
    """Returns the name of a system call that waits for a file, and the path of the file. Returns
    None if the system call does not wait for a file, or if this function cannot determine the file.

    Args:
        call: see `system_call`.
    """
    if platform.machine() != "x86_64" or not call:
        return None
    number, *arguments = (int(word, 0) for word in call.split()[:7])
    if number in BY_FD:
        with contextlib.suppress(OSError):
            path = os.readlink(PROC / str(pid) / "fd" / str(arguments[0]))
            if path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/memfd:")):
                return NAMES[number], path
    if number in BY_PATH:
        with (
            contextlib.suppress(OSError, ValueError),
            (PROC / str(pid) / "mem").open("rb", buffering=0) as memory,
        ):
            memory.seek(arguments[BY_PATH[number]])
            path = memory.read(LONGEST_PATH).split(b"\0")[0].decode(errors="replace")
            return NAMES[number], path
    return None


def mounted(path: str) -> str:
    """Returns the type and the mount point of the file system that contains `path`, an absolute
    path. Reads only /proc, and does not access the file system that contains `path`."""
    best, kind = "", ""
    with contextlib.suppress(OSError):
        for line in (PROC / "self/mountinfo").read_text().splitlines():
            place, _, rest = line.split()[4], *line.partition(" - ")[1:]
            inside = path == place or path.startswith(place.rstrip("/") + "/")
            if inside and len(place) >= len(best):
                best, kind = place, rest.split()[0]
    return f"{kind} at {best}" if best else ""
