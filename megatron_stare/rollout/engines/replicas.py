"""Makes the engines of a run, one per replica. The setting `rollout.engine` names the kind of
engine."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.models.shape import ModelShape
from megatron_stare.process.network import LOOPBACK
from megatron_stare.process.workers import Workers
from megatron_stare.registry import Extension, resolve, settings_of
from megatron_stare.rollout.engines.engine import Engine

ENGINES = {
    "local": "megatron_stare.rollout.engines.local.LocalEngine",
    "sglang": "megatron_stare.rollout.engines.sglang.replica.SGLangReplica",
}
WHERE = "rollout.engine"


@dataclass(frozen=True)
class ServedMemory:
    """Memory, in bytes, that one rank of a server uses on its GPU, and the setting that limits the
    size of the key/value cache.

    `token`: size, in bytes, of one token's keys and values in the cache.
    `setting`: full name of the setting that limits the cache, such as sglang.cache_tokens.
    `unit`: number of bytes in one unit of the setting.
    `before`: number of bytes, besides the cache, that count towards the setting's limit. The
        setting sglang.memory_fraction limits the sum of weights and cache. For
        sglang.memory_fraction, `before` is therefore the size of the weights. The setting
        sglang.cache_tokens limits no memory other than the cache. For sglang.cache_tokens, `before`
        is therefore 0.
    `digits`: number of decimal places of the setting's value.
    """

    weights: int
    cache: int
    token: int
    setting: str
    unit: int
    before: int = 0
    digits: int = 0

    def value_for(self, room: int) -> float | int:
        """Returns the largest value of `setting` with which the cache takes at most `room`
        bytes."""
        value = math.floor((room + self.before) / self.unit * 10**self.digits) / 10**self.digits
        return value if self.digits else int(value)


class ReplicaPart(ABC):
    """Part of a multi-node replica. The replica has one part on each of its nodes except the first
    node. Each part belongs to a separate worker on the part's node. The replica's own worker runs
    on the first node and controls all parts."""

    @abstractmethod
    def start(self, meeting: str) -> None:
        """Starts the part, or restarts the part if it was started before.

        Args:
            meeting: host:port of the rendezvous for all parts of the replica.
        """

    @abstractmethod
    def ended(self) -> str | None:
        """Describes how the processes of this part of the replica ended, and quotes the end of
        their output. Returns None if the processes still run or were never started."""

    @abstractmethod
    def memory_mb(self) -> float:
        """Returns the memory use of the part's processes, in units of 10^6 bytes."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the part. Idempotent."""

    def close(self) -> None:
        """Ends the part. The part's worker calls `close` before the worker itself ends."""
        self.stop()


@dataclass(frozen=True)
class Site:
    """Nodes of a replica.

    `parts`: workers of the replica's parts, one worker for each node except the first, in node
        order; None if the replica is on one node.
    `address`: address of the replica's first node, at which the run's other processes reach the
        replica.
    `others`: addresses of the replica's other nodes, in node order.
    """

    parts: Workers | None = None
    address: str = LOOPBACK
    others: tuple[str, ...] = ()


HERE = Site()  # on this machine, like all processes that talk to it


@dataclass(frozen=True)
class Route:
    """Describes how the trainer's ranks send weights to the replicas.

    `listens`: True if each replica listens on a port to which ranks connect.
    `host`: address on which the replica listens; None: the address of the replica's node.
    `folder`: folder through which the weights are passed; None: no folder is used.
    """

    listens: bool
    host: str | None = None
    folder: str | None = None


class Replica(ABC):
    """An engine that is starting. The constructor starts everything that takes long to start, such
    as a server, and returns without waiting. All replicas of a run therefore start in parallel.

    Args:
        number: index of the replica in the run.
        site: nodes of the replica.

    A subclass adds its own settings as keyword-only parameters.

    Raises:
        UserError: the replica cannot be started.
    """

    @abstractmethod
    def __init__(self, config: Config, number: int, site: Site) -> None: ...

    @abstractmethod
    def engine(self) -> Engine:
        """Waits until the engine can receive weights, and returns the engine. The state of the
        returned engine is EngineState.DIRTY, because the engine has not received any weights yet.
        Raises UserError if the engine does not start."""

    @abstractmethod
    def close(self) -> None:
        """Ends everything that the constructor started. `close` can be called more than once, and
        also after the engine itself was closed."""

    @classmethod
    @abstractmethod
    def check(cls, config: Config, shape: ModelShape) -> None:
        """Raises ConfigError for configuration errors that can be found without starting
        anything."""

    @classmethod  # noqa: B027 - most engines receive buckets, which reach any node
    def check_sync(cls, config: Config) -> None:
        """Raises ConfigError if the trainer's ranks cannot send their weights to the replica."""

    @classmethod
    def memory(cls, config: Config, shape: ModelShape, capacity: int) -> ServedMemory | None:
        """Predicts the memory that a server needs on a GPU of `capacity` bytes. Returns None if the
        run starts no server."""
        return None

    @classmethod
    def route(cls, config: Config) -> Route | None:
        """Returns a Route, which describes how the trainer's ranks send weights to the replicas
        that the run starts. Returns None if the engines' workers receive the weights in buckets."""
        return None

    @classmethod
    def count(cls, config: Config) -> int:
        """Returns the number of replicas of a run."""
        return config.rollout.engines

    @classmethod
    def release(cls, config: Config) -> tuple[str | None, Sequence[str]] | None:
        """Returns the installed release and the supported releases of the server software. Returns
        None if the run starts no server."""
        return None

    @classmethod
    def python(cls, config: Config) -> str | None:
        """Returns the path of the Python interpreter that runs the servers. Returns None if the run
        starts no server.

        Raises:
            ConfigError: the environment of the servers is not known.
        """
        return None

    @classmethod
    def without_install(cls, config: Config) -> Config | None:
        """If the server software is not installed on this machine, this method returns a copy of
        the configuration without the settings that only the server software can check. Returns None
        if the server software is installed, or if the run starts no server."""
        return None

    @classmethod
    def gpus(cls, config: Config) -> int:
        """Returns the number of GPUs that each replica needs, or 0 if replicas need no GPU."""
        return 0

    @classmethod
    def nodes(cls, config: Config) -> int:
        """Returns the number of nodes over which a replica's GPUs are spread evenly. The method
        `part` makes the parts of a multi-node replica, one part for each node except the first. The
        field `Site.parts` contains the workers that run the parts of a replica."""
        return 1

    @classmethod
    def part(cls, config: Config, number: int, node: int, address: str) -> ReplicaPart:
        """Makes one part of a multi-node replica, but does not start the part.

        Args:
            number: index of the replica.
            node: index of the part's node. The index counts the nodes of this replica only. The
                index is at least 1, because the replica's own worker runs on node 0.
            address: address of the part's node.
        """
        raise RuntimeError(f"{cls.__name__} is on one node, and was asked for a part on another")


