"""Defines the sandboxes in which Python code from the policy runs.

`bubblewrap` runs the code on this machine with limits of memory and time. In `bubblewrap`, the code
has no access to the network or to other processes, and can read no files of the machine except
system libraries and Python. `remote` sends the code to a server that uses SandboxFusion's protocol.
`monty` runs the code in the interpreter `pydantic-monty`, which supports only a part of Python and
has no access to the machine. No program sees the variables or files of an earlier program.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import queue
import select
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from megatron_stare.environments import sandbox_worker
from megatron_stare.errors import ConfigError, UserError

SandboxName = Literal["bubblewrap", "remote", "monty"]
WHERE = "rollout.environment.sandbox"
GRACE_S = 10.0  # seconds over its limit after which a worker that does not answer is replaced
START_S = 60.0  # seconds that a worker may take to import what code usually imports
ATTEMPTS, FIRST_PAUSE_S = 5, 0.5  # of requests to a server; the pause doubles
_LONGEST_REPLY = 1 << 22  # bytes
_FIX = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces,"
    " kernel.apparmor_restrict_unprivileged_userns=0, for a container --security-opt"
    " seccomp=unconfined and apparmor=unconfined) and raise memory_mb, or set sandbox: remote and"
    " sandbox_url"
)


@dataclass(frozen=True)
class Ran:
    """Result of a program: its output, including a traceback, and whether the program failed.

    `seconds`: wall-clock time of the program, without the time that the program waited for a free
        worker.
    """

    output: str
    failed: bool
    seconds: float = field(default=0.0, compare=False)


class DaemonThreads:
    """Runs calls in daemon threads. The argument `most` limits the number of threads.

    When a process exits, Python waits for the running calls of a ThreadPoolExecutor, but not for
    calls in daemon threads.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Starts a call, or queues the call if no thread is free. Returns a future of the call's
        result."""
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.append((future, partial(function, *arguments)))
            if self._free:
                self._free -= 1
                threading.Thread(target=self._work, name="tool", daemon=True).start()
        return future

    def cancel(self) -> None:
        """Cancels the calls that have not begun."""
        with self._lock:
            for future, _ in self._waiting:
                future.cancel()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._free += 1
                    return
                future, call = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)


class Sandbox(ABC):
    """Runs Python code. Many coroutines can use one sandbox at the same time.

    Args:
        threads: threads in which programs run.
    """

    def __init__(self, threads: ThreadPoolExecutor | DaemonThreads) -> None:
        self._threads = threads

    async def run(self, code: str, seconds: float) -> Ran:
        """Runs a program with a time limit of `seconds` seconds. Errors of the program are part of
        the returned output.

        Raises:
            UserError: the sandbox itself does not work.
        """
        # surrogates cannot be written as UTF-8
        code = code.encode(errors="replace").decode()
        return await asyncio.wrap_future(self._threads.submit(self._run, code, seconds))

    @abstractmethod
    def _run(self, code: str, seconds: float) -> Ran:
        """Runs a program. `run` calls this method in one of the sandbox's threads."""

    @abstractmethod
    def close(self) -> None:
        """Ends the processes that the sandbox has started, and drops the calls that have not begun.
        `close` is idempotent. Do not call `run` after `close`."""


