"""Assigns the ranks to the trainer's processes in the order of the nodes and GPUs on which the
processes actually run. Checks the nodes and GPUs of all processes against the plan, and formats the
placement as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_stare.planning.placement import Node, PlacementError, Plan


@dataclass(frozen=True)
class Spot:
    """Node and GPUs of a process, as the process itself reports them."""

    node: str  # id
    # GPUs in the process's CUDA_VISIBLE_DEVICES; None: simulated GPUs
    gpus: tuple[str, ...] | None = None


def rank_order(plan: Plan, spots: Sequence[Spot]) -> list[int]:
    """Assigns the ranks to the processes. Returns one index into `spots` for each rank: the index
    of the process that runs this rank. The ranks are numbered node by node, in the plan's order of
    nodes. On each node, the ranks are numbered in the order of their processes' GPU indices.

    Args:
        spots: the nodes and GPUs of the processes, in the order in which the processes were
            started.
    """

    def index(number: int) -> tuple[int, str]:
        gpu = "".join((spots[number].gpus or ())[:1])
        return (int(gpu) if gpu.isdigit() else 0, gpu)

    return [
        number
        for node in dict.fromkeys(plan.ranks)
        for number in sorted(plan.ranks_on(node), key=index)
    ]


def check_ranks(plan: Plan, ranks: Sequence[Spot]) -> None:
    """Checks that the ranks run on the nodes and GPUs of the plan. The entries of `ranks` are in
    rank order.

    Raises:
        PlacementError: a rank is not on its planned node, or does not see exactly one GPU of its
            own.
    """
    held: dict[tuple[str, str], str] = {}
    for number, (node, spot) in enumerate(zip(plan.ranks, ranks, strict=True)):
        _check_spot(f"rank {number}", 1, node, spot, held)


def check_replicas(plan: Plan, ranks: Sequence[Spot], replicas: Sequence[Spot]) -> None:
    """Checks the node and the GPUs of every replica part against the plan. The entries of
    `replicas` are in the order of the plan's parts.

    Raises:
        PlacementError: a part is not on its planned node, or does not see its GPUs. If replicas
            share the trainer's GPUs, the GPUs of a part are the GPUs of the planned ranks.
    """
    held = {
        (spot.node, gpu): f"rank {rank}"
        for rank, spot in enumerate(ranks)
        for gpu in spot.gpus or ()
    }
    for part, (node, spot) in enumerate(zip(plan.parts, replicas, strict=True)):
        engine = f"engine {_named(plan, part)}"
        _check_spot(engine, plan.demand.part_gpus, node, spot, {} if plan.demand.shared else held)
        if plan.demand.shared and (spot.gpus or ()) != _shared(plan, ranks, part):
            raise _elsewhere(
                f"{engine} does not see the GPUs of the ranks that it shares them with, on {node}"
            )


def _named(plan: Plan, part: int) -> str:
    """Returns the index of the part's replica as text. If the replica is on several nodes, the text
    also contains the number of the part: "2 (1/4)" is the first of the four parts of replica 2."""
    replica, node = divmod(part, plan.demand.replica_nodes)
    return (
        str(replica)
        if plan.demand.replica_nodes == 1
        else f"{replica} ({node + 1}/{plan.demand.replica_nodes})"
    )


def _check_spot(
    what: str, gpus: int, planned: Node, spot: Spot, held: dict[tuple[str, str], str]
) -> None:
    """Checks one process against the plan, and adds the process's GPUs to `held`."""
    if spot.node != planned.id:
        raise _elsewhere(f"{what} was to be on node {planned}, and is on {spot.node[:8]}")
    if spot.gpus is not None and len(spot.gpus) != gpus:
        seen = f"sees {', '.join(spot.gpus)}" if spot.gpus else "was shown none in particular"
        raise _elsewhere(f"{what} was to see {gpus} GPUs of node {planned}, and {seen}")
    for gpu in spot.gpus or ():
        if other := held.get((spot.node, gpu)):
            raise _elsewhere(f"{other} and {what} were given the same GPU {gpu} of node {planned}")
        held[spot.node, gpu] = what


def shown(plan: Plan, ranks: Sequence[Spot], part: int) -> dict[str, str]:
    """Returns the environment variable CUDA_VISIBLE_DEVICES for a replica part that shares the
    ranks' GPUs. Returns {} for a replica part that has its own GPUs, because Ray sets
    CUDA_VISIBLE_DEVICES for this part."""
    gpus = _shared(plan, ranks, part) if plan.demand.shared else ()
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def _shared(plan: Plan, ranks: Sequence[Spot], part: int) -> tuple[str, ...]:
    return tuple(gpu for rank in plan.sharing(part) for gpu in ranks[rank].gpus or ())


def _elsewhere(what: str) -> PlacementError:
    return PlacementError(
        what,
        fix=(
            "if RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set where Ray is started, unset it"
        ),
    )


def table(plan: Plan, ranks: Sequence[Spot] = (), replicas: Sequence[Spot] = ()) -> list[str]:
    """Formats the plan as a table with one line for each node. If `ranks` and `replicas` are given,
    the lines also contain the GPU indices of ranks and engines."""
    rows = [("node", "GPUs free", "trainer ranks", "engines")]
    for node in plan.nodes:
        own = plan.ranks_on(node)
        ours = [f"{own.start}-{own[-1]}" if len(own) > 1 else str(own.start)] if own else ["-"]
        if seen := [gpu for rank in own if ranks for gpu in ranks[rank].gpus or ()]:
            ours.append(f"on {_spans(seen)}")
        engines = [
            _named(plan, part)
            + (f" on {_spans(gpus)}" if (gpus := replicas[part].gpus if replicas else None) else "")
            for part in plan.parts_on(node)
        ]
        rows.append(
            (str(node), f"{node.free} of {node.total}", " ".join(ours), "; ".join(engines) or "-")
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shared = (
        ", engines on the trainer's GPUs" if plan.demand.shared and plan.demand.replica_gpus else ""
    )
    return [
        (
            f"placement: {_counted(plan.demand.gpus, 'GPU')} of"
            f" {_counted(len(plan.nodes), 'node')}; blocks of {_counted(plan.block, 'rank')} inside"
            f" a node{shared}"
        ),
        *(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ),
    ]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def _spans(gpus: Sequence[str]) -> str:
    """Formats GPUs as a range such as 0-3 if they are consecutive, and as a list of names
    otherwise."""
    if not all(gpu.isdigit() for gpu in gpus):
        return ",".join(gpus)
    numbers = [int(gpu) for gpu in gpus]
    whole = all(after == before + 1 for before, after in pairwise(numbers))
    return f"{numbers[0]}-{numbers[-1]}" if whole and len(numbers) > 1 else ",".join(gpus)
