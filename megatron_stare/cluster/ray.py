"""Starts or joins Ray, runs workers in Ray actors, and reserves GPUs on the cluster's nodes. Only
this file and ray_tokens.py import ray. The file ray_runner.py decides which workers are started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

# read by Ray at import; otherwise its SIGTERM handler waits 30 s for running work
os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")

import ray
from ray import exceptions as said
from ray._private.state import available_resources_per_node
from ray.core.generated.gcs_pb2 import ActorTableData
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from megatron_stare.cluster import ray_tokens
from megatron_stare.cluster.placed import Spot
from megatron_stare.cluster.ray_processes import (
    EVERY_RAY,
    STARTED,
    ended,
    half_started,
    loss_behind,
    nothing_left,
    own_folder,
    own_group,
    prefer,
    undo,
)
from megatron_stare.cluster.routes import Door, Tried
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError, UserError
from megatron_stare.hangs.driver_side import beats_here, carried
from megatron_stare.planning.placement import Node, Plan, lost_node, still_pending
from megatron_stare.process.interruption import (
    TO_BE_CONTINUED,
    handlers_kept,
    poll,
    uninterrupted,
)
from megatron_stare.process.memory import Home, freeze, own_home
from megatron_stare.process.network import (
    EVERYWHERE,
    LOOPBACK,
    Listener,
    by_number,
    interface_address,
    interface_of,
    require_own_address,
    reserve_port,
)
from megatron_stare.process.output import carried_output, keep_own_output
from megatron_stare.process.workers import Handle, WorkerLostError, Workers, WorkerSilentError
from megatron_stare.run_dir.heartbeat import CallBeats

LEFT_S = 10.0  # seconds for workers to close at the end of a run
ENGINES_LEFT_S = 25.0  # the same for engines, which wait until their servers have freed GPU memory
ENDED_S = 60.0  # seconds for a worker to close before it is replaced; its server may hang
# seconds between polls of a cluster that is incomplete or may have lost something
PROBE_S = 1.0
HEAD_S = 20.0  # seconds without a control store until a cluster counts as lost; Ray's limit is 60
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
LOCAL = "local"  # else Ray would join a cluster that happens to run on this machine
GPU, VISIBLE, NODE_LABEL = "GPU", "CUDA_VISIBLE_DEVICES", "ray.io/node-id"

_joined: Listener | None = None  # the control store of the cluster that was joined
# settings to remove at the end of a session that `start_ray` opened, or None without such a session
_ours: frozenset[str] | None = None


def node_address(interface: str | None) -> str:
    """Returns this node's address on the given network interface. If `interface` is None, returns
    the address that Ray uses for this node.

    Raises:
        ConfigError: the interface does not exist.
    """
    return interface_address(interface) if interface else ray.util.get_node_ip_address()


def server_address(config: Config) -> str:
    """Returns the address at which the run's processes reach servers on this node. If the run
    itself started Ray, the address is the loopback address, because the whole run is then on one
    machine."""
    return node_address(config.runtime.interface) if config.runtime.ray_address else LOOPBACK


def _node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


class Actor:
    """Hosts one worker in a Ray actor. `Actor.method` calls a method of the worker by name. Only
    the actor is a Ray object, so the class of the worker needs no Ray code."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._door: socket.socket | None = None
        self._beats = CallBeats(None, "")

    def build(self, kind: Callable[..., Any], pickled: bytes, role: str) -> Home:
        """Makes the worker from pickled arguments. Returns the `Home` of the worker's process: its
        pid and the space in which this pid is unique. The actor itself unpickles the arguments,
        because Ray would lose the message of an unpickling error. Unpickling fails, for example, if
        the Python module of a user's algorithm is missing on this node."""
        keep_own_output(role)
        self._beats = beats_here(role, ray.get_runtime_context().get_node_id())
        with self._beats.call("build"):
            if interface := interface_of(ray.util.get_node_ip_address()):
                # gloo would resolve the host name, which may give the loopback address
                os.environ.setdefault(GLOO_INTERFACE, interface)
            self._worker = kind(*pickle.loads(pickled))
            freeze()
        return own_home()

    def address(self, interface: str | None, ports: Sequence[int] | None) -> str:
        """Returns a free host:port on this node for the ranks' rendezvous. The actor's process
        binds a socket to the port, so that no other program can take the port. The actor's worker
        later listens on this socket or closes the socket.

        Args:
            interface: the network interface of the address. If `interface` is None, the address is
                the node's address in Ray.
            ports: the ports to choose from. If `ports` is None, any port may be chosen.

        Raises:
            UserError: the interface does not exist, or none of the ports is free.
        """
        host = node_address(interface)
        return f"{host}:{reserve_port(host, ports or (0,))}"

    def host(self, interface: str | None) -> str:
        """See node_address."""
        return node_address(interface)

    def open_door(self, interface: str | None, host: str | None) -> Door:
        """Opens a port at the address at which this node's server will later listen. See
        `routes.require_reach`.

        Raises:
            ConfigError: this node lacks the interface or the address.
        """
        own = node_address(interface)
        listened = host or own
        require_own_address(listened, "sglang.host")
        self._door = socket.create_server((listened, 0))
        reached = own if listened == EVERYWHERE else listened
        return Door(socket.gethostname(), _node_id(), f"{reached}:{self._door.getsockname()[1]}")

    def try_doors(self, doors: Sequence[Door]) -> Tried:
        found = {number: door.missing(_node_id()) for number, door in enumerate(doors)}
        return Tried(
            socket.gethostname(), {number: why for number, why in found.items() if why is not None}
        )

    def close_door(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    def leave_in(self, folder: str) -> str:
        """Creates an empty file with a random name in `folder`, and returns the path of the file.
        Raises ConfigError if the file cannot be created."""
        file = Path(folder) / f"seen-{secrets.token_hex(8)}"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        except OSError as error:
            fix = "name a folder on a file system that all nodes share, or put run.dir on one"
            what = f"{socket.gethostname()} cannot write to {folder} ({error.strerror})"
            raise ConfigError(what, where="sglang.sync_folder", fix=fix) from error
        return str(file)

    def sees(self, file: str) -> tuple[str, bool]:
        """Returns this node's name, and whether this node sees the file at path `file`."""
        with contextlib.suppress(OSError):
            os.listdir(Path(file).parent)  # refreshes a network file system's cache
        return socket.gethostname(), Path(file).exists()

    def take_away(self, file: str) -> None:
        Path(file).unlink(missing_ok=True)

    def spot(self, on_gpus: bool) -> Spot:
        """Returns the node and the visible GPUs of this process. The GPUs are None if GPUs are
        simulated."""
        seen = tuple(filter(None, os.environ.get(VISIBLE, "").split(","))) if on_gpus else None
        return Spot(ray.get_runtime_context().get_node_id(), seen)

    def method(self, name: str, *args: Any) -> Any:
        with self._beats.call(name):
            return getattr(self._worker, name)(*args)

    def close(self) -> None:
        """Closes the actor's worker, if there is one."""
        if self._worker is not None:
            with self._beats.call("close"):
                self._worker.close()


class RayPeers(Workers):
    """Workers that another worker can call. Only the process that started the workers can end
    them."""

    def __init__(self, actors: Sequence[Any], what: str, timeout_s: float) -> None:
        self._actors, self._what, self._timeout_s = list(actors), what, timeout_s

    def __len__(self) -> int:
        return len(self._actors)

    def start_on(self, worker: int, method: str, *args: Any) -> Handle:
        return self._actors[worker].method.remote(method, *args)

    def wait(
        self,
        handles: Sequence[Handle],
        on_done: Callable[[int], None] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        return get(
            handles, self._what, self._timeout_s if timeout_s is None else timeout_s, on_done
        )

    async def result(self, handle: Handle) -> Any:
        answer, until = asyncio.wrap_future(handle.future()), time.monotonic() + self._timeout_s
        with _worker_errors(self._what, self._timeout_s):
            # not asyncio.wait_for, which before Python 3.12 may lose a cancellation that arrives
            # together with the answer
            while not (await asyncio.wait({answer}, timeout=_turn(until)))[0]:
                _require_time(until)
            return answer.result()

    def share(self, value: Any) -> Handle:
        return ray.put(value)

    def close(self) -> None:
        """Does nothing. A RayPeers object only calls workers that another process has started. Only
        this other process may end the workers."""


class RayWorkers(RayPeers):
    """Workers that each run in their own Ray actor. `close` ends the actors.

    Args:
        makers: one function for each actor. The function starts the actor with the actor's
            resources, and is called again to replace a lost actor.
    """

    def __init__(self, makers: Sequence[Callable[[], Any]], what: str, timeout_s: float) -> None:
        super().__init__([make() for make in makers], what, timeout_s)
        self._makers = list(makers)
        # for each actor: class of its worker, pickled arguments, role
        self._built: list[tuple[Callable[..., Any], bytes, str]] = []
        self._renewed: Callable[[int], tuple[Any, ...]] | None = None
        self._homes: list[Home] = []  # of each actor with a worker
        self._closing = threading.Lock()
        self._closed = False

    def everywhere(self, name: str, *args: Any) -> list[Handle]:
        """Starts a call on every actor. The call runs the method `name` of the class `Actor`, not a
        method of the hosted worker."""
        return [getattr(actor, name).remote(*args) for actor in self._actors]

    def renumber(self, order: Sequence[int]) -> None:
        """Renumbers the actors. For each i, the actor with the old index order[i] gets the new
        index i."""
        self._actors = [self._actors[number] for number in order]
        self._makers = [self._makers[number] for number in order]

    def died(self) -> int | None:
        """Returns the index of an actor that Ray reports as dead, or None if no actor is dead."""
        return next((number for number in range(len(self)) if self.dead(number)), None)

    def peers(self, numbers: Sequence[int]) -> RayPeers:
        """Returns the workers with the given indices, in a form in which another worker can call
        them."""
        return RayPeers([self._actors[number] for number in numbers], self._what, self._timeout_s)

    def dead(self, worker: int) -> bool:
        """Returns True if Ray reports the worker's actor as dead."""
        return bool(self._actors[worker]._get_local_state() == ActorTableData.DEAD)

    def build(
        self,
        kind: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        renewed: Callable[[int], tuple[Any, ...]] | None = None,
    ) -> None:
        """Makes one worker in every actor. The i-th entry of `arguments` contains the arguments of
        the i-th actor's worker. `renewed` is called with the number of a worker that is being
        replaced, and returns the arguments of the new worker. By default, the new worker gets the
        lost worker's arguments."""
        self._renewed = renewed
        self._built = [
            (kind, pickle.dumps(each), f"{self._what} {n}") for n, each in enumerate(arguments)
        ]
        self._homes = self.wait(
            [
                actor.build.remote(*each)
                for actor, each in zip(self._actors, self._built, strict=True)
            ]
        )

    def pids_here(self) -> list[int]:
        """Returns the pids of the workers on this node."""
        return [home.pid for home in self._homes if home.space == own_home().space]

    def replace(self, worker: int) -> None:
        """See Workers. The new actor has the same resources, bundle and environment as the lost
        actor."""
        _end([self._actors[worker]], ENDED_S)  # first, since it may hold resources of the new actor
        with self._closing:
            if self._closed:
                raise WorkerLostError(
                    f"the {self._what} is not restarted, because the run is ending"
                )
            self._actors[worker] = actor = self._makers[worker]()
        if self._renewed is not None:
            kind, _, role = self._built[worker]
            self._built[worker] = (kind, pickle.dumps(self._renewed(worker)), role)
        (self._homes[worker],) = self.wait([actor.build.remote(*self._built[worker])])

    def close(self) -> None:
        with self._closing:
            self._closed = True
            actors, self._actors = self._actors, []
        self._homes = []
        _end(actors, ENGINES_LEFT_S if self._what.endswith("engine") else LEFT_S)


def _end(actors: Sequence[Any], limit_s: float) -> None:
    """Closes the actors' workers within `limit_s`, then kills the actors. Does nothing if Ray has
    died, because calls to a dead Ray would hang; see `leave_ray`."""
    if ended(_own_node()) is not None or (
        _joined is not None and _joined.missing(PROBE_S) is not None
    ):
        return
    with contextlib.suppress(Exception):  # they are killed next anyway
        ray.get([actor.close.remote() for actor in actors], timeout=limit_s)
    for actor in actors:
        ray.kill(actor)


def get(
    handles: Sequence[Handle],
    what: str,
    timeout_s: float,
    on_done: Callable[[int], None] | None = None,
) -> list[Any]:
    """Calls ray.get, and converts Ray's errors as `_worker_errors` does.

    Args:
        what: the name of the workers in error messages.
        timeout_s: longest wait for the next result, seconds.
        on_done: a function that is called with the index of a handle when the handle's call
            finishes.
    """
    number = {handle: i for i, handle in enumerate(handles)}
    with _worker_errors(what, timeout_s):
        # Take results as they finish, so that a rank's error is raised while other ranks wait for
        # it in a collective.
        pending = list(handles)
        until = time.monotonic() + timeout_s
        while pending:
            poll()
            done, pending = ray.wait(pending, num_returns=1, timeout=_turn(until))
            if not done:
                _require_time(until)
                continue
            until = time.monotonic() + timeout_s
            ray.get(done)
            if on_done is not None:
                on_done(number[done[0]])
        return ray.get(list(handles))


def _turn(until: float) -> float:
    """Returns the length of the next wait, in seconds. A wait lasts at most `PROBE_S` seconds. If a
    wait ends without a result, the caller checks whether Ray's own processes are alive, because Ray
    does not report their death."""
    return min(max(until - time.monotonic(), 0.0), PROBE_S)


def _require_time(until: float) -> None:
    """Raises GetTimeoutError if the time is up, and WorkerLostError or UserError if Ray itself is
    lost."""
    if (gone := ended(_own_node())) is not None:
        raise WorkerLostError(gone)
    # raise before Ray ends this process from C++
    if _joined is not None and _joined.gone(HEAD_S, PROBE_S):
        fix = "start the cluster again, and continue from the newest checkpoint with --resume"
        error = UserError(
            f"the control store (GCS) of {_joined.address} is gone",
            where="runtime.ray_address",
            fix=fix,
        )
        error.exit_code = TO_BE_CONTINUED
        raise error
    if time.monotonic() >= until:
        raise GetTimeoutError


@contextlib.contextmanager
def _worker_errors(what: str, timeout_s: float) -> Iterator[None]:
    """Converts an error of Ray into the UserError that the worker raised, or into a
    WorkerLostError."""
    try:
        yield
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, UserError):
            raise cause from None
        raise
    except RayActorError as error:
        raise WorkerLostError(
            f"a {what} process died: {str(error).splitlines()[0]}",
            fix=(
                "read the end of its log in logs/ of the run directory, or on its node in"
                " session_latest/logs of Ray's folder; the usual cause is out of memory"
            ),
        ) from error
    except GetTimeoutError as error:
        raise WorkerSilentError(
            f"a {what} did not answer within {timeout_s:.0f} s", where="runtime.timeout_s"
        ) from error
    except (
        said.LocalRayletDiedError,
        said.NodeDiedError,
        said.ObjectLostError,
        said.WorkerCrashedError,
    ) as error:
        raise WorkerLostError(
            f"a node or process that a {what} needs is gone: {str(error).splitlines()[0]}"
        ) from error


def start_ray(config: Config) -> None:
    """Joins the cluster at `runtime.ray_address`. Starts Ray on this machine alone if
    `runtime.ray_address` is not set.

    Raises:
        UserError: Ray does not start, the cluster does not answer, or this process is connected to
            Ray already, for example by `ray.init` in a notebook.
    """
    global _joined
    if ray.is_initialized():
        raise ConfigError(
            "this process is connected to Ray already",
            where="runtime.runner",
            fix="call ray.shutdown() first, run in another process, or use runtime.runner=inline",
        )
    common = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    # silence Ray's harmless notice that the cluster requires a token
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    prefer(EVERY_RAY)
    if config.runtime.ray_address:
        address = config.runtime.ray_address
        fix = (
            f"is a cluster running there? `ray status --address {address}` asks it; "
            "leave the setting out to start Ray on this machine"
        )
        # Ray resolves this machine's own name to its network address
        head = Listener(address, ray.util.get_node_ip_address())
        # without this check Ray would retry, with messages, for ten minutes
        head.require("no Ray cluster can be reached at", "runtime.ray_address", fix)
        what = f"the Ray cluster at {address} cannot be joined"
        _init(what, "runtime.ray_address", fix, address=by_number(address), **common)
        _joined = head
        return
    os.environ.setdefault(GLOO_INTERFACE, "lo")
    prefer(STARTED)
    store, folder = config.runtime.object_store_mb * 2**20, own_folder()
    fix = f"is the machine very busy or out of memory? Its logs are in {folder}/session_latest/logs"
    new = {"object_store_memory": store, "_node_ip_address": LOOPBACK, "_temp_dir": folder}
    _init("Ray does not start", "runtime", fix, address=LOCAL, **new, **common)


def _init(what: str, where: str, fix: str, **settings: Any) -> None:
    global _ours
    _ours = ray_tokens.unset()
    if settings["address"] == LOCAL:
        ray_tokens.require_token()
    else:
        ray_tokens.authenticate(settings["address"])
    try:
        # Ray cannot shut down an interrupted start
        with uninterrupted(), handlers_kept(), own_group():
            ray.init(**settings)
    except Exception as error:  # Ray raises a bare Exception if a node does not start in time
        half = None if _own_node() else half_started(error)
        gone = ended(half or _own_node())
        leave_ray()
        undo(half)
        if gone is not None:
            raise WorkerLostError(gone, fix=fix) from error
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{what}: {first_line}", where=where, fix=fix) from error
    poll()


def cluster_nodes(resource: str) -> list[Node]:
    """Returns all nodes in the cluster's records, including lost nodes. Each Node states how many
    GPUs the node has, and how many of them are free."""
    free = available_resources_per_node()
    return [
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            total=int(node["Resources"].get(resource, 0)),
            free=int(free.get(node["NodeID"], {}).get(resource, 0)),
            alive=node["Alive"],
        )
        for node in ray.nodes()
    ]