class Bubblewrap(Sandbox):
    """Runs code on this machine, in processes that bubblewrap and the kernel isolate.

    Args:
        workers: number of programs that run at the same time.
        memory_mb: address space limit of a program's process, in 2**20 bytes.
        characters: number of characters of output that are kept.
    """

    def __init__(self, workers: int, memory_mb: int, characters: int) -> None:
        # The kernel ends a bubblewrap worker when the thread that started it ends, so threads stay.
        self._pool = ThreadPoolExecutor(workers, "sandbox")
        super().__init__(self._pool)
        self._limits = memory_mb, characters
        self._free: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for _ in range(workers):
            self._free.put(None)  # started when first needed
        self._started: set[_Worker] = set()
        self._closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            for worker in self._started:
                worker.end()
            self._started.clear()
        self._pool.shutdown(wait=True)

    def _run(self, code: str, seconds: float) -> Ran:
        worker = self._free.get()
        try:
            if worker is None:
                worker = _Worker(*self._limits)
                with self._lock:
                    self._started.add(worker)
                    if self._closed:
                        worker.end()  # so that it answers nothing
            found = worker.ask(code, seconds)
            if found is None:
                with self._lock:
                    self._started.discard(worker)
                worker.end()
                worker = None
                return Ran("the sandbox's process was lost and is replaced\n", True)
            return found
        finally:
            self._free.put(worker)


