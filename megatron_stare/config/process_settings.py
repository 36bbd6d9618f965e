"""Chooses environment variables and ports for trainer ranks and servers, and checks the chosen
values for conflicts.

All members of an NCCL group must agree on NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE; otherwise the
group hangs or fails. If NCCL_CUMEM_ENABLE or NCCL_NVLS_ENABLE is not set, an SGLang server sets the
variable to 0 before the server's first collective. Some SGLang flags, such as --enable-symm-mem,
make a server set NCCL_CUMEM_ENABLE or NCCL_NVLS_ENABLE to 1, even if the variable already has
another value. For each of the two variables, the dict `AGREED` lists the SGLang flags that set the
variable to 1.
"""

from __future__ import annotations

import os

from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError

# variables that both ends of a group must agree on, and SGLang's flags that set them to 1
AGREED = {
    "NCCL_CUMEM_ENABLE": ("--enable-symm-mem",),
    "NCCL_NVLS_ENABLE": ("--enable-nccl-nvls", "--enable-symm-mem"),
}
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
WHERE = "runtime.env"
# variables that a run sets itself for each process, and how
OWNED = {
    "CUDA_VISIBLE_DEVICES": "every process is shown the GPUs it was placed on",
    "RANK": "ranks are numbered by where they were placed",
    "LOCAL_RANK": "every rank sees one GPU",
    "WORLD_SIZE": "the section parallel says it",
    "MASTER_ADDR": "ranks meet at the first rank's address, see runtime.interface",
    "MASTER_PORT": "ranks meet at a port of runtime.ports",
    "OMP_NUM_THREADS": "runtime.trainer_threads and rollout.threads say it",
    "MKL_NUM_THREADS": "runtime.trainer_threads and rollout.threads say it",
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        "performance.cuda_connections says it for ranks; SGLang sets 8 for its servers"
    ),
}
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def shared_environment(config: Config) -> dict[str, str]:
    """Returns the environment variables that are the same for all trainer ranks, engines and
    servers. Requires a configuration that passed `check_environment`."""
    shared = dict(config.runtime.env)
    if config.runtime.interface:
        shared |= dict.fromkeys(INTERFACES, config.runtime.interface)
    if config.sglang.sync == "distributed":
        shared |= {name: _of_servers(config, name) for name in AGREED}
    return shared


def _of_servers(config: Config, name: str) -> str:
    """Returns the value of the environment variable `name` in the run's servers. `name` must be a
    key of `AGREED`."""
    given = config.sglang.environment.get(name) or config.runtime.env.get(name)
    return given or ("1" if _forced(config, name) else "0")


def _forced(config: Config, name: str) -> str | None:
    """Returns the first flag in sglang.flags that sets the variable `name` to 1, or None if no flag
    does so."""
    return next((flag for flag in AGREED[name] if flag in config.sglang.flags), None)


def check_environment(config: Config) -> None:
    """Raises ConfigError if the configuration sets a variable that the run sets itself, or sets
    variables that conflict."""
    given, of_servers = config.runtime.env, config.sglang.environment
    for name, why in OWNED.items():
        if name in given:
            raise ConfigError(f"{name} must not be set: {why}", where=WHERE, fix="leave it out")
    if config.runtime.interface:
        for name in INTERFACES:
            if name in given:
                raise ConfigError(
                    f"runtime.interface sets {name} already",
                    where=WHERE,
                    fix="leave one of the two out",
                )
    _check_allocators(config)
    for name in AGREED:
        if name in given and of_servers.get(name, given[name]) != given[name]:
            raise ConfigError(
                f"{name} is {given[name]} for trainer ranks and {of_servers[name]} for servers"
                " (sglang.environment); an NCCL group with both values would hang",
                where=WHERE,
                fix="set it only here, for both",
            )
        if (flag := _forced(config, name)) and _of_servers(config, name) != "1":
            raise ConfigError(
                f"servers with {flag} always set {name}=1, but here it is"
                f" {_of_servers(config, name)}",
                where=WHERE if name in given else "sglang.environment",
                fix=f"set {name} to 1, or leave it out",
            )


def _check_allocators(config: Config) -> None:
    given = config.runtime.env
    for name in ALLOCATORS:
        if name in given and config.performance.cuda_allocator is not None:
            raise ConfigError(
                f"{name} and performance.cuda_allocator set the same thing",
                where=WHERE,
                fix="leave one of the two out",
            )
        for where, values in (
            (WHERE, given),
            ("sglang.environment", config.sglang.environment),
            ("shell", os.environ),
        ):
            if (
                config.sglang.colocated
                and "expandable_segments:true" in values.get(name, "").lower()
            ):
                raise ConfigError(
                    f"{name} has expandable segments, which neither the servers' memory saver nor"
                    " CUDA IPC can share, and servers are on the trainer's GPUs"
                    " (sglang.colocated)",
                    where=where,
                    fix="leave expandable_segments out, or give the servers GPUs of their own",
                )


def check_ports(config: Config, replicas: int, nodes: int = 1) -> None:
    """Raises ConfigError if runtime.ports is too small. All trainer ranks together get one share of
    the port range, and each node of each replica gets one share of about the same size. Every share
    must have at least `ports_needed` ports."""
    if not config.runtime.ports:
        return
    first, last = config.runtime.ports
    needed = ports_needed(config) * (replicas * nodes + 1)
    if last - first + 1 < needed:
        raise ConfigError(
            f"{last - first + 1} ports are too few for the trainer's ranks and {replicas} engines"
            f"{f' on {nodes} nodes each' if nodes > 1 else ''}",
            where="runtime.ports",
            fix=f"at least {needed}; more where other programs listen there",
        )


def ports_needed(config: Config) -> int:
    """Returns the number of ports that a replica process needs: one for HTTP, and one for the
    ranks' rendezvous. If `sglang.attention_data_parallel` is above 1, a replica process needs 2
    ports for HTTP and 14 ports for the ranks, because SGLang derives further ports from the
    rendezvous port."""
    return 16 if config.sglang.attention_data_parallel > 1 else 2


def port_share(config: Config, number: int, processes: int) -> range | None:
    """Returns the ports that the trainer ranks or one replica process may use, or None if no port
    range is set. With `number` 0, returns the ports of all trainer ranks together. With `number` n
    > 0, returns the ports of the replica process with index n - 1. A replica has one process per
    node. `processes` is the number of all replica processes."""
    return config.runtime.port_share(number, processes + 1)
