"""Makes an SGLang engine from a run's configuration. Starts a server, or attaches to a running
server. Makes the server's client and the weight sync."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_stare.config.process_settings import port_share, ports_needed, shared_environment
from megatron_stare.config.schema import Config, RuntimeConfig
from megatron_stare.errors import ConfigError
from megatron_stare.models.shape import ModelShape
from megatron_stare.process.interruption import run_on
from megatron_stare.process.network import EVERYWHERE, LOOPBACK
from megatron_stare.process.shipped import CHECKOUT
from megatron_stare.rollout.engines.replicas import HERE, Replica, Route, ServedMemory, Site
from megatron_stare.rollout.engines.sglang.client import SGLangClient
from megatron_stare.rollout.engines.sglang.fp8_weights import check_quantization, rounds
from megatron_stare.rollout.engines.sglang.place import Place, seen_here
from megatron_stare.rollout.engines.sglang.protocol import SUPPORTED_VERSIONS
from megatron_stare.rollout.engines.sglang.server import ServerProcess
from megatron_stare.rollout.engines.sglang.server_checks import (
    API_KEY_VARIABLE,
    check_attached,
    check_lengths,
    check_started,
    check_sync,
    server_device,
)
from megatron_stare.rollout.engines.sglang.server_engine import SGLangEngine
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.server_options import ServerOptions, share_of_ports
from megatron_stare.rollout.engines.sglang.spread_server import ServerPart, SpreadServer
from megatron_stare.rollout.engines.sglang.sync import DTYPES
from megatron_stare.rollout.engines.sglang.target import ServersTarget, make_sync
from megatron_stare.weights.files.check import expected

ENVIRONMENT = CHECKOUT / ".venv-sglang" if CHECKOUT else None  # made by scripts/setup_sglang.sh
PYTHON_VARIABLE = "MEGATRON_STARE_SGLANG_PYTHON"
ASSUMED_FRACTION = 0.9  # assumed share of a GPU if SGLang chooses it
CPU_CACHE_TOKENS = 20_000  # default, because a CPU server has no memory share to fill


class SGLangReplica(Replica):
    """One server of a run; see Replica. The run starts the server or attaches to a running
    server."""

    def __init__(self, config: Config, number: int, site: Site = HERE) -> None:
        self._config = config
        self._process: ServerProcess | None = None
        self._place = Place()
        if config.sglang.urls:
            url, key = config.sglang.urls[number], os.environ.get(API_KEY_VARIABLE)
        else:
            options = server_options(config, number, address=site.address)
            self._process = (
                ServerProcess(options) if site.parts is None else SpreadServer(options, site)
            )
            self._place = replace(seen_here(), others=site.others)
            url, key = self._process.url, self._process.api_key
        self._client = SGLangClient(
            url,
            key,
            config.runtime.timeout_s,
            response_s=config.faults.requests.request_limit(config.runtime.timeout_s),
            router=config.sglang.router,
        )

    def engine(self) -> SGLangEngine:
        """See Replica. Waits until the server answers. If the server does not answer or cannot be
        used, `engine` ends everything that this replica started and raises an error."""
        config, loop = self._config, asyncio.new_event_loop()
        target = servers_target(config)
        with contextlib.ExitStack() as stack:
            stack.callback(loop.close)
            stack.callback(self.close)
            stack.callback(run_on, loop, self._client.close)
            if self._process is not None:
                self._process.wait_ready(self._client, partial(run_on, loop))
            engine = SGLangEngine(
                self._client,
                make_sync(
                    config.sglang.sync,
                    [self._client],
                    config.model.path,
                    target.broadcast_s,
                    places=[self._place],
                ),
                config.model.path,
                served_dtype(config),
                config.rollout.max_batch,
                loop,
                self._process,
                server_flags(config),
                target,
                self._place,
                config.faults.engines.probe_s,
                sum(config.expected_lengths),
                config.sglang.kv_cache_dtype,
                config.sglang.quantization,
            )
            stack.pop_all()  # from here on the engine owns these
            return engine

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    @classmethod
    def check(cls, config: Config, shape: ModelShape) -> None:
        check_servers(config, shape)

    @classmethod
    def check_sync(cls, config: Config) -> None:
        check_sync(config)

    @classmethod
    def memory(cls, config: Config, shape: ModelShape, capacity: int) -> ServedMemory | None:
        """See Replica. Returns None if the run attaches to running servers, or if the servers run
        on the CPU."""
        if config.sglang.urls or config.sglang.device == "cpu":
            return None
        return server_memory(config, shape, capacity)

    @classmethod
    def route(cls, config: Config) -> Route | None:
        """See Replica. Returns None if the run attaches to running servers."""
        asked = config.sglang
        if asked.urls:
            return None
        return Route(
            listens=True,
            host=asked.host,
            folder=asked.sync_folder if asked.sync == "disk" else None,
        )

    @classmethod
    def count(cls, config: Config) -> int:
        return len(config.sglang.urls) or config.rollout.engines

    @classmethod
    def python(cls, config: Config) -> str | None:
        return None if config.sglang.urls else sglang_python(config)

    @classmethod
    def release(cls, config: Config) -> tuple[str | None, Sequence[str]] | None:
        if config.sglang.urls:
            return None
        asked = "from importlib.metadata import version; print(version('sglang'))"
        try:
            done = subprocess.run(
                [sglang_python(config), "-c", asked],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired, ConfigError):  # a wheel has no checkout
            return None, SUPPORTED_VERSIONS
        return (done.stdout.strip() if done.returncode == 0 else None), SUPPORTED_VERSIONS

    @classmethod
    def without_install(cls, config: Config) -> Config | None:
        """See Replica. The returned configuration contains none of the user's flags
        (`sglang.flags`), because only SGLang's own parser can check these flags."""
        try:
            if config.sglang.urls or Path(sglang_python(config)).exists():
                return None
        except ConfigError:  # a wheel has no checkout
            pass
        sglang = config.sglang.model_copy(update={"python": sys.executable, "flags": []})
        return config.model_copy(update={"sglang": sglang})

    @classmethod
    def gpus(cls, config: Config) -> int:
        """See Replica. Returns 0 if the run attaches to running servers, or if the servers run on
        the CPU. If GPUs are simulated (runtime.gpu_resource), a CPU server counts as a GPU
        server."""
        simulated = (
            config.runtime.gpu_resource != RuntimeConfig.model_fields["gpu_resource"].default
        )
        none = config.sglang.urls or (config.sglang.device == "cpu" and not simulated)
        return 0 if none else config.sglang.tensor_parallel

    @classmethod
    def nodes(cls, config: Config) -> int:
        return 1 if config.sglang.urls else config.sglang.nodes

    @classmethod
    def part(cls, config: Config, number: int, node: int, address: str = LOOPBACK) -> ServerPart:
        return ServerPart(server_options(config, number, node, address))


