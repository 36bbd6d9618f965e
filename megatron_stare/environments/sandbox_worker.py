"""The process inside a sandbox. `environments/sandboxes.py` starts this process under bubblewrap as
`python -I sandbox_worker.py MEMORY_MB CHARACTERS`. This module uses only the standard library.

The worker process reads one request {"code": text, "seconds": s} per line from stdin. For each
request, the worker writes one line {"output": text, "failed": bool} to stdout. If a program cannot
be isolated, the program does not run, and the worker writes the line {"broken": why}. Before the
first request, the worker imports commonly used libraries (PRELOADED). Each program runs in a fork
of the worker, so the libraries are already imported. The forked process has its own user, process,
mount, IPC and host namespaces, an empty scratch folder, and resource limits. A system-call filter
(seccomp) prevents the forked process from starting other processes or threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import linecache
import os
import platform
import resource
import select
import signal
import struct
import sys
import traceback

PRELOADED = ("math", "fractions", "itertools", "collections", "re", "random", "numpy", "sympy")
SCRATCH = "/tmp"
SCRATCH_MB, FILE_MB, FILES = 64, 32, 64
OPEN_FILES = 256  # of the process that serves
FAILED, TIMED_OUT, NOT_SET_UP = 1, 124, 125  # exit codes of the process that guards a code
_READY = 3  # file descriptor on which a code's process says that it is confined
LEFT_OUT = "\n... the rest of the output is left out\n"
NO_EXIT = "the code has ended its process"
_LIBC = ctypes.CDLL(None, use_errno=True)

# clone flags (linux/sched.h) and mount flags (linux/mount.h)
_NEW = 0x10000000 | 0x20000000 | 0x00020000 | 0x08000000 | 0x04000000  # user, pid, mount, ipc, uts
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXECUTION, _RECURSIVE, _PRIVATE = (
    1, 2, 4, 8, 0x4000, 0x40000,
)  # fmt: skip

# System calls that the filter refuses with EPERM, by machine: new processes and threads, programs,
# other processes' memory, namespaces and mounts, kernel keys, calls with a history of faults,
# memory that RLIMIT_AS does not count, and calls that hold up the whole machine.
_REFUSED = {
    "x86_64": (
        0xC000003E,
        (
            *(56, 57, 58, 435),  # clone, fork, vfork, clone3
            *(59, 322),  # execve, execveat
            *(101, 310, 311, 312, 438),  # ptrace, process_vm_*, kcmp, pidfd_getfd
            *(155, 161, 165, 166, 272, 308),  # pivot_root, chroot, mount, umount2, unshare, setns
            *(428, 429, 430, 431, 432, 433, 442),  # open_tree, move_mount, fs*, mount_setattr
            *(248, 249, 250),  # add_key, request_key, keyctl
            *(298, 321, 323, 425, 426, 427),  # perf_event_open, bpf, userfaultfd, io_uring_*
            *(41, 53),  # socket, socketpair
            *(29, 30, 31, 67),  # shmget, shmat, shmctl, shmdt
            *(64, 65, 66, 220),  # semget, semop, semctl, semtimedop
            *(68, 69, 70, 71),  # msgget, msgsnd, msgrcv, msgctl
            *(319, 447),  # memfd_create, memfd_secret
            *(206, 162, 306, 103),  # io_setup, sync, syncfs, syslog
        ),
    ),
    "aarch64": (
        0xC00000B7,
        (
            *(220, 435, 221, 281),
            *(117, 270, 271, 272, 438),
            *(41, 51, 40, 39, 97, 268),
            *(428, 429, 430, 431, 432, 433, 442),
            *(217, 218, 219),
            *(241, 280, 282, 425, 426, 427),
            *(198, 199),
            *(194, 196, 195, 197),
            *(190, 193, 191, 192),
            *(186, 189, 188, 187),
            *(279, 447),
            *(0, 81, 267, 116),
        ),
    ),
}


_FCNTL = {"x86_64": 72, "aarch64": 25}
_SET_LEASE = 1024  # of fcntl: an `open` of the file elsewhere would wait for this process


class SetUpError(Exception):
    """Raised if this machine cannot isolate a program, for example because the kernel refuses a
    system call."""


def main(memory_mb: int, characters: int) -> None:
    """Serves until stdin ends."""
    # every program closes the files up to this limit, which a container may set to a billion
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in requests:
        request = json.loads(line)
        # not bound to a name, which the next program, a fork of this process, could read
        answers.write(
            json.dumps(run(request["code"], request["seconds"], memory_mb, characters)) + "\n"
        )
        answers.flush()


def run(code: str, seconds: float, memory_mb: int, characters: int) -> dict[str, object]:
    """Runs the program of a request, and returns the answer to this request. The answer contains at
    most the first `characters` characters of the program's output."""
    out, into = os.pipe()
    warden = os.fork()
    if not warden:
        ended = NOT_SET_UP
        try:
            os.close(out)
            ended = _guard(code, seconds, memory_mb, into)
        finally:  # whatever happens, this process must not go on as a second server
            os._exit(ended)
    os.close(into)
    kept, dropped = bytearray(), 0
    limit = 4 * characters  # a character has at most four bytes
    while part := os.read(out, 1 << 16):
        taken = part[: max(0, limit - len(kept))]
        kept += taken
        dropped += len(part) - len(taken)
    os.close(out)
    ended = os.waitstatus_to_exitcode(os.waitpid(warden, 0)[1])
    text = kept.decode(errors="replace")
    if dropped or len(text) > characters:
        text = text[:characters] + LEFT_OUT
    if ended == NOT_SET_UP:
        return {"broken": text or "its process ended"}
    if ended == TIMED_OUT:
        text += f"TimeoutError: the code ran for more than {seconds:g} seconds and was stopped\n"
    elif ended not in (0, FAILED):
        text += f"{NO_EXIT} with {ended}\n"
    return {"output": text, "failed": ended != 0}


