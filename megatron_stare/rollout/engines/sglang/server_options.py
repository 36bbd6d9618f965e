"""Defines the options with which a run starts its servers. The options determine SGLang's arguments
and the environment of the server processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_stare.process.network import LOOPBACK
from megatron_stare.rollout.engines.sglang.fp8_weights import MODEL_OVERRIDES
from megatron_stare.rollout.engines.sglang.protocol import NO_VERSION
from megatron_stare.rollout.engines.sglang.serve import NOT_KEPT

CPU_ATTENTION = "torch_native"  # the only attention backend without a kernel package
# Below the ephemeral port range, so that no other connection takes the port in the minutes while a
# server starts, and outside 22,000 to 29,999, from which SGLang draws ports for its ranks.
PORTS = (*range(20_000, 22_000), *range(30_000, 32_000))
# With --enable-dp-attention, SGLang also listens at ports up to this far above the rendezvous port:
# PortArgs.init_new and DP_ATTENTION_HANDSHAKE_PORT_DELTA in its server_args.py.
DERIVED = 13
KEPT_BYTES = 2**30  # freed memory that a CPU server may keep for reuse


def share_of_ports(number: int, processes: int, needed: int) -> Sequence[int]:
    """Returns the subset of PORTS from which one server process of a run draws its ports. A subset
    has at least `needed` ports, which are consecutive. Each server process needs its own subset,
    because a port is drawn minutes before the server process binds the port. If two processes drew
    from the same subset, both could draw the same port."""
    # an even number, so that no subset has ports of both ranges of PORTS
    shares = min(processes + processes % 2, len(PORTS) // needed)
    share, count = number % shares, len(PORTS)
    return PORTS[share * count // shares : (share + 1) * count // shares]


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server. If an option is None, SGLang chooses the value.

    `seeds`: True if the server honours sampling seeds; see docs/sglang.md for the guarantees.
    """

    python: str  # Python of SGLang's environment
    model_path: str
    device: str  # cpu or cuda
    dtype: str
    threads: int  # CPU threads per rank
    max_running: int  # maximum number of responses decoded together
    cache_tokens: int | None  # capacity of the key/value cache
    seeds: bool
    start_timeout_s: float
    kv_cache_dtype: str | None = None  # None: dtype of the activations
    quantization: str | None = None  # of the weights; None: they have the dtype of the activations
    host: str = LOOPBACK  # address on which the server listens
    address: str = LOOPBACK  # address at which clients reach it
    tensor: int = 1
    expert: int = 1
    data: int = 1  # groups of ranks with separate requests in attention
    nodes: int = 1  # number of nodes of the ranks
    node: int = 0  # index of the node whose process is started
    memory_fraction: float | None = None
    context_length: int | None = None
    attention_backend: str | None = None
    graph_batch_sizes: tuple[int, ...] = ()
    memory_saver: bool = False  # the server can release its memory
    names_experts: bool = False  # the server can return the experts of each token
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    ports: Sequence[int] = PORTS  # of this process alone; see `ports_needed`

    @property
    def http_ports(self) -> Sequence[int]:
        """Ports for HTTP. The rest of `ports` is for the server's ranks."""
        return self.ports[: len(self.ports) // (8 if self.data > 1 else 2)]

    @property
    def following(self) -> int:
        """Number of ports that the server's ranks use in addition to the rendezvous port. The
        numbers of these ports follow directly after the number of the rendezvous port."""
        return DERIVED if self.data > 1 else 0

    @property
    def meeting_ports(self) -> Sequence[int]:
        """Ports that can serve as the rendezvous port of the server's ranks. The ranks also use the
        next ports after the rendezvous port. The property `following` is the number of these
        further ports."""
        own = self.ports[len(self.http_ports) :]
        held = frozenset(own)
        return [port for port in own if port + self.following in held]

    @property
    def node_ranks(self) -> int:
        """Number of the server's ranks on one node."""
        return self.tensor // self.nodes

    def arguments(
        self, port: int, ranks_port: int | None = None, meeting: str | None = None
    ) -> list[str]:
        """Returns the arguments for sglang.launch_server.

        Args:
            ranks_port: rendezvous port of a single-node server's ranks; None: SGLang's choice.
            meeting: rendezvous host:port of a server whose ranks are on several nodes, or form
                groups with separate requests; on the server's first node.
        """
        meet = () if ranks_port is None else ("--nccl-port", str(ranks_port))
        if meeting is not None:
            meet = ("--dist-init-addr", meeting)
        return [*self.own_arguments(port), *meet, *self.flags]

    def own_arguments(self, port: int) -> tuple[str, ...]:
        """Returns the arguments that this project sets, without the user's flags."""
        on_cpu = self.device == "cpu"
        given: dict[str, object] = {
            "model-path": str(Path(self.model_path).resolve()),
            "host": self.host,
            "port": port,
            "dtype": self.dtype,
            "kv-cache-dtype": self.kv_cache_dtype,
            "quantization": self.quantization,
            "json-model-override-args": MODEL_OVERRIDES if self.quantization else None,
            "device": self.device,
            "tp-size": self.tensor,
            "ep-size": self.expert if self.expert > 1 else None,
            "dp-size": self.data if self.data > 1 else None,
            "nnodes": self.nodes if self.nodes > 1 else None,
            "node-rank": self.node if self.nodes > 1 else None,
            "attention-backend": self.attention_backend or (CPU_ATTENTION if on_cpu else None),
            # keeps experts as they are sent; SGLang's choice on B200 stores them in another order
            "moe-runner-backend": None if on_cpu else "triton",
            "sampling-backend": "pytorch" if on_cpu else None,
            "mem-fraction-static": 0.1 if on_cpu else self.memory_fraction,
            "context-length": self.context_length,
            "max-total-tokens": self.cache_tokens,
            "max-running-requests": self.max_running,
            "weight-version": NO_VERSION,
            "log-level-http": "warning",  # no log line per request
            # only the weight sync provides weights, so that a missing one is noticed
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
        # keeps separate names for shared experts, which a GPU server would otherwise stack after
        # the others
        words += [
            "--skip-tokenizer-init",
            "--skip-server-warmup",
            "--disable-shared-experts-fusion",
        ]
        switches = {
            # otherwise an idle server keeps a core busy, which a trainer on its node needs
            "--sleep-on-idle": on_cpu or self.memory_saver,
            "--enable-dp-attention": self.data > 1,  # the spelling that all supported releases take
            "--enable-deterministic-inference": self.seeds,
            "--enable-memory-saver": self.memory_saver and not on_cpu,
            "--enable-return-routed-experts": self.names_experts,
        }
        return (*words, *(flag for flag, on in switches.items() if on))

    def process_environment(self) -> dict[str, str]:
        """Returns the environment variables for the server's process. The server inherits the
        variables of the process that starts it, except the variables in NOT_KEPT. This method adds
        variables that every server needs, such as HF_HUB_OFFLINE. The variables in `environment`
        come from the run's settings and override all other variables."""
        kept = {name: value for name, value in os.environ.items() if name not in NOT_KEPT}
        # SGLang compiles kernels with the `ninja` beside its Python; a virtual environment's folder
        # is found through the link, not through the target
        folder = Path(shutil.which(self.python) or self.python).absolute().parent
        kept |= {
            "PATH": f"{folder}{os.pathsep}{kept.get('PATH', os.defpath)}",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "TOKENIZERS_PARALLELISM": "false",
            # with pages of 4 KB, allocating a bucket takes half of its transfer time
            "THP_MEM_ALLOC_ENABLE": "1",
        }
        if self.device == "cpu":
            # Keep a bucket's memory for the next one, which would otherwise be mapped and cleared
            # again.
            kept |= dict.fromkeys(
                ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(KEPT_BYTES)
            )
        if self.device == "cpu" and self.tensor > 1:
            # otherwise SGLang requires one NUMA node per rank; ranks may share a core
            cores, first = sorted(os.sched_getaffinity(0)), self.node * self.node_ranks
            ranks = range(first, first + self.node_ranks)
            kept["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
                str(cores[rank % len(cores)]) for rank in ranks
            )
        return kept | dict(self.environment)
