"""Starts SGLang servers on this machine, waits until they answer, and ends them with everything they left behind.

Each is a process group of its own. It runs serve.py in SGLang's environment, listens on loopback with a key drawn for
the run, and writes its output to a log whose end is quoted when it dies.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_stare.rollout.sglang.client import ServerLostError, SGLangClient
from megatron_stare.rollout.sglang.protocol import NO_VERSION, SGLangError
from megatron_stare.rollout.sglang.serve import API_KEY_VARIABLE, SCRATCH_VARIABLE

LOOPBACK = "127.0.0.1"
PROBE_EVERY_S = 0.5
PORTS = range(20_000, 32_000)
LEAVE_S = 5.0  # from the order to go until the process group is killed
LOG_TAIL_BYTES = 3000


@dataclass(frozen=True)
class ServerOptions:
    """How a server is started.

    seeds: honour sampling seeds; see docs/sglang.md for what that promises.
    """

    python: str  # of the environment SGLang is installed in
    model_path: str
    dtype: str
    threads: int
    max_running: int  # responses decoded together
    cache_tokens: int  # tokens the key/value cache holds
    seeds: bool
    start_timeout_s: float

    def arguments(self, port: int) -> list[str]:
        """Of sglang.launch_server."""
        given: dict[str, object] = {
            "model-path": str(Path(self.model_path).resolve()),
            "host": LOOPBACK,
            "port": port,
            "dtype": self.dtype,
            "device": "cpu",
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
            "mem-fraction-static": 0.1,
            "max-total-tokens": self.cache_tokens,
            "max-running-requests": self.max_running,
            "weight-version": NO_VERSION,
            "log-level-http": "warning",  # not a line a request
            "load-format": "dummy",  # weights come from the weight sync alone, so that a lost one cannot go unseen
        }
        flags = ["--sleep-on-idle", "--skip-tokenizer-init", "--skip-server-warmup"]
        if self.seeds:
            flags.append("--enable-deterministic-inference")
        return [*(word for name, value in given.items() for word in (f"--{name}", str(value))), *flags]


class ServerProcess:
    """A server started here. Ends with `close`, or with this process, however that ends."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self.api_key = secrets.token_hex(16)
        port = free_port()
        self.url = f"http://{LOOPBACK}:{port}"
        self._scratch = Path(tempfile.mkdtemp(prefix="megatron-stare-sglang-"))
        self._log = self._scratch / "server.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [options.python, "-m", "megatron_stare.rollout.sglang.serve", *options.arguments(port)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._scratch,
                env=self._environment(),
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        # the trainer's paths lead to packages of its own environment
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "SGLANG_USE_CPU_ENGINE")}
        threads = str(self._options.threads)
        return kept | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "THP_MEM_ALLOC_ENABLE": "1",  # a bucket of weights is new memory: in pages of 4 KB that costs half its time
            SCRATCH_VARIABLE: str(self._scratch),
            API_KEY_VARIABLE: self.api_key,
        }

    @property
    def process_group(self) -> int:
        return self._process.pid

    def wait_ready(self, client: SGLangClient, run: object) -> None:
        """Polls /model_info until the server answers.

        Args:
            run: runs a coroutine of the client to its end (the engine's loop).

        Raises:
            SGLangError: it ended, or did not answer within the time limit.
        """
        deadline = time.monotonic() + self._options.start_timeout_s
        while True:
            self.require_alive()
            with contextlib.suppress(ServerLostError):
                run(client.model_info())  # type: ignore[operator]
                return
            if time.monotonic() > deadline:
                raise SGLangError(
                    f"the server did not answer within {self._options.start_timeout_s:.0f} s\n{self.last_words()}",
                    where="sglang.start_timeout_s",
                )
            time.sleep(PROBE_EVERY_S)

    def memory_mb(self) -> float:
        """Pss of the server's processes, 10^6 bytes; processes that end meanwhile count as 0."""
        total = 0
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._process.pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss
        return total / 1e6

    def require_alive(self) -> None:
        """Raises SGLangError with the end of its log where the server has ended."""
        if (code := self._process.poll()) is not None:
            raise SGLangError(f"the server ended with {code}; its last words:\n{self.last_words()}", where=self.url)

    def last_words(self) -> str:
        """The end of the server's log, which names its key, without it."""
        with contextlib.suppress(OSError):
            text = self._log.read_bytes().decode(errors="replace")
            return text.replace(self.api_key, "<key>")[-LOG_TAIL_BYTES:]
        return ""

    def close(self) -> None:
        """Ends the server's process group and removes what it wrote. Closing twice is allowed."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()  # the order to go, see serve.py
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process_group, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


def free_port() -> int:
    """A TCP port of loopback that is free now.

    Below the range the kernel hands out by itself: minutes pass until the server listens, in which another program's
    connection would take it.
    """
    for _ in range(100):
        port = PORTS.start + secrets.randbelow(len(PORTS))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise SGLangError(f"no free port between {PORTS.start} and {PORTS.stop}", fix="end programs that listen there")
