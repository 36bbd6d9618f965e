"""How the servers of a run are started: SGLang's arguments and the environment of their
processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_stare.process.network import LOOPBACK
from megatron_stare.rollout.engines.sglang.protocol import NO_VERSION
from megatron_stare.rollout.engines.sglang.serve import NOT_KEPT

CPU_ATTENTION = "torch_native"  # the one attention backend that needs no kernels
# Below the ephemeral port range, so that no other connection takes the port in the minutes while a
# server starts.
PORTS = range(20_000, 32_000)
KEPT_BYTES = 2**30  # of memory that a CPU server has freed


@dataclass(frozen=True)
class ServerOptions:
    """How a server is started. What is None is left to SGLang.

    seeds: honour sampling seeds; see docs/sglang.md for what that promises.
    """

    python: str  # of the environment SGLang is installed in
    model_path: str
    device: str  # cpu or cuda
    dtype: str
    threads: int  # of the CPU, a rank
    max_running: int  # responses decoded together
    cache_tokens: int | None  # tokens the key/value cache holds
    seeds: bool
    start_timeout_s: float
    host: str = LOOPBACK  # that the server listens on
    address: str = LOOPBACK  # at which it is reached
    tensor: int = 1
    expert: int = 1
    data: int = 1  # groups of ranks that attend to requests of their own
    nodes: int = 1  # that the ranks lie on
    node: int = 0  # of them, the one that is started
    memory_fraction: float | None = None
    context_length: int | None = None
    attention_backend: str | None = None
    graph_batch_sizes: tuple[int, ...] = ()
    memory_saver: bool = False  # the server can give its memory back
    names_experts: bool = False  # it can say which experts a token went to
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    # ports for its HTTP and for its ranks' rendezvous; two at least. None: see PORTS
    ports: Sequence[int] | None = None

    @property
    def node_ranks(self) -> int:
        """Number of the server's ranks on one node."""
        return self.tensor // self.nodes

    def arguments(
        self, port: int, ranks_port: int | None = None, meeting: str | None = None
    ) -> list[str]:
        """Arguments for sglang.launch_server.

        Args:
            ranks_port: where the server's ranks meet on its one node; None: SGLang's choice.
            meeting: host:port on the first of its nodes where they meet instead.
        """
        meet = () if ranks_port is None else ("--nccl-port", str(ranks_port))
        if meeting is not None:
            meet = ("--dist-init-addr", meeting)
        return [*self.own_arguments(port), *meet, *self.flags]

    def own_arguments(self, port: int) -> tuple[str, ...]:
        """Arguments that are set here, without the user's flags."""
        on_cpu = self.device == "cpu"
        given: dict[str, object] = {
            "model-path": str(Path(self.model_path).resolve()),
            "host": self.host,
            "port": port,
            "dtype": self.dtype,
            "device": self.device,
            "tp-size": self.tensor,
            "ep-size": self.expert if self.expert > 1 else None,
            "dp-size": self.data if self.data > 1 else None,
            "nnodes": self.nodes if self.nodes > 1 else None,
            "node-rank": self.node if self.nodes > 1 else None,
            "attention-backend": self.attention_backend or (CPU_ATTENTION if on_cpu else None),
            "sampling-backend": "pytorch" if on_cpu else None,
            "mem-fraction-static": 0.1 if on_cpu else self.memory_fraction,
            "context-length": self.context_length,
            "max-total-tokens": self.cache_tokens,
            "max-running-requests": self.max_running,
            "weight-version": NO_VERSION,
            "log-level-http": "warning",  # not a line a request
            # weights come from the weight sync alone, so that a missing one cannot go unseen
            "load-format": "dummy",
        }
        words = [
            word
            for name, value in given.items()
            if value is not None
            for word in (f"--{name}", str(value))
        ]
        if self.graph_batch_sizes:
            words += ["--cuda-graph-bs-decode", *map(str, self.graph_batch_sizes)]
        # shared experts keep names of their own; on a GPU they would be stacked behind the others
        words += [
            "--skip-tokenizer-init",
            "--skip-server-warmup",
            "--disable-shared-experts-fusion",
        ]
        switches = {
            "--sleep-on-idle": on_cpu,  # else an idle server spins on a core
            "--enable-dp-attention": self.data > 1,  # the spelling that all supported releases take
            "--enable-deterministic-inference": self.seeds,
            "--enable-memory-saver": self.memory_saver and not on_cpu,
            "--enable-return-routed-experts": self.names_experts,
        }
        return (*words, *(flag for flag, on in switches.items() if on))

    def process_environment(self) -> dict[str, str]:
        """The starter's, but for what is its own; a run's settings have the last word."""
        kept = {name: value for name, value in os.environ.items() if name not in NOT_KEPT}
        kept |= {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "TOKENIZERS_PARALLELISM": "false",
            # a bucket of weights is new memory: in pages of 4 KB that costs half its time
            "THP_MEM_ALLOC_ENABLE": "1",
        }
        if self.device == "cpu":
            # A bucket's memory is kept for the next one: freeing it means to map and clear it
            # again.
            kept |= dict.fromkeys(
                ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(KEPT_BYTES)
            )
        if self.device == "cpu" and self.tensor > 1:
            # without it SGLang wants a NUMA node a rank; ranks may share a core
            cores, first = sorted(os.sched_getaffinity(0)), self.node * self.node_ranks
            ranks = range(first, first + self.node_ranks)
            kept["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
                str(cores[rank % len(cores)]) for rank in ranks
            )
        return kept | dict(self.environment)
