"""Makes a run's engines, one a replica, of the name in the configuration (`rollout.engine`)."""

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
    """Memory of a server's rank on its GPU, bytes, and the setting that bounds its cache.

    token: keys and values of a token.
    setting: full name of what bounds the cache; a unit of it is `unit` bytes, of which `before` are
    not the cache's.
    digits: after the point, that a value of the setting has.
    """

    weights: int
    cache: int
    token: int
    setting: str
    unit: int
    before: int = 0
    digits: int = 0

    def value_for(self, room: int) -> float | int:
        """The setting with which the cache takes at most `room` bytes."""
        value = math.floor((room + self.before) / self.unit * 10**self.digits) / 10**self.digits
        return value if self.digits else int(value)


class ReplicaPart(ABC):
    """A replica's part on another of its nodes: a worker there, which the replica's own speaks
    to."""

    @abstractmethod
    def start(self, meeting: str) -> None:
        """Starts it, after ending one that was started before. Args: meeting: host:port where all
        parts meet."""

    @abstractmethod
    def ended(self) -> str | None:
        """Says how it ended, with its last words; None: it has not, or has not been started."""

    @abstractmethod
    def memory_mb(self) -> float:
        """Memory of its processes, 10^6 bytes."""

    @abstractmethod
    def stop(self) -> None:
        """Ends it. Stopping twice is allowed."""

    def close(self) -> None:
        """Ends it with its worker."""
        self.stop()


@dataclass(frozen=True)
class Site:
    """Place of a replica.

    parts: its parts on its other nodes, in the order of these; None: it is on one node.
    address: of its own node, where the run's other processes reach what it starts.
    others: addresses of its other nodes.
    """

    parts: Workers | None = None
    address: str = LOOPBACK
    others: tuple[str, ...] = ()


HERE = Site()  # on this machine, with all that speaks to it


@dataclass(frozen=True)
class Route:
    """The way of weights from ranks to replicas.

    listens: each replica listens on a port that ranks connect to.
    host: address that it listens on; None: its node's own.
    folder: through which they go; None: none.
    """

    listens: bool
    host: str | None = None
    folder: str | None = None


class Replica(ABC):
    """An engine on its way up. Making one starts what takes long, so that all of a run's replicas
    start together.

    Args:
        number: of the replica among those of the run.
        site: where it is.

    Settings of its own are keyword-only parameters that a subclass adds to these.

    Raises:
        UserError: it cannot be started.
    """

    @abstractmethod
    def __init__(self, config: Config, number: int, site: Site) -> None: ...

    @abstractmethod
    def engine(self) -> Engine:
        """The engine, DIRTY. Waits until it can take weights. Raises UserError where it does not
        come up."""

    @abstractmethod
    def close(self) -> None:
        """Ends what was started. Closing twice is allowed, and after the engine that it became."""

    @classmethod
    @abstractmethod
    def check(cls, config: Config, shape: ModelShape) -> None:
        """Raises ConfigError for what can be known to be wrong before anything is started."""

    @classmethod  # noqa: B027 - the ranks of most hand out buckets, which reach an engine anywhere
    def check_sync(cls, config: Config) -> None:
        """Raises ConfigError where the weights of a trainer's ranks could not reach it."""

    @classmethod
    def memory(cls, config: Config, shape: ModelShape, capacity: int) -> ServedMemory | None:
        """Forecasts what a server of it keeps on a GPU of `capacity` bytes; None where the run
        starts none."""
        return None

    @classmethod
    def route(cls, config: Config) -> Route | None:
        """Says by which way ranks send weights to replicas that a run starts; None: they hand
        buckets to workers."""
        return None

    @classmethod
    def count(cls, config: Config) -> int:
        """Number of replicas of a run."""
        return config.rollout.engines

    @classmethod
    def release(cls, config: Config) -> tuple[str | None, Sequence[str]] | None:
        """The release that servers would be started of, and those that do; None where a run starts
        none."""
        return None

    @classmethod
    def python(cls, config: Config) -> str | None:
        """Returns the Python of the environment that servers are started in; None if a run starts
        none.

        Raises:
            ConfigError: the environment is not known.
        """
        return None

    @classmethod
    def without_install(cls, config: Config) -> Config | None:
        """Reduces a configuration to what `check` can take where the software of its servers is not
        on this machine;
        None: it is, or no server is started here."""
        return None

    @classmethod
    def gpus(cls, config: Config) -> int:
        """Number of GPUs of a cluster that a replica needs; 0: it takes none."""
        return 0

    @classmethod
    def nodes(cls, config: Config) -> int:
        """Number of nodes they are on, in equal parts. Where there are several, a replica's Site
        has parts, which `part` has made."""
        return 1

    @classmethod
    def part(cls, config: Config, number: int, node: int, address: str) -> ReplicaPart:
        """Makes the part of replica `number` on its node `node`, from 1 on, whose address is given;
        not started yet."""
        raise RuntimeError(f"{cls.__name__} is on one node, and was asked for a part on another")


