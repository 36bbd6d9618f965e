"""Places every trainer rank and every engine on a Ray cluster, each in its own actor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megatron_stare.cluster.colocation import in_order
from megatron_stare.cluster.placed import (
    Spot,
    check_ranks,
    check_replicas,
    rank_order,
    shown,
    table,
)
from megatron_stare.cluster.ray import (
    GPU,
    PROBE_S,
    VISIBLE,
    RayWorkers,
    Reservation,
    cluster_nodes,
    find_lost,
    leave_ray,
    server_address,
    start_actors,
    start_ray,
)
from megatron_stare.cluster.routes import require_folder, require_reach
from megatron_stare.cluster.trainer_group import TrainerGroup, plan_rules
from megatron_stare.config.performance import environment
from megatron_stare.config.process_settings import port_share, shared_environment
from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.planning.placement import (
    Awaited,
    Demand,
    PlacementError,
    Plan,
    check_possible,
    plan,
)
from megatron_stare.process.interruption import pause, uninterrupted
from megatron_stare.process.signs_of_life import counted, unsaid
from megatron_stare.process.workers import Handle, WorkerLostError, Workers
from megatron_stare.rollout.engines.engine_worker import EngineWorker
from megatron_stare.rollout.engines.replicas import (
    ReplicaPart,
    Site,
    make_part,
    replica_count,
    replica_gpus,
    replica_nodes,
    replica_route,
)
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.fleet.health import NO_RESTARTS, RestartRule
from megatron_stare.rollout.fleet.retries import RequestRule


def hosted_engine(
    config: Config, number: int, parts: Workers | None = None, others: tuple[str, ...] = ()
) -> EngineWorker:
    """Makes a replica's worker inside an actor. The worker's server listens at the address of the
    actor's node."""
    return EngineWorker(config, number, Site(parts, server_address(config), others))


def hosted_part(config: Config, number: int, node: int) -> ReplicaPart:
    """Makes a replica's ReplicaPart for one node. Is called in an actor on this node. A replica has
    one ReplicaPart on each of its nodes except the first node."""
    return make_part(config, number, node, server_address(config))


