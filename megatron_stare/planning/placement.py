"""Assigns every trainer rank and engine replica to a node with free GPUs. Raises PlacementError if
the free GPUs do not suffice. The module does not depend on Ray.

In Megatron's rank order, the tensor-parallel index varies fastest, then the context-parallel,
data-parallel and pipeline-parallel index. The ranks of a tensor-parallel group are therefore
consecutive, and so are the ranks of an expert-parallel group. Each node gets blocks of consecutive
ranks. A block never splits a tensor-parallel group, and if possible it splits no context-parallel
or expert-parallel group either. The first node with ranks has the lowest ranks, the next node has
the following ranks, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError, UserError
from megatron_stare.rollout.engines.replicas import replica_count, replica_gpus, replica_nodes

LOST_SHOWN = 4  # lost nodes in a message; an old cluster remembers many


class PlacementError(UserError):
    """Raised if the cluster cannot provide the GPUs or nodes that a layout needs, for example
    because a node was lost."""


@dataclass(frozen=True)
class Awaited:
    """Options of a restarted run that waits until its lost nodes are back.

    `limit_s`: longest wait, in seconds.
    `on_gpus`: True if the run used GPUs before the restart. If `on_gpus` is True, the run also
        waits until the cluster has GPUs again.
    `tell`: function that prints what the run waits for.
    """

    limit_s: float
    on_gpus: bool
    tell: Callable[[str], None]


@dataclass(frozen=True)
class Node:
    """A node as reported by the cluster."""

    id: str
    address: str
    total: int  # GPUs
    free: int
    alive: bool = True

    def __str__(self) -> str:
        return f"{self.address} ({self.id[:8]})"


@dataclass(frozen=True)
class Demand:
    """Describes the trainer ranks and engine replicas of a run, and the GPUs that these ranks and
    replicas need. The function `plan` assigns the ranks and replicas to nodes.

    `replica_gpus`: number of GPUs per replica. A replica with 0 GPUs can run on any node.
    `replica_nodes`: number of nodes per replica. The replica uses the same number of GPUs on each
        of its nodes.
    `shared`: True if the replicas use the same GPUs as the trainer.
    """

    ranks: int
    tensor: int = 1
    context: int = 1
    expert: int = 1
    replicas: int = 0
    replica_gpus: int = 0
    replica_nodes: int = 1
    shared: bool = False

    @classmethod
    def of(cls, config: Config) -> Demand:
        """Returns the ranks and replicas that a run has to place."""
        parallel = config.parallel
        return cls(
            parallel.world_size,
            parallel.tensor,
            parallel.context,
            parallel.expert,
            replica_count(config),
            replica_gpus(config),
            replica_nodes(config) if replica_gpus(config) else 1,
            config.sglang.colocated,
        )

    @property
    def gpus(self) -> int:
        """Number of GPUs that all ranks and replicas need together."""
        return self.ranks + (0 if self.shared else self.replicas * self.replica_gpus)

    @property
    def part_gpus(self) -> int:
        """Number of GPUs that one replica uses on one node. A replica uses the same number of GPUs
        on each of its nodes."""
        return self.replica_gpus // self.replica_nodes

    @property
    def parts(self) -> int:
        """Number of replica parts to place, or 0 if replicas use no GPUs. A replica has one part on
        each of its nodes."""
        return self.replicas * self.replica_nodes if self.replica_gpus else 0

    def blocks(self) -> list[int]:
        """Returns possible block sizes, the preferred size first. A block consists of consecutive
        ranks on one node. A block contains whole tensor-parallel groups, and preferably whole
        context-parallel and expert-parallel groups."""
        tensor_context = self.tensor * self.context
        sizes = (
            math.lcm(tensor_context, self.expert),
            tensor_context,
            math.lcm(self.tensor, self.expert),
            self.tensor,
        )
        return [size for size in dict.fromkeys(sizes) if self.ranks % size == 0]

    def hosted(self, ranks: int, free: int) -> int:
        """Returns how many replica parts fit on a node. The argument `free` is the number of the
        node's free GPUs. The argument `ranks` is the number of trainer ranks that the node gets.

        If replicas share GPUs with the trainer (`shared`), the replica parts on a node use the GPUs
        of the trainer ranks on this node. Otherwise the replica parts use the node's free GPUs to
        which no trainer rank is assigned. A node takes at most one part of a replica that spans
        several nodes.
        """
        if not self.replica_gpus:
            return 0
        room = (ranks if self.shared else free - ranks) // self.part_gpus
        return min(room, self.replicas) if self.replica_nodes > 1 else room

    def __str__(self) -> str:
        if not self.ranks:
            return (
                f"{self.replicas} engine{'s' if self.replicas > 1 else ''} of {self.replica_gpus}"
                " GPUs"
            )
        groups = f"{self.ranks} trainer ranks" + (
            f" in tensor groups of {self.tensor}" if self.tensor > 1 else ""
        )
        if not self.replicas or not self.replica_gpus:
            return groups
        engines = (
            f"{self.replicas} engine{'s' if self.replicas > 1 else ''} of {self.replica_gpus} GPUs"
        )
        if self.replica_nodes > 1:
            engines += f" over {self.replica_nodes} nodes{' each' if self.replicas > 1 else ''}"
        return f"{groups} and {engines}{' on the same' if self.shared else ''}"


@dataclass(frozen=True)
class Plan:
    """Placement of a run.

    `ranks`: the node of every trainer rank, in the order of the ranks.
    `parts`: the node of every replica part. Replicas that use no GPUs have no parts. The parts of
        replica 0 come first, then the parts of replica 1, and so on.
    `block`: number of ranks per block. The first block begins with rank 0, and each block consists
        of consecutive ranks. All ranks of a block are on the same node.
    """

    demand: Demand
    ranks: tuple[Node, ...]
    parts: tuple[Node, ...]
    block: int

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Nodes that the run uses: first the nodes of the trainer ranks, then the other nodes with
        replica parts."""
        return tuple(dict.fromkeys((*self.ranks, *self.parts)))

    def ranks_on(self, node: Node) -> range:
        """Returns the ranks on a node as a range. The ranks on a node are always consecutive."""
        first = self.ranks.index(node) if node in self.ranks else 0
        return range(first, first + self.ranks.count(node))

    def gpus_on(self, node: Node) -> int:
        """Returns the number of GPUs that the run uses on a node."""
        apart = 0 if self.demand.shared else len(self.parts_on(node))
        return len(self.ranks_on(node)) + apart * self.demand.part_gpus

    def parts_on(self, node: Node) -> list[int]:
        return [number for number, each in enumerate(self.parts) if each == node]

    def sharing(self, part: int) -> range:
        """Returns the trainer ranks that share their GPUs with a replica part. The argument `part`
        is the replica part's index in `parts`. `demand.shared` must be set."""
        node, size = self.parts[part], self.demand.part_gpus
        first = self.ranks_on(node).start + size * self.parts_on(node).index(part)
        return range(first, first + size)