def node_workers(timeout_s: float) -> tuple[list[str], RayWorkers]:
    """Starts one actor on every live node. The actors reserve no resources and host no workers.
    Returns the addresses of the live nodes, and a RayWorkers with the actors. The i-th actor runs
    on the node with the i-th address."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    spots = [
        {"scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)}
        for node in nodes
    ]
    return [node["NodeManagerAddress"] for node in nodes], start_actors(spots, 1, "node", timeout_s)


def leave_ray() -> None:
    """Ends the Ray that `start_ray` started, or leaves the cluster that `start_ray` joined. Does
    nothing if the user's program connected this process to Ray."""
    global _joined, _ours
    if _ours is None:
        return
    with nothing_left(_own_node()):
        ray.shutdown()
    ray_tokens.forget(_ours)
    _joined = _ours = None


def _own_node() -> Any:
    """Returns Ray's record of the processes that Ray started on this machine, or None if Ray has no
    such record."""
    return ray._private.worker._global_node


def find_lost(error: Exception, workers: RayWorkers | None, what: str) -> WorkerLostError | None:
    """See Runner.lost. `workers` is None before the workers are started."""
    return loss_behind(
        error, _own_node(), lambda: None if workers is None else workers.died(), what
    )


class Reservation:
    """Reservation of a plan's GPUs in a placement group. The placement group has one bundle for
    each node with ranks. If the replicas do not share the trainer's GPUs, the placement group also
    has one bundle for each replica part.

    Args:
        wait_s: the longest wait until the cluster has reserved the GPUs, seconds.

    Raises:
        PlacementError: the GPUs were not reserved within `wait_s`, or a node was lost. The message
            names the nodes.
    """

    def __init__(self, plan: Plan, resource: str, wait_s: float) -> None:
        self.plan, self._resource = plan, resource
        apart = () if plan.demand.shared else plan.parts
        holders = list(dict.fromkeys(plan.ranks))
        self._of_node = {node: number for number, node in enumerate(holders)}
        bundles = [{resource: plan.ranks.count(node)} for node in holders]
        bundles += [{resource: plan.demand.part_gpus} for _ in apart]
        where = [{NODE_LABEL: node.id} for node in (*holders, *apart)]
        self._group = placement_group(bundles, strategy="PACK", bundle_label_selector=where)
        deadline = time.monotonic() + wait_s
        try:
            while not self._group.wait(PROBE_S):
                poll()
                self.require_nodes()
                if time.monotonic() > deadline:
                    raise still_pending(plan, cluster_nodes(resource), wait_s)
        except BaseException:
            self.release()
            raise

    def require_nodes(self) -> None:
        """Raises PlacementError if a node of the plan was lost."""
        if error := lost_node(self.plan.nodes, cluster_nodes(self._resource)):
            raise error

    def rank(self, number: int) -> dict[str, Any]:
        """Returns Ray's options for the actor of a rank."""
        return {**self._takes(1), **self._bundle(self._of_node[self.plan.ranks[number]])}

    def part(self, number: int) -> dict[str, Any]:
        """Returns Ray's options for the actor that hosts a replica's part on one node. An actor on
        shared GPUs reserves no resources, because the ranks have already reserved the GPUs."""
        if self.plan.demand.shared:
            return {**self._takes(0), **self._bundle(self._of_node[self.plan.parts[number]])}
        return {
            **self._takes(self.plan.demand.part_gpus),
            **self._bundle(len(self._of_node) + number),
        }

    def _takes(self, gpus: int) -> dict[str, Any]:
        return (
            {"num_gpus": gpus}
            if self._resource == GPU
            else {"resources": {self._resource: gpus} if gpus else {}}
        )

    def _bundle(self, number: int) -> dict[str, Any]:
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group,
                placement_group_bundle_index=number,
                placement_group_capture_child_tasks=False,
            )
        }

    def spots(self, workers: RayWorkers, limit_s: float) -> list[Spot]:
        """Waits until the actors have started, and returns the node and GPUs of each actor.

        Args:
            limit_s: timeout of the actors' start, seconds.

        Raises:
            UserError: an actor has not started. If a node was lost, the error names the node.
        """
        handles = workers.everywhere("spot", self._resource == GPU)
        pending, deadline = list(handles), time.monotonic() + limit_s
        try:
            while pending and time.monotonic() < deadline:
                poll()
                _, pending = ray.wait(pending, num_returns=len(pending), timeout=PROBE_S)
                self.require_nodes()
            return workers.wait(handles, timeout_s=PROBE_S)
        except UserError:
            self.require_nodes()  # a lost node explains the error better
            raise

    def release(self) -> None:
        """Frees the GPUs."""
        # fails if the cluster is gone, and then nothing is reserved any more
        with contextlib.suppress(Exception):
            remove_placement_group(self._group)


def start_actors(
    spots: Sequence[Mapping[str, Any]],
    threads: int,
    what: str,
    timeout_s: float,
    settings: Mapping[str, str] = MappingProxyType({}),
    own: Sequence[Mapping[str, str]] = (),
) -> RayWorkers:
    """Starts one actor for each entry of `spots`. The actors do not host workers yet.

    Args:
        spots: Ray's options for each actor; see Reservation.
        threads: CPU threads of each actor.
        what: the name of the actors in error messages.
        timeout_s: timeout of a call, seconds.
        settings: environment variables of all actors.
        own: additional environment variables of each actor.
    """
    gpus = bool(ray.cluster_resources().get(GPU))
    common = {
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "0" if gpus else "1",
        # else up to 32 processes an actor compile at once
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        **settings,
    }
    common |= carried(ray.util.get_node_ip_address()) | carried_output()
    makers = []
    for number, spot in enumerate(spots):
        variables = {**common, **(own[number] if own else {})}
        # num_cpus=0, since workers on CPUs mostly wait: Ray must accept three workers on two cores.
        makers.append(
            ray.remote(num_cpus=0, runtime_env={"env_vars": variables}, **spot)(Actor).remote
        )
    return RayWorkers(makers, what, timeout_s)
