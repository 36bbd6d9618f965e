"""Runs a server whose ranks are on several nodes, with one server process on each node. The process
on the first node answers all requests.

The engine's worker runs on the first node, manages the server, and monitors the server processes on
the other nodes. If the server process on one node dies, the ranks on the other nodes wait on their
GPUs forever. Without the monitoring, no error would name the failed node.
"""

from __future__ import annotations

import contextlib
import threading

from megatron_stare.errors import UserError
from megatron_stare.rollout.engines.replicas import ReplicaPart, Site
from megatron_stare.rollout.engines.sglang.server import ServerProcess, meeting_at
from megatron_stare.rollout.engines.sglang.server_options import ServerOptions

WATCH_EVERY_S = 2.0
ANSWER_S = 30.0  # time limit for an answer of a part's worker
SILENT = 3  # consecutive failures to answer after which the part counts as lost


class SpreadServer(ServerProcess):
    """Manages all processes of a multi-node server from the server's first node. If the server
    process on any node ends, the whole server ends.

    Args:
        options: options of the first node's process.

    Raises:
        UserError: the server's process on another node cannot be started. No process of the server
            is left after this error.
    """

    def __init__(self, options: ServerOptions, site: Site) -> None:
        assert site.parts is not None
        meeting = meeting_at(site.address, options)
        super().__init__(options, meeting)
        # `_fallen` describes how it ended
        self._parts, self._site, self._fallen = site.parts, site, ""
        self._closing = threading.Event()
        try:
            site.parts.call("start", meeting)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, daemon=True).start()

    def ended(self) -> str | None:
        """See ServerProcess. Checks the processes on all nodes, and names every node whose process
        has ended. Later calls return the result of the first check that found an ended process."""
        with contextlib.suppress(UserError):  # a worker does not answer: `_watch` decides
            self._look()
        return self._fallen or None

    def _watch(self) -> None:
        """Kills the server process on the first node if the server process on another node ends, or
        if the other node's worker no longer answers. Callers of the server therefore do not wait
        forever for an answer."""
        silent = 0
        while not (self._closing.wait(WATCH_EVERY_S) or self._fallen):
            try:
                self._look()
                silent = 0
            except Exception as error:
                silent += 1
                if silent == SILENT:
                    self._fall(
                        f"lost the worker of its part on {' or '.join(self._site.others)}: {error}"
                    )
        # after reaping, another process may have this process's number
        if self._fallen and self._process.returncode is None:
            self.kill()

    def _look(self) -> None:
        parts = self._parts
        said = [super().ended(), *parts.wait(parts.start("ended"), timeout_s=ANSWER_S)]
        where = (self._site.address, *self._site.others)
        nodes = [
            f"on {where[node]} (node rank {node}) {how}"
            for node, how in enumerate(said)
            if how is not None
        ]
        if nodes:
            self._fall("\nand ".join(nodes))

    def _fall(self, how: str) -> None:
        """Records how the server ended. Keeps only the first report. When one process of the server
        ends, the other processes end because of it. Only the first report names the process that
        caused the end."""
        if not self._closing.is_set():
            self._fallen = self._fallen or how

    def memory_mb(self) -> float:
        """Returns the server's memory use (Pss), summed over all nodes, in units of 10^6 bytes."""
        return super().memory_mb() + sum(self._parts.call("memory_mb"))

    def close(self) -> None:
        self._closing.set()
        # these fail if workers are gone; their processes ended with them
        stopping = None
        with contextlib.suppress(Exception):
            stopping = self._parts.start("stop")
        super().close()
        with contextlib.suppress(Exception):
            self._parts.wait(stopping or [], timeout_s=ANSWER_S)


class ServerPart(ReplicaPart):
    """Manages one process of a multi-node server, on a node other than the first. Only the process
    on the first node answers requests.

    Args:
        options: options of the process.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._process: ServerProcess | None = None

    def start(self, meeting: str) -> None:
        self.stop()
        self._process = ServerProcess(self._options, meeting)

    def ended(self) -> str | None:
        """See ReplicaPart. Also looks for killed ranks, because SGLang's launcher notices killed
        ranks only on the first node."""
        if self._process is None:
            return None
        return self._process.ended() or self._process.lost_rank()

    def memory_mb(self) -> float:
        return 0.0 if self._process is None else self._process.memory_mb()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()