class InProcess(Replica):
    """Engine that runs in its worker's own process: LocalEngine or a user's subclass of Engine. The
    run calls the engine's class with `model_path`, `max_batch`, `threads`, the trainer's `dtype`,
    and the engine's settings. All keyword-only parameters of the class except `model_path`,
    `max_batch`, `threads` and `dtype` are settings of the engine. The engine computes on the CPU
    and sees no GPU."""

    def __init__(self, config: Config, number: int, kind: type[Engine]) -> None:
        made: Callable[..., Engine] = kind  # the constructors of subclasses differ
        self._made = partial(
            made,
            model_path=config.model.path,
            max_batch=config.rollout.max_batch,
            threads=config.rollout.threads,
            dtype=config.model.dtype,
            **_settings(config, kind),
        )

    def engine(self) -> Engine:
        return self._made()

    def close(self) -> None:
        """Does nothing, because the constructor started nothing."""

    @classmethod
    def check(cls, config: Config, shape: ModelShape) -> None:
        if config.moe.routing_replay:
            raise ConfigError(
                "this engine computes as the trainer does and chooses the same experts, so it"
                " does not name them",
                where="moe.routing_replay",
                fix="use rollout.engine=sglang, or set it to false",
            )


def resolve_engine(engine: Extension | str) -> type[Engine] | type[Replica]:
    """Returns the engine or replica class that has the given name or dotted path.

    Raises:
        ConfigError: the class does not exist, or is neither an Engine nor a Replica.
    """
    name = Extension.read(engine).name
    kind = resolve(name, ENGINES, WHERE)
    if not (isinstance(kind, type) and issubclass(kind, (Engine, Replica))):
        raise ConfigError(
            f"{name!r} is not a subclass of megatron_stare.rollout.engines.engine.Engine",
            where=WHERE,
        )
    return kind


def make_replica(config: Config, number: int, site: Site) -> Replica:
    """Makes the engine replica with index `number` of a run. Raises UserError if a process of the
    replica, such as a server, cannot be started."""
    kind = resolve_engine(config.rollout.engine)
    if issubclass(kind, Engine):
        return InProcess(config, number, kind)
    made: Callable[..., Replica] = kind
    return made(config, number, site, **_settings(config, kind))


def make_part(config: Config, number: int, node: int, address: str = LOOPBACK) -> ReplicaPart:
    """See Replica.part."""
    return _kind(config).part(config, number, node, address)


def check_engine(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError if the configured engine does not exist, or cannot run with this
    configuration."""
    _settings(config, resolve_engine(config.rollout.engine))
    _kind(config).check(config, shape)


def check_sync(config: Config) -> None:
    """See Replica.check_sync."""
    _kind(config).check_sync(config)


def without_install(config: Config) -> Config | None:
    """See Replica.without_install."""
    return _kind(config).without_install(config)


def replica_count(config: Config) -> int:
    """Returns the number of engine replicas of a run. A run of supervised training samples no
    responses, and has 0 replicas."""
    return 0 if config.supervised else _kind(config).count(config)


def replica_gpus(config: Config) -> int:
    """Returns the number of GPUs that each replica of a run needs, or 0 if replicas need no GPU."""
    return _kind(config).gpus(config)


def replica_nodes(config: Config) -> int:
    """Returns the number of nodes that each replica of a run spans."""
    return _kind(config).nodes(config)


def replica_route(config: Config) -> Route | None:
    """See Replica.route."""
    if not replica_count(config):
        return None
    return _kind(config).route(config)


def served_memory(config: Config, shape: ModelShape, capacity: int) -> ServedMemory | None:
    """See Replica.memory."""
    if not replica_count(config):
        return None
    return _kind(config).memory(config, shape, capacity)


def server_release(config: Config) -> tuple[str | None, Sequence[str]] | None:
    """See Replica.release."""
    return _kind(config).release(config)


def server_python(config: Config) -> str | None:
    """See Replica.python."""
    return _kind(config).python(config)


def _settings(config: Config, kind: type[Engine] | type[Replica]) -> dict[str, Any]:
    """Returns the engine's own settings. The returned settings do not include `model_path`,
    `max_batch`, `threads` and `dtype`, because the run itself passes these arguments to an
    in-process engine."""
    return settings_of(
        config.rollout.engine, kind, WHERE, ("model_path", "max_batch", "threads", "dtype")
    )


def _kind(config: Config) -> type[Replica]:
    kind = resolve_engine(config.rollout.engine)
    return InProcess if issubclass(kind, Engine) else kind
