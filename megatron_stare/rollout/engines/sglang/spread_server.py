"""A server whose ranks lie on several nodes: one process a node, of which the first answers for
all.

The first node's worker holds the server and watches the others' parts: ranks that wait for one that
is gone wait on GPUs for ever, and nothing in the answers says which node it was.
"""

from __future__ import annotations

import contextlib
import threading

from megatron_stare.errors import UserError
from megatron_stare.process.network import free_port
from megatron_stare.rollout.engines.replicas import ReplicaPart, Site
from megatron_stare.rollout.engines.sglang.server import ServerProcess
from megatron_stare.rollout.engines.sglang.server_options import PORTS, ServerOptions

WATCH_EVERY_S = 2.0
ANSWER_S = 30.0  # that a part's worker is given to answer
SILENT = 3  # times that it may not, in a row


class SpreadServer(ServerProcess):
    """The first node's process, and the parts of the others. Ends as a whole, whichever part ends.

    Args:
        options: of the first node's.

    Raises:
        UserError: a part cannot be started; nothing is left behind.
    """

    def __init__(self, options: ServerOptions, site: Site) -> None:
        assert site.parts is not None
        own = PORTS if options.ports is None else options.ports[1::2]
        meeting = f"{site.address}:{free_port(site.address, own)}"
        super().__init__(options, meeting)
        self._parts, self._site, self._fallen = site.parts, site, ""  # how it ended
        self._closing = threading.Event()
        try:
            site.parts.call("start", meeting)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, daemon=True).start()

    def ended(self) -> str | None:
        """See ServerProcess; of every node on which it had ended when that was seen first."""
        with contextlib.suppress(UserError):  # of a worker that does not answer: the watch decides
            self._look()
        return self._fallen or None

    def _watch(self) -> None:
        """Ends the first node's process with any of the others', so that nobody waits for an
        answer."""
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
        # a reaped process's number may be another process's by now
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
        """The first that is seen is the reason: what else ends, ends of it."""
        if not self._closing.is_set():
            self._fallen = self._fallen or how

    def memory_mb(self) -> float:
        """See ServerProcess; of all nodes."""
        return super().memory_mb() + sum(self._parts.call("memory_mb"))

    def close(self) -> None:
        self._closing.set()
        super().close()
        # fails where workers are gone, whose processes ended with them
        with contextlib.suppress(Exception):
            self._parts.wait(self._parts.start("stop"), timeout_s=ANSWER_S)


class ServerPart(ReplicaPart):
    """The process of one of the other nodes; nobody is answered by it.

    Args:
        options: of its process.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._process: ServerProcess | None = None

    def start(self, meeting: str) -> None:
        self.stop()
        self._process = ServerProcess(self._options, meeting)

    def ended(self) -> str | None:
        """See ReplicaPart. SGLang's launcher does not look after ranks that are killed on any node
        but the first."""
        if self._process is None:
            return None
        return self._process.ended() or self._process.lost_rank()

    def memory_mb(self) -> float:
        return 0.0 if self._process is None else self._process.memory_mb()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()