def build_replicas(
    config: Config,
    replicas: RayWorkers,
    others: RayWorkers,
    engine: Callable[..., Any] = hosted_engine,
    part: Callable[..., Any] = hosted_part,
) -> None:
    """Makes one worker for each replica, inside the actor on the replica's first node. If replicas
    span several nodes, also makes one ReplicaPart inside each actor on the replicas' other nodes.

    Args:
        replicas: the actors on the replicas' first nodes.
        others: the actors on the replicas' other nodes, replica by replica.
    """
    beside = replica_nodes(config) - 1
    if not beside:
        replicas.build(engine, [(config, number) for number in range(len(replicas))])
        return
    others.build(
        part, [(config, number // beside, number % beside + 1) for number in range(len(others))]
    )
    rest = others.wait(others.everywhere("host", config.runtime.interface))

    def arguments(number: int) -> tuple[Any, ...]:
        parts = range(number * beside, (number + 1) * beside)
        return config, number, others.peers(parts), tuple(rest[part] for part in parts)

    def renewed(number: int) -> tuple[Any, ...]:
        """Replaces the dead actors of the replica's parts, and returns the arguments for a new
        worker of the replica. Each new actor runs on the dead actor's node."""
        for one in range(number * beside, (number + 1) * beside):
            if others.dead(one):
                others.replace(one)
        return arguments(number)

    replicas.build(engine, [arguments(number) for number in range(len(replicas))], renewed)


def planned(config: Config, wait_s: float, demand: Demand | None = None) -> Plan | None:
    """Plans the placement of ranks and replicas on the joined cluster. If the cluster has no GPUs,
    returns None, and Ray may place the actors on any node.

    Args:
        wait_s: the longest wait for GPUs that other runs hold, seconds. The GPUs of a run that has
            just ended become free after a few seconds.
        demand: the ranks and replicas to place. If `demand` is None, the ranks and replicas of the
            run are placed.

    Raises:
        ConfigError: the cluster could never hold the layout.
        PlacementError: the cluster cannot hold the layout now.
    """
    resource, demand = config.runtime.gpu_resource, demand or Demand.of(config)
    nodes = cluster_nodes(resource)
    if not any(node.total for node in nodes):
        if resource == GPU:
            return None
        raise ConfigError(
            f"no node of the cluster has the resource {resource!r}", where="runtime.gpu_resource"
        )
    check_possible(demand, nodes)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return plan(demand, cluster_nodes(resource))
        except PlacementError:
            if time.monotonic() > deadline:
                raise
            pause(PROBE_S)


def reserve(
    config: Config, awaited: Awaited | None = None, demand: Demand | None = None
) -> Reservation | None:
    """Reserves GPUs of the cluster for the trainer ranks and the replicas of a run. Returns None if
    the cluster has no GPUs.

    Args:
        awaited: the rule by which a run that restarts after a loss waits for missing nodes. If
            `awaited` is None, the run does not wait.
        demand: see `planned`.

    Raises:
        UserError: the GPUs cannot be reserved, or are not reserved in time.
    """
    runtime, wait_s, told = config.runtime, config.runtime.placement_s, ""
    until = time.monotonic() + (awaited.limit_s if awaited else 0.0)
    while True:
        try:
            where = planned(config, min(wait_s, PROBE_S) if awaited else wait_s, demand)
            if where is None and awaited and awaited.on_gpus:
                raise PlacementError(
                    "none of the remaining nodes has GPUs", where="runtime.ray_address"
                )
            return None if where is None else Reservation(where, runtime.gpu_resource, wait_s)
        except (ConfigError, PlacementError) as error:
            # Too few nodes may be left for the layout, or Ray may not have noticed a loss yet.
            if awaited is None or (left := until - time.monotonic()) <= 0:
                raise
            if error.what != told:
                told = error.what
                awaited.tell(
                    f"waiting up to {left:.0f} s (faults.run.nodes_s) for the GPUs that this run"
                    f" had: {told}"
                )
        pause(PROBE_S)


def preview(config: Config) -> list[str]:
    """Returns the placement that a run would get on its cluster now, as lines of text.

    Raises:
        UserError: the cluster cannot be joined, or can never hold the layout.
    """
    try:
        start_ray(config)
        found = planned(config, 0)
    except PlacementError as error:
        return [f"placement: not now: {line}" for line in str(error).splitlines()]
    finally:
        leave_ray()
    return ["placement: anywhere, the cluster has no GPUs"] if found is None else table(found)


def _starts_ray(config: Config) -> str:
    address = config.runtime.ray_address
    return f"joining the Ray cluster at {address} ..." if address else "starting Ray ..."


class RayRunner:
    """Starts or joins Ray, then places ranks and engines.

    Args:
        awaited: see reserve.
        tell: a function that is called with a line of text before each start that takes seconds.
    """

    def __init__(
        self,
        run: ResolvedRun,
        awaited: Awaited | None = None,
        tell: Callable[[str], None] = unsaid,
    ) -> None:
        config, self._tell = run.config, tell
        self._started: list[Workers | EnginePool] = []
        self._reserved: Reservation | None = None
        self._table: list[str] = []
        self._ranks: RayWorkers | None = None
        try:
            tell(_starts_ray(config))
            start_ray(config)
            self._reserved = reserve(config, awaited)
            ranks = counted(config.parallel.world_size, "trainer rank")
            engines = counted(replica_count(config), "rollout engine")
            started = f"{ranks} and {engines}" if replica_count(config) else ranks
            tell(f"starting {started}: each imports PyTorch ...")
            self._ranks, self._replicas, self._others = self._placed(config)
            self._require_routes(config)
            self.trainers, self.engines = in_order(
                config,
                lambda: TrainerGroup(self._trainers(run), plan_rules(run)),
                lambda: self._pool(config),
            )
        except BaseException as error:
            lost = self.lost(error) if isinstance(error, Exception) else None
            # during a restart another node was lost
            if awaited and self._reserved and isinstance(error, PlacementError):
                lost = WorkerLostError(error.what)
            self.close()
            if lost is not None:
                raise lost from error
            raise

    def lost(self, error: Exception) -> WorkerLostError | None:
        """See Runner. Checks only the ranks, because a lost engine raises its own error."""
        return find_lost(error, self._ranks, "trainer rank")

    def notes(self) -> list[str]:
        """Returns the placement of ranks and engines as lines of text."""
        return self._table

    def pids_here(self) -> list[int]:
        """See Runner."""
        groups = [each for each in self._started if isinstance(each, RayWorkers)]
        return [pid for workers in groups for pid in workers.pids_here()]

    def engines_beside(self, config: Config) -> EnginePool:
        """See Runner."""
        count, environment = replica_count(config), shared_environment(config)
        blind = [{VISIBLE: ""}] * count
        workers = self._start(
            [{}] * count,
            config.rollout.threads,
            "evaluation engine",
            config.runtime.timeout_s,
            environment,
            blind,
        )
        workers.build(hosted_engine, [(config, number) for number in range(count)])
        rules = RequestRule.of(config), RestartRule.of(config)
        self._started.append(pool := EnginePool(workers, config.rollout.prove_every, *rules))
        return pool

    def _placed(self, config: Config) -> tuple[RayWorkers, RayWorkers, RayWorkers]:
        """Starts three groups of actors in this order: actors for the ranks, actors for the
        replicas' first nodes, and actors for the replicas' other nodes. Checks that the actors are
        on the planned nodes and GPUs."""
        settings = shared_environment(config)
        reserved, nodes = self._reserved, replica_nodes(config)
        parts = range(replica_count(config) * nodes)
        numbers = parts[::nodes], [part for part in parts if part % nodes]
        threads, timeout = config.rollout.threads, config.runtime.timeout_s
        ranks = self._start(
            [
                reserved.rank(number) if reserved else {}
                for number in range(config.parallel.world_size)
            ],
            config.runtime.trainer_threads,
            "trainer rank",
            timeout,
            settings | environment(config),
        )
        if reserved is None:
            replicas, others = (
                self._start([{}] * len(some), threads, "rollout engine", timeout, settings)
                for some in numbers
            )
            return ranks, replicas, others
        spots = reserved.spots(ranks, timeout)
        order = rank_order(reserved.plan, spots)
        ranks.renumber(order)
        spots = [spots[number] for number in order]
        check_ranks(reserved.plan, spots)
        blind = {VISIBLE: ""}  # an actor without GPUs must see none, or it would use another's
        placed = bool(reserved.plan.parts)
        replicas, others = (
            self._start(
                [reserved.part(number) if placed else {} for number in some],
                threads,
                "rollout engine",
                timeout,
                settings,
                [shown(reserved.plan, spots, number) if placed else blind for number in some],
            )
            for some in numbers
        )
        found: dict[int, Spot] = {}
        for workers, some in zip((replicas, others) if placed else (), numbers, strict=False):
            found |= dict(zip(some, reserved.spots(workers, timeout), strict=True))
        seen = [found[part] for part in sorted(found)]
        check_replicas(reserved.plan, spots, seen)
        self._table = table(reserved.plan, spots, seen)
        return ranks, replicas, others

    def _require_routes(self, config: Config) -> None:
        """Checks, before any worker is built, that the ranks can send weights to the servers.

        Raises:
            UserError: a rank cannot reach a server, or a node does not see the sync folder.
        """
        route = replica_route(config)
        if route is None or not config.runtime.ray_address or self._ranks is None:
            return
        if route.listens:
            require_reach(self._ranks, self._replicas, config.runtime.interface, route.host)
        if route.folder is not None:
            require_folder(route.folder, self._ranks, [self._replicas, self._others])

    def _start(self, *arguments: Any) -> RayWorkers:
        """See start_actors. The runner ends the actors when the runner is closed."""
        self._started.append(workers := start_actors(*arguments))
        return workers

    def _trainers(self, run: ResolvedRun) -> Workers:
        config, ranks = run.config, self._ranks
        assert ranks is not None
        ports = port_share(config, 0, replica_count(config) * replica_nodes(config))
        # use the first rank's address; call all ranks, since each must have the interface
        address, *_ = ranks.wait(ranks.everywhere("address", config.runtime.interface, ports))
        self._tell(f"building the trainer of {config.model.path} ...")
        ranks.build(Trainer, [(run, rank, f"tcp://{address}") for rank in range(len(ranks))])
        return ranks

    def _pool(self, config: Config) -> EnginePool:
        rules = RequestRule.of(config), RestartRule.of(config)
        self._started.append(
            pool := EnginePool(self._engines(config), config.rollout.prove_every, *rules)
        )
        return pool

    def _engines(self, config: Config) -> Workers:
        """Makes a worker for each replica. A replica's worker can call the workers on the replica's
        other nodes."""
        if len(self._replicas):
            self._tell(f"starting the engine {config.rollout.engine.name} ...")
        build_replicas(config, self._replicas, self._others)
        return self._replicas

    def close(self) -> None:
        """Ends the actors. Also ends Ray if this process started Ray."""
        with uninterrupted():
            for each in self._started:
                each.close()
            self._started = []
            if self._reserved is not None:
                self._reserved.release()
                self._reserved = None
            leave_ray()


class RayEngines:
    """Starts or joins Ray, and starts the rollout engines. Starts no trainer ranks, and reserves no
    GPUs for trainer ranks.

    Args:
        config: the configuration. Servers that take GPUs are the only processes on these GPUs.
        tell: see RayRunner.
    """

    def __init__(self, config: Config, tell: Callable[[str], None] = unsaid) -> None:
        self._started: RayWorkers | None = None
        self._reserved: Reservation | None = None
        self._table: list[str] = []
        runtime, replicas = config.runtime, replica_count(config)
        try:
            tell(_starts_ray(config))
            start_ray(config)
            tell(f"starting {counted(replicas, 'rollout engine')}: each imports PyTorch ...")
            demand = Demand(ranks=0, replicas=replicas, replica_gpus=replica_gpus(config))
            spots: list[dict[str, Any]] = [{}] * replicas
            self._reserved = reserve(config, demand=demand) if demand.gpus else None
            if self._reserved is not None:
                spots = [self._reserved.part(number) for number in range(replicas)]
            environment, limit = shared_environment(config), runtime.timeout_s
            # engines that take no GPU see none
            own = () if self._reserved else [{VISIBLE: ""}] * replicas
            self._started = start_actors(
                spots, config.rollout.threads, "rollout engine", limit, environment, own
            )
            if self._reserved is not None:
                seen = self._reserved.spots(self._started, limit)
                check_replicas(self._reserved.plan, (), seen)
                self._table = table(self._reserved.plan, (), seen)
            self._started.build(hosted_engine, [(config, number) for number in range(replicas)])
            self.engines = EnginePool(
                self._started, config.rollout.prove_every, RequestRule.of(config), NO_RESTARTS
            )
        except BaseException:
            self.close()
            raise

    def notes(self) -> list[str]:
        """Returns the placement of the engines as lines of text."""
        return self._table

    def share(self, value: Any) -> Handle:
        """Stores one copy of a value for all engines, and returns a handle to this copy."""
        assert self._started is not None
        return self._started.share(value)

    def close(self) -> None:
        """Ends the actors. Also ends Ray if this process started Ray."""
        with uninterrupted():
            if self._started is not None:
                self._started.close()
                self._started = None
            if self._reserved is not None:
                self._reserved.release()
                self._reserved = None
            leave_ray()