def check_servers(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError for configuration errors that can be found without starting a server."""
    if config.sglang.kv_cache_dtype and shape.latent:
        raise ConfigError(
            "in 8 bits, the cache of latent attention has a layout of its own, which was never"
            " compared with the trainer",
            where="sglang.kv_cache_dtype",
            fix="set it to null",
        )
    if config.sglang.quantization:
        check_quantization(shape, server_layout(config), served_dtype(config))
        if config.sglang.kv_cache_dtype and config.sglang.colocated:
            raise ConfigError(
                "with 8-bit weights, a server keeps scales of its 8-bit cache among its weights."
                " With sglang.colocated, it loses them in every step, and no sync brings them back",
                where="sglang.kv_cache_dtype",
                fix="set it or sglang.quantization to null",
            )
    if config.sglang.urls:
        check_lengths(config, shape)
        check_attached(config)
        return
    if config.sglang.router is not None:
        raise ConfigError(
            "a router can only serve running servers (sglang.urls): servers that the run starts"
            " have keys of their own, which no router knows",
            where="sglang.router",
            fix="name the servers behind it in sglang.urls, or leave it out",
        )
    options = server_options(config)
    check_lengths(config, shape, options.context_length, options.cache_tokens)
    check_started(config, shape, options)


def server_flags(config: Config) -> dict[str, str]:
    """Returns a dict of the flags with which servers must have been started. Each key is a flag,
    and each value is the name of the enabled setting that needs the flag, such as
    `sglang.seeds`."""
    wanted = {
        "enable_deterministic_inference": ("sglang.seeds", config.sglang.seeds),
        "enable_memory_saver": ("sglang.colocated", config.sglang.colocated),
        "enable_return_routed_experts": ("moe.routing_replay", config.moe.routing_replay),
    }
    return {flag: setting for flag, (setting, asked) in wanted.items() if asked}


def sglang_python(config: Config) -> str:
    """Returns the Python interpreter of SGLang's environment. The setting `sglang.python` or the
    environment variable MEGATRON_STARE_SGLANG_PYTHON names the interpreter. By default, the
    function returns the interpreter in the checkout's folder .venv-sglang.

    Raises:
        ConfigError: no source names an interpreter. A package that was installed from a wheel has
            no checkout.
    """
    if python := config.sglang.python or os.environ.get(PYTHON_VARIABLE):
        return python
    if ENVIRONMENT is None:
        raise ConfigError(
            "this package was installed from a wheel, so it does not know where SGLang is"
            " installed",
            where="sglang.python",
            fix=(
                f"name the Python of SGLang's environment here or in {PYTHON_VARIABLE}; in a"
                " checkout, bash scripts/setup_sglang.sh builds one in .venv-sglang"
            ),
        )
    return str(ENVIRONMENT / "bin" / "python")


def server_options(
    config: Config, number: int = 0, node: int = 0, address: str = LOOPBACK
) -> ServerOptions:
    """Returns the options for one process of a server. `number` is the index of the server in the
    run. `node` is the index of the process's node among the server's nodes. `address` is the
    network address of this node."""
    asked, device = config.sglang, server_device(config)
    process, processes = number * asked.nodes + node, config.rollout.engines * asked.nodes
    return ServerOptions(
        python=sglang_python(config),
        model_path=config.model.path,
        device=device,
        dtype=served_dtype(config),
        threads=config.rollout.threads,
        max_running=config.rollout.max_batch,
        cache_tokens=asked.cache_tokens or (CPU_CACHE_TOKENS if device == "cpu" else None),
        seeds=asked.seeds,
        start_timeout_s=asked.start_timeout_s,
        kv_cache_dtype=asked.kv_cache_dtype,
        quantization=asked.quantization,
        host=asked.host or address,
        address=address if asked.host in (None, EVERYWHERE) else asked.host,
        tensor=asked.tensor_parallel,
        expert=asked.expert_parallel,
        data=asked.attention_data_parallel,
        nodes=asked.nodes,
        node=node,
        memory_fraction=asked.memory_fraction,
        context_length=asked.context_length,
        attention_backend=asked.attention_backend,
        graph_batch_sizes=tuple(asked.cuda_graph_batch_sizes),
        memory_saver=asked.colocated,
        names_experts=config.moe.routing_replay,
        flags=tuple(asked.flags),
        environment={**shared_environment(config), **asked.environment},
        ports=port_share(config, 1 + process, processes)
        or share_of_ports(process, processes, ports_needed(config)),
    )


def servers_target(config: Config) -> ServersTarget:
    """Returns the target of the run's weight syncs. The returned target does not list any servers
    yet."""
    return ServersTarget(
        config.sglang.sync,
        config.runtime.timeout_s,
        config.model.path,
        config.sglang.sync_folder,
        config.sglang.colocated,
        collective_s=config.faults.requests.collective_limit(config.runtime.timeout_s),
    )


def served_dtype(config: Config) -> str:
    """Returns the dtype in which servers compute, and to which they cast weights."""
    return config.sglang.dtype or config.model.dtype


def server_layout(config: Config) -> ServerLayout:
    """Returns the layout of the servers that a configuration asks for. If the run attaches to
    running servers, the layout's settings must have their default values, and the servers are
    assumed to run on GPUs."""
    asked = config.sglang
    return ServerLayout(
        "cuda" if asked.urls else server_device(config),
        asked.tensor_parallel,
        asked.expert_parallel,
        asked.attention_data_parallel,
        eight_bits=asked.quantization is not None,
    )


def server_memory(config: Config, shape: ModelShape, capacity: int) -> ServedMemory:
    """Predicts how much memory one rank of a server uses on a GPU of `capacity` bytes. The rank
    stores its shard of the weights and its part of the cache. The server uses at most the fraction
    `sglang.memory_fraction` of the GPU's memory. The cache takes the memory that the weights leave
    free within `sglang.memory_fraction`. If `sglang.cache_tokens` is set, the cache takes at most
    the memory for `sglang.cache_tokens` tokens."""
    asked, size = config.sglang, DTYPES[served_dtype(config)].itemsize
    layout = server_layout(config)
    weights = 0
    for name, sizes in expected(shape).items():
        # the scales of 8-bit weights, 2 in 10,000 bytes, are not counted
        stored = 1 if asked.quantization and rounds(name, shape) else size
        weights += layout.elements(name, sizes, shape) * stored
    # with fewer heads than ranks, several ranks share a head
    heads = max(-(-shape.kv_heads // layout.group), 1)
    # every rank holds the full latent
    token = shape.layers * (shape.cached if shape.latent else 2 * heads * shape.head_dim)
    token *= 1 if asked.kv_cache_dtype else size
    room = max(int((asked.memory_fraction or ASSUMED_FRACTION) * capacity) - weights, 0)
    if asked.cache_tokens is not None and asked.cache_tokens * token <= room:
        return ServedMemory(
            weights, asked.cache_tokens * token, token, "sglang.cache_tokens", token
        )
    return ServedMemory(
        weights, room, token, "sglang.memory_fraction", capacity, before=weights, digits=2
    )