def _guard(code: str, seconds: float, memory_mb: int, out: int) -> int:
    """Runs the program in a process with new namespaces, and kills the process if it runs longer
    than `seconds`. Returns the program's exit code if the program ends in time. Returns TIMED_OUT
    if the program runs too long. Returns NOT_SET_UP if the process could not be isolated. If a
    program itself exits with the code TIMED_OUT or NOT_SET_UP, `_guard` returns FAILED, so that no
    program can fake a timeout or a failed set-up."""
    is_ready, ready = os.pipe()
    try:
        _die_with_parent()
        _separate()
        child = os.fork()
    except (OSError, SetUpError) as error:
        os.write(out, str(error).encode())
        return NOT_SET_UP
    if not child:
        try:
            _die_with_parent()
            _confine(out, ready, memory_mb, seconds)
        except BaseException as error:
            os.write(out, f"{type(error).__name__}: {error}".encode())
            os._exit(NOT_SET_UP)
        _execute(code)
    os.close(out)
    os.close(ready)
    if not os.read(is_ready, 1):
        os.waitpid(child, 0)
        return NOT_SET_UP
    watched = os.pidfd_open(child)
    on_time = bool(select.select([watched], [], [], seconds)[0])
    if not on_time:
        os.kill(child, signal.SIGKILL)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not on_time:
        return TIMED_OUT
    if ended < 0:  # by a signal
        return 128 - ended
    return FAILED if ended in (TIMED_OUT, NOT_SET_UP) else ended


def _separate() -> None:
    """Enters new namespaces. The next process that this process forks becomes the first process in
    the new process namespace."""
    user, group = os.geteuid(), os.getegid()
    _called("unshare", _NEW)
    for file, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{file}", "w") as written:
            written.write(line)