class _Worker:
    """A worker process that runs programs one after another. Raises UserError if the worker process
    does not start."""

    def __init__(self, memory_mb: int, characters: int) -> None:
        self._process = subprocess.Popen(
            [*command(), str(memory_mb), str(characters)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=_VARIABLES,  # bwrap's own --clearenv came with 0.5, and RHEL 9 has 0.4
        )
        try:
            found = self.ask("print(1)", START_S)
        except UserError:
            self.end()
            raise
        if found != Ran("1\n", False):
            self._process.kill()
            said = self._process.communicate()[1].decode(errors="replace").strip()
            why = said.splitlines()[-1] if said else (found.output.strip() if found else "silence")
            raise UserError(
                f"bubblewrap cannot isolate code on this machine: {why}", where=WHERE, fix=_FIX
            )

    def ask(self, code: str, seconds: float) -> Ran | None:
        """Runs a program. Returns None if the worker process does not answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            asked = json.dumps({"code": code, "seconds": seconds}).encode() + b"\n"
            begun = time.monotonic()
            while asked:
                asked = asked[self._process.stdin.write(asked) :]
            answer, until = bytearray(), begun + seconds + GRACE_S
            readable = select.poll()  # unlike select, for file numbers above 1,023 too
            readable.register(self._process.stdout, select.POLLIN)
            while not answer.endswith(b"\n"):
                if not readable.poll(max(0.0, until - time.monotonic()) * 1000):
                    return None
                if not (part := os.read(self._process.stdout.fileno(), 1 << 16)):
                    return None
                answer += part
            told = json.loads(answer)
        except (OSError, ValueError):  # it is gone, or is closed by another thread
            return None
        if why := told.get("broken"):
            raise UserError(
                f"bubblewrap cannot isolate code on this machine: {why}", where=WHERE, fix=_FIX
            )
        return Ran(**told, seconds=time.monotonic() - begun)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


class Remote(Sandbox):
    """Sends code to a server that uses SandboxFusion's protocol (POST URL/run_code).

    Args:
        url: http://... or https://..., without /run_code.
        workers: number of requests at the same time.
        memory_mb: memory limit that the server is asked to set, in 2**20 bytes.
        characters: number of characters of output that are kept.
    """

    def __init__(self, url: str, workers: int, memory_mb: int, characters: int) -> None:
        # a server that does not answer must not keep a finished process alive
        self._requests, self._closed = DaemonThreads(workers), threading.Event()
        super().__init__(self._requests)
        self._url, self._memory_mb, self._characters = url, memory_mb, characters

    def close(self) -> None:
        self._closed.set()
        self._requests.cancel()

    def _run(self, code: str, seconds: float) -> Ran:
        asked = {
            "code": code,
            "language": "python",
            "run_timeout": seconds,
            "compile_timeout": seconds,
            "memory_limit_MB": self._memory_mb,
        }
        failure: Exception | None = None
        for attempt in range(ATTEMPTS):
            if attempt and self._closed.wait(FIRST_PAUSE_S * 2 ** (attempt - 1)):
                break
            begun = time.monotonic()
            try:
                found = self._read(self._reply(asked, seconds), seconds)
                return replace(found, seconds=time.monotonic() - begun)
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                failure = error
        raise UserError(
            f"the sandbox server did not answer in {ATTEMPTS} attempts: {failure}",
            where=self._url,
            fix="start it, or correct rollout.environment.sandbox_url; then --resume",
        ) from failure

    def _reply(self, asked: dict[str, object], seconds: float) -> dict[str, object]:
        request = urllib.request.Request(
            f"{self._url.rstrip('/')}/run_code",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=2 * seconds + GRACE_S) as reply:
            said = json.loads(reply.read(_LONGEST_REPLY))
        if said["status"] == "SandboxError":
            raise ValueError(said.get("message") or "SandboxError")
        return said

    def _read(self, said: dict[str, object], seconds: float) -> Ran:
        result = said.get("run_result") or said.get("compile_result") or {}
        assert isinstance(result, dict)
        text = f"{result.get('stdout') or ''}{result.get('stderr') or ''}"
        if result.get("status") == "TimeLimitExceeded":
            text += (
                f"TimeoutError: the code ran for more than {seconds:g} seconds and was stopped\n"
            )
        if len(text) > self._characters:
            text = text[: self._characters] + sandbox_worker.LEFT_OUT
        return Ran(text, said["status"] != "Success")


class Interpreter(Sandbox):
    """Runs code in the interpreter `pydantic-monty`. The processes of pydantic-monty need no kernel
    namespaces. In pydantic-monty, programs have no numpy, no sympy and only a small part of the
    standard library. Each program runs in its own interpreter session. The state of the session,
    such as variables, is lost when the program ends.

    Args:
        workers: number of programs that run at the same time.
        memory_mb: memory limit of a program's objects, in 2**20 bytes.
        characters: number of characters of output that are kept.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, workers: int, memory_mb: int, characters: int) -> None:
        try:
            import pydantic_monty
        except ImportError as error:
            raise ConfigError(
                f"the package pydantic-monty is not installed: {error}",
                where=WHERE,
                fix='pip install "megatron-stare[tools]"',
            ) from error
        self._package = pydantic_monty
        self._memory, self._characters = memory_mb << 20, characters
        self._processes = pydantic_monty.Monty(max_processes=workers)
        self._processes.__enter__()
        self._pool = ThreadPoolExecutor(workers, "sandbox")
        super().__init__(self._pool)
        self._closed = False

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if not self._closed:
            self._processes.__exit__(None, None, None)
        self._closed = True

    def _run(self, code: str, seconds: float) -> Ran:
        said: list[str] = []
        kept = 0

        def print_callback(stream: str, text: str) -> None:
            nonlocal kept
            if kept <= self._characters:  # a program may print without end
                said.append(text)
            kept += len(text)

        limits = {
            "max_feed_duration_secs": seconds,
            "max_total_sleep_secs": seconds,
            "max_memory": self._memory,
        }
        failed, begun = False, time.monotonic()
        try:
            with self._processes.checkout(limits=limits) as session:
                # the value of a last expression would come here, whatever its size
                session.feed_run(f"{code}\nNone", print_callback=print_callback)
        except (self._package.MontyRuntimeError, self._package.MontySyntaxError) as error:
            failed = True
            said.append(error.display() + "\n")
        except self._package.MontyError:
            return Ran("the sandbox's process was lost and is replaced\n", True)
        text = "".join(said)
        if len(text) > self._characters:
            text = text[: self._characters] + sandbox_worker.LEFT_OUT
        return Ran(text, failed, time.monotonic() - begun)