class InProcess(Replica):
    """An engine that is an object of its worker's process: ours, or a user's own, a subclass of
    Engine that is made with `model_path`, `max_batch`, `threads` and `dtype`, the trainer's, and
    its settings, which are its other keyword-only parameters. It computes on the CPU: it is shown
    no GPU."""

    def __init__(self, config: Config, number: int, kind: type[Engine]) -> None:
        made: Callable[..., Engine] = kind  # every subclass has a constructor of its own
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
        """Nothing was started."""

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
    """Finds the class that a name or dotted path stands for.

    Raises:
        ConfigError: there is no such class, or it is neither an Engine nor a Replica.
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
    """Makes replica `number` of a run. Raises UserError where it cannot be started."""
    kind = resolve_engine(config.rollout.engine)
    if issubclass(kind, Engine):
        return InProcess(config, number, kind)
    made: Callable[..., Replica] = kind
    return made(config, number, site, **_settings(config, kind))


def make_part(config: Config, number: int, node: int, address: str = LOOPBACK) -> ReplicaPart:
    """See Replica.part."""
    return _kind(config).part(config, number, node, address)


def check_engine(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError for an engine that does not exist, or could not run as it is
    configured."""
    _settings(config, resolve_engine(config.rollout.engine))
    _kind(config).check(config, shape)


def check_sync(config: Config) -> None:
    """See Replica.check_sync."""
    _kind(config).check_sync(config)


def without_install(config: Config) -> Config | None:
    """See Replica.without_install."""
    return _kind(config).without_install(config)


def replica_count(config: Config) -> int:
    """Number of replicas of a run."""
    return _kind(config).count(config)


def replica_gpus(config: Config) -> int:
    """Number of GPUs each replica of a run needs where the cluster has any; 0: it takes none."""
    return _kind(config).gpus(config)


def replica_nodes(config: Config) -> int:
    """Number of nodes each replica of a run is on."""
    return _kind(config).nodes(config)


def replica_route(config: Config) -> Route | None:
    """See Replica.route."""
    return _kind(config).route(config)


def served_memory(config: Config, shape: ModelShape, capacity: int) -> ServedMemory | None:
    """See Replica.memory."""
    return _kind(config).memory(config, shape, capacity)


def server_release(config: Config) -> tuple[str | None, Sequence[str]] | None:
    """See Replica.release."""
    return _kind(config).release(config)


def server_python(config: Config) -> str | None:
    """See Replica.python."""
    return _kind(config).python(config)


def _settings(config: Config, kind: type[Engine] | type[Replica]) -> dict[str, Any]:
    """The engine's own; of one in process the other keywords are the run's."""
    return settings_of(
        config.rollout.engine, kind, WHERE, ("model_path", "max_batch", "threads", "dtype")
    )


def _kind(config: Config) -> type[Replica]:
    kind = resolve_engine(config.rollout.engine)
    return InProcess if issubclass(kind, Engine) else kind