def _confine(out: int, ready: int, memory_mb: int, seconds: float) -> None:
    """Isolates this process. Mounts an empty scratch folder, closes all files except the output
    `out`, sets the resource limits, drops all privileges, and installs the system-call filter.
    Finally reports, through the pipe `ready`, that the process is isolated."""
    _called("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None)
    flags = _NO_SUID | _NO_DEVICES | _NO_EXECUTION
    size = f"size={SCRATCH_MB}m,nr_inodes=1k,mode=700".encode()
    _called("mount", b"tmpfs", SCRATCH.encode(), b"tmpfs", flags, size)
    _called("mount", b"tmpfs", b"/proc", b"tmpfs", flags | _READ_ONLY, b"size=4k")
    os.chdir(SCRATCH)
    nothing = os.open("/dev/null", os.O_RDONLY)
    # copied out of the way first: one of them may have the number of another's place
    out, ready = os.dup(out), os.dup(ready)
    for kept, place in ((nothing, 0), (out, 1), (out, 2), (ready, _READY)):
        os.dup2(kept, place)
    os.closerange(_READY + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    mb = 1 << 20
    for limit, value in (
        (resource.RLIMIT_AS, memory_mb * mb),
        (resource.RLIMIT_CPU, int(seconds) + 2),
        (resource.RLIMIT_FSIZE, FILE_MB * mb),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(limit, (value, value))
    os.umask(0o077)
    none = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, twice 32 of each
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    _called("capset", header, none)
    _called("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    _called("prctl", 4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    _filter_calls()
    os.write(_READY, b"1")
    os.close(_READY)


def _filter_calls() -> None:
    """Installs a seccomp filter, which refuses dangerous system calls of this process. An installed
    filter cannot be removed."""
    machine = platform.machine()
    if machine not in _REFUSED:
        raise SetUpError(f"no filter of system calls for {machine}")
    architecture, refused = _REFUSED[machine]
    load, equal, above, done = 0x20, 0x15, 0x35, 0x06
    allow, deny, kill = 0x7FFF0000, 0x00050001, 0x80000000
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (done, 0, 0, kill),
        (load, 0, 0, 0),
        # calls of the x32 interface have other numbers
        (above, 0, 1, 0x40000000),
        (done, 0, 0, kill),
    ]
    program += [
        (equal, 0, 4, _FCNTL[machine]),
        (load, 0, 0, 24),  # low half of the second argument
        (equal, 0, 1, _SET_LEASE),
        (done, 0, 0, deny),
        (done, 0, 0, allow),
    ]
    for number in refused:
        program += [(equal, 0, 1, number), (done, 0, 0, deny)]
    program.append((done, 0, 0, allow))
    raw = b"".join(struct.pack("HBBI", *each) for each in program)
    held = ctypes.create_string_buffer(raw, len(raw))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("first", ctypes.c_void_p))

    filtered = Program(len(program), ctypes.addressof(held))
    _called("prctl", 22, 2, ctypes.byref(filtered), 0, 0)  # PR_SET_SECCOMP, a filter


def _execute(code: str) -> None:
    """Runs the code as a main program, and then exits the process."""
    ended = 0
    if drawing := sys.modules.get("numpy.random"):  # Python's own is seeded after a fork
        drawing.seed()
    # the lines that a trace shows
    linecache.cache["<code>"] = (len(code), None, code.splitlines(keepends=True), "<code>")
    try:
        exec(
            compile(code, "<code>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__}
        )
    except SystemExit as asked:
        ended = FAILED if asked.code not in (None, 0) else 0
        if isinstance(asked.code, str):
            print(asked.code)
    except BaseException as error:
        ended = FAILED
        _tell(error)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(ended)


def _tell(error: BaseException) -> None:
    """Prints an exception. The printed traceback contains only lines of the program itself."""
    with contextlib.suppress(BaseException):
        told = traceback.TracebackException.from_exception(error, limit=-20, compact=True)
        own = [frame for frame in told.stack if frame.filename == "<code>"]
        told.stack = traceback.StackSummary.from_list(own)
        sys.stdout.flush()
        print("".join(told.format(chain=False)), end="", file=sys.stderr)


def _die_with_parent() -> None:
    _called("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _called(name: str, *arguments: object) -> None:
    """Calls the function `name` of the C library. Raises SetUpError if the C function returns an
    error code (any value except 0)."""
    if getattr(_LIBC, name)(*arguments) != 0:
        raise SetUpError(f"{name} is refused: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