def make_sandbox(
    name: SandboxName, url: str | None, workers: int, memory_mb: int, characters: int
) -> Sandbox:
    """Makes a sandbox.

    Args:
        url: URL of the server, for `remote`.
        workers: number of programs that run at the same time.
        memory_mb: memory limit of a program, in 2**20 bytes.
        characters: number of characters of output that are kept.

    Raises:
        ConfigError: this machine cannot isolate code, `url` is missing although `name` is `remote`,
            or `url` is set although `name` is not `remote`.
    """
    if (name == "remote") != (url is not None):
        raise ConfigError(
            "sandbox: remote needs a sandbox_url"
            if url is None
            else f"a sandbox_url is set, but the sandbox is {name}",
            where="rollout.environment.sandbox_url",
            fix="set sandbox: remote and sandbox_url: http://HOST:PORT",
        )
    if url is not None:
        return Remote(url, workers, memory_mb, characters)
    if name == "monty":
        return Interpreter(workers, memory_mb, characters)
    if why := why_not_isolated():
        raise ConfigError(
            why,
            where=WHERE,
            fix="install bubblewrap (apt-get install bubblewrap) and allow user namespaces, or set"
            " sandbox: remote and sandbox_url, or sandbox: monty, which supports only a part of"
            " Python",
        )
    return Bubblewrap(workers, memory_mb, characters)


@cache
def why_not_isolated() -> str | None:
    """Runs a test program under bubblewrap. Returns None if the test program ran in isolation, and
    otherwise the reason why bubblewrap cannot isolate code on this machine."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed (there is no bwrap on PATH)"
    try:
        _Worker(512, 100).end()
    except UserError as error:
        return error.what
    return None


def command() -> list[str]:
    """Returns the command that starts a worker under bubblewrap. The worker can read the system's
    libraries and the Python installation of this process, but no other files of the machine."""
    script = "/sandbox_worker.py"
    return [
        shutil.which("bwrap") or "bwrap",
        *("--unshare-all", "--die-with-parent", "--new-session", "--hostname", "sandbox"),
        *_system(),
        *_proc(),
        *("--dev", "/dev", "--tmpfs", sandbox_worker.SCRATCH),
        *("--ro-bind", str(Path(sandbox_worker.__file__).resolve()), script),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"),
        *(sys.executable, "-I", script),
    ]


@cache
def _proc() -> tuple[str, ...]:
    """Returns the options that tell bubblewrap which /proc a worker gets. Usually bubblewrap mounts
    a new /proc for the worker. If other mounts hide parts of a container's /proc, the kernel does
    not allow bubblewrap to mount a new /proc. For example, NVIDIA's container hook creates mounts
    that hide parts of /proc. If bubblewrap cannot mount a new /proc, the worker gets the
    container's own /proc. The programs that a worker runs always see an empty /proc."""
    own = ("--proc", "/proc")
    bwrap = shutil.which("bwrap") or "bwrap"
    tried = subprocess.run(
        [bwrap, "--unshare-all", "--ro-bind", "/", "/", *own, "true"], capture_output=True
    )
    covered = tried.returncode and b"mount proc" in tried.stderr
    return ("--bind", "/proc", "/proc") if covered else own


_OF_PYTHON = ("bin", "lib", "lib64", "pyvenv.cfg")  # parts of its folder that a program needs
_VARIABLES = {
    "PATH": "/usr/bin:/bin",
    "HOME": sandbox_worker.SCRATCH,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def _system() -> Iterator[str]:
    for folder in map(Path, ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")):
        if folder.is_symlink():
            yield from ("--symlink", os.readlink(folder), str(folder))
        elif folder.is_dir():
            yield from ("--ro-bind", str(folder), str(folder))
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
    prefixes = {sys.prefix, sys.base_prefix, str(Path(os.path.realpath(sys.executable)).parents[1])}
    # not whole prefixes: a prefix may be the project's or the user's folder
    parts = {Path(prefix, part) for prefix in prefixes for part in _OF_PYTHON}
    parts |= {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    for part in sorted(parts):
        if part.is_relative_to("/usr") or not part.exists():
            continue
        if part.is_symlink():
            yield from ("--symlink", os.readlink(part), str(part))
        else:
            yield from ("--ro-bind", str(part), str(part))