def plan(demand: Demand, nodes: Sequence[Node]) -> Plan:
    """Chooses nodes with free GPUs for the ranks and replicas in `demand`.

    Raises:
        PlacementError: the free GPUs do not suffice. The message lists the free GPUs and the
            demand.
    """
    ready = sorted(
        (node for node in nodes if node.alive and node.total),
        key=lambda node: (-node.free, str(node)),
    )
    for block in demand.blocks():
        counts = _dealt(demand, block, [node.free for node in ready])
        if counts is not None:
            return _filled(demand, block, ready, counts)
    raise _refusal(demand, nodes)


def _dealt(demand: Demand, block: int, free: Sequence[int]) -> list[int] | None:
    """Chooses a number of ranks for each node. With the chosen numbers, all replicas also fit on
    the nodes. Each node gets a multiple of `block` ranks. Returns None if no such choice exists.

    Nodes at the start of the list get as many ranks as possible.
    """
    wanted = demand.ranks // block
    parts = demand.parts
    never = -1
    # beyond[i][n]: most replica parts on nodes i, i + 1, ... if these hold n blocks of ranks
    beyond: list[list[int]] = [[0] + [never] * wanted]
    for gpus in reversed(free):
        after = beyond[-1]
        beyond.append(
            [
                max(
                    (
                        after[held - here] + demand.hosted(here * block, gpus)
                        if after[held - here] != never
                        else never
                    )
                    for here in range(min(held, gpus // block) + 1)
                )
                for held in range(wanted + 1)
            ]
        )
    beyond.reverse()
    if beyond[0][wanted] < parts:
        return None
    counts, left, room = [], wanted, 0
    for gpus, after in zip(free, beyond[1:], strict=True):
        for here in range(min(left, gpus // block), -1, -1):
            taken = demand.hosted(here * block, gpus)
            if after[left - here] != never and room + taken + after[left - here] >= parts:
                break
        counts.append(here * block)
        left, room = left - here, room + taken
    return counts


def _filled(demand: Demand, block: int, nodes: Sequence[Node], counts: Sequence[int]) -> Plan:
    ranks = tuple(node for node, count in zip(nodes, counts, strict=True) for _ in range(count))
    room = [demand.hosted(count, node.free) for node, count in zip(nodes, counts, strict=True)]
    parts: list[Node] = []
    while len(parts) < demand.parts:
        # a replica over several nodes takes the nodes with the most room, which leaves room for the
        # other replicas
        found = sorted(
            (n for n in range(len(nodes)) if room[n]),
            key=lambda n: -room[n] * (demand.replica_nodes > 1),
        )
        for n in sorted(found[: demand.replica_nodes]):
            room[n] -= 1
            parts.append(nodes[n])
    return Plan(demand, ranks, tuple(parts), block)


def check_possible(demand: Demand, nodes: Sequence[Node]) -> None:
    """Raises ConfigError if the ranks and replicas in `demand` would not fit on the nodes even if
    all GPUs were free. If the ranks and replicas do not fit on completely free nodes, waiting for
    free GPUs cannot help."""
    largest = max((node.total for node in nodes if node.alive), default=0)
    if demand.tensor > largest:
        raise ConfigError(
            f"a tensor-parallel group of {demand.tensor} GPUs is larger than a node: the largest"
            f" has {largest}",
            where="parallel.tensor",
            fix=f"at most {largest}; parallel.pipeline and parallel.context go over nodes",
        )
    if demand.part_gpus > largest:
        over = (
            f" over {demand.replica_nodes} nodes, {demand.part_gpus} on each,"
            if demand.replica_nodes > 1
            else ""
        )
        enough = _divisor(demand.replica_gpus, largest)
        raise ConfigError(
            f"a replica of {demand.replica_gpus} GPUs{over} is larger than a node: the largest has"
            f" {largest}",
            where="sglang.tensor_parallel",
            fix=(
                f"at most {largest * demand.replica_nodes}, or spread it over {enough} nodes"
                " (sglang.nodes)"
            ),
        )
    if demand.shared and demand.replicas * demand.replica_gpus > demand.ranks:
        raise ConfigError(
            f"{demand.replicas} engines of {demand.replica_gpus} GPUs do not fit on the trainer's"
            f" {demand.ranks} GPUs",
            where="rollout.engines",
            fix=f"at most {demand.ranks // demand.replica_gpus}, or sglang.colocated=false",
        )
    try:
        plan(demand, [replace(node, free=node.total) for node in nodes])
    except PlacementError:
        there = [f"{node} has {node.total}" for node in nodes if node.alive and node.total]
        raise ConfigError(
            f"{_needs(demand)}, more than these nodes could give if all were free:"
            f" {', '.join(there)}",
            where="parallel",
            fix="add nodes, or lower parallel.data or rollout.engines",
        ) from None


def _divisor(gpus: int, most: int) -> int:
    """Divides `gpus` GPUs into equal parts of at most `most` GPUs, and returns the smallest
    possible number of parts."""
    return next(
        parts for parts in range(1, gpus + 1) if gpus % parts == 0 and gpus // parts <= max(most, 1)
    )


def _needs(demand: Demand) -> str:
    inside = f", {demand.tensor} of a tensor group on one node" if demand.tensor > 1 else ""
    return f"{demand} need {demand.gpus} GPUs{inside}"


def _refusal(demand: Demand, nodes: Sequence[Node]) -> PlacementError:
    there = [
        f"{node} has {node.free} of {node.total} free"
        for node in nodes
        if node.alive and node.total
    ]
    lost = [f"{node} is lost" for node in nodes if not node.alive][:LOST_SHOWN]
    return PlacementError(
        f"{_needs(demand)}, which these nodes do not have free:"
        f" {', '.join(there + lost) or 'none'}",
        where="parallel",
        fix="free GPUs, add nodes, or lower parallel.data or rollout.engines",
    )


def lost_node(nodes: Sequence[Node], now: Sequence[Node]) -> PlacementError | None:
    """Returns an error that names the lost nodes of a plan. `nodes` are all nodes of the plan.
    Returns None if all nodes of the plan are alive."""
    alive = {node.id for node in now if node.alive}
    lost = [str(node) for node in nodes if node.id not in alive]
    if not lost:
        return None
    return PlacementError(
        f"lost before the run could start on {'it' if len(lost) == 1 else 'them'}: node"
        f" {', '.join(lost)}",
        where="runtime.ray_address",
        fix="bring it back, or start again: the run is then planned on the remaining nodes",
    )


def still_pending(plan: Plan, now: Sequence[Node], waited_s: float) -> PlacementError:
    """Returns the error for GPUs that the cluster did not reserve in time. The GPUs were free when
    the plan was made, but another job may have taken them."""
    there = {node.id: node for node in now}
    short = [
        f"{node} has {there[node.id].free} free of the {plan.gpus_on(node)} that the plan needs"
        for node in plan.nodes
        if there[node.id].free < plan.gpus_on(node)
    ]
    return PlacementError(
        f"the cluster did not set aside {plan.demand.gpus} GPUs within {waited_s:.0f} s:"
        f" {', '.join(short) or 'for no known reason'}",
        where="runtime.placement_s",
        fix="another job may have taken them: start again, or raise runtime.placement_s",
    )
