"""Which node ranks and engines go to: against every other way there is, against Megatron's own
groups, and refused by name; and what was got against what was asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from support.runs import ROOT

from megatron_stare.cluster.placed import (
    Spot,
    check_ranks,
    check_replicas,
    rank_order,
    shown,
    table,
)
from megatron_stare.config.load import load_config
from megatron_stare.config.schema import ParallelConfig
from megatron_stare.errors import ConfigError
from megatron_stare.megatron.dry.planned_rank import pretend
from megatron_stare.planning.placement import (
    Demand,
    Node,
    PlacementError,
    Plan,
    check_possible,
    lost_node,
    plan,
    still_pending,
)

QUICKSTART = str(ROOT / "configs/quickstart.yaml")


def nodes(*free: int, total: int = 8) -> list[Node]:
    """Nodes 10.0.0.1, 10.0.0.2, ... of so many free GPUs."""
    return [
        Node(f"{'abcdefgh'[n] * 8}-id", f"10.0.0.{n + 1}", total, each)
        for n, each in enumerate(free)
    ]


def counts(found: Plan, of: Sequence[Node]) -> tuple[list[int], list[int]]:
    """Ranks and parts of replicas of each of the nodes."""
    return [found.ranks.count(node) for node in of], [found.parts.count(node) for node in of]


def test_a_demand_is_that_of_the_run() -> None:
    def demand(*overrides: str) -> Demand:
        return Demand.of(load_config(QUICKSTART, list(overrides)))

    alone = Demand(2, tensor=2, replicas=1)
    assert demand() == alone  # the engine in process computes on the CPU
    assert (alone.gpus, demand("parallel.tensor=1").gpus) == (2, 1)
    served = ("rollout.engine=sglang", "sglang.tensor_parallel=4", "rollout.engines=3")
    assert demand(*served) == Demand(2, tensor=2, replicas=3, replica_gpus=4)
    assert demand(*served).gpus == 2 + 3 * 4
    assert demand(*served, "sglang.device=cpu").gpus == 2
    assert demand("rollout.engine=sglang", "sglang.urls=[http://a:1, http://b:1]").gpus == 2
    one = nodes(1, total=1)  # one GPU runs the quickstart, with either engine
    for found in (
        demand("parallel.tensor=1"),
        demand("parallel.tensor=1", *served[:1], "sglang.colocated=true"),
    ):
        check_possible(found, one)
        assert plan(found, one).ranks == (one[0],)
    shared = demand(
        "rollout.engine=sglang", "sglang.colocated=true", "parallel.data=2", "rollout.engines=4"
    )
    assert shared.gpus == 4 and shared.shared and shared.replicas == 4
    spread = demand(*served, "sglang.nodes=2")
    assert spread == Demand(2, tensor=2, replicas=3, replica_gpus=4, replica_nodes=2)
    assert (spread.gpus, spread.parts, spread.part_gpus) == (14, 6, 2)
    # anywhere
    assert demand(*served, "sglang.nodes=2", "sglang.device=cpu") == replace(alone, replicas=3)


def test_tensor_groups_stay_inside_nodes_of_which_one_gpu_is_taken() -> None:
    """Six nodes of two, one GPU in use: the node with one left takes an engine, or nothing."""
    here = nodes(2, 2, 1, 2, 2, 2, total=2)
    ranks, engines = counts(plan(Demand(10, tensor=2, replicas=1, replica_gpus=1), here), here)
    assert (ranks, engines) == ([2, 2, 0, 2, 2, 2], [0, 0, 1, 0, 0, 0])
    with pytest.raises(PlacementError) as refused:
        plan(Demand(12, tensor=2), here)
    text = str(refused.value)
    assert (
        "12 trainer ranks in tensor groups of 2 need 12 GPUs, 2 of a tensor group on one node,"
        " which" in text
    )
    assert (
        "10.0.0.3 (cccccccc) has 1 of 2 free" in text
        and "10.0.0.1 (aaaaaaaa) has 2 of 2 free" in text
    )


def test_what_is_packed_where() -> None:
    """The emptiest nodes first; context and expert groups inside a node where they fit, tensor
    groups always."""
    here = nodes(4, 8, 8)
    assert counts(plan(Demand(8, tensor=2, replicas=2, replica_gpus=4), here), here) == (
        [0, 8, 0],
        [0, 0, 2],
    )
    assert counts(plan(Demand(8, tensor=2, replicas=3, replica_gpus=4), here), here) == (
        [0, 8, 0],
        [1, 0, 2],
    )
    # in blocks of 8 there is no room for the engine of 8, in blocks of 4, then 2, there is
    whole = Demand(16, tensor=2, context=4)
    assert plan(whole, here).block == 8
    assert plan(replace(whole, ranks=8, replicas=1, replica_gpus=8), here).block == 8
    cut = plan(replace(whole, ranks=8, replicas=1, replica_gpus=8), nodes(6, 8, 2))
    assert cut.block == 2 and sorted(counts(cut, nodes(6, 8, 2))[0]) == [0, 2, 6]
    assert plan(Demand(8, tensor=2, expert=4), nodes(6, 6)).block == 4
    assert plan(Demand(8, tensor=2, expert=8), nodes(8)).block == 8


def test_engines_on_the_trainers_gpus_are_each_inside_one_node() -> None:
    here = nodes(6, 6)
    found = plan(Demand(8, tensor=2, replicas=2, replica_gpus=4, shared=True), here)
    assert [found.sharing(number) for number in range(2)] == [range(4), range(4, 8)]
    # not 6 and 2, where the second would be on two nodes
    assert counts(found, here) == ([4, 4], [1, 1])
    pairs = plan(Demand(8, tensor=2, replicas=4, replica_gpus=2, shared=True), here)
    assert [pairs.sharing(number) for number in range(4)] == [
        range(0, 2),
        range(2, 4),
        range(4, 6),
        range(6, 8),
    ]


def test_a_replica_larger_than_a_node_is_on_several() -> None:
    """A replica of 8 GPUs takes two nodes of 4. With a GPU taken it fits no two nodes, and each
    node is named."""
    here = nodes(4, 4, 4, total=4)
    large = Demand(4, tensor=2, replicas=1, replica_gpus=8, replica_nodes=2)
    found = plan(large, here)
    assert found.ranks == (here[0],) * 4 and found.parts == tuple(here[1:])
    assert [found.gpus_on(node) for node in here] == [4, 4, 4]
    with pytest.raises(PlacementError) as refused:
        plan(large, nodes(4, 4, 3, total=4))
    text = str(refused.value)
    assert "in tensor groups of 2 and 1 engine of 8 GPUs over 2 nodes need 12 GPUs" in text
    assert (
        "10.0.0.3 (cccccccc) has 3 of 4 free" in text
        and "10.0.0.2 (bbbbbbbb) has 4 of 4 free" in text
    )
    # 8 GPUs of one node would do for both parts: in one process's sight, as tensor_parallel alone
    # has it
    with pytest.raises(PlacementError, match="over 2 nodes"):
        plan(replace(large, ranks=2), nodes(10, 3))
    shared = plan(
        Demand(8, tensor=4, replicas=2, replica_gpus=4, replica_nodes=2, shared=True), nodes(4, 4)
    )
    assert [node.address for node in shared.parts] == ["10.0.0.1", "10.0.0.2"] * 2
    assert [shared.sharing(part) for part in range(4)] == [
        range(0, 2),
        range(4, 6),
        range(2, 4),
        range(6, 8),
    ]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_there_is_a_plan_if_and_only_if_there_is_a_way(
    free: list[int], tensor: int, groups: int, replicas: int, size: int, over: int, shared: bool
) -> None:
    """Against every way to deal whole tensor groups to the nodes, and `over` nodes of those with
    room to each replica."""
    here = nodes(*free)
    demand = Demand(tensor * groups, tensor, 1, 1, replicas, size * over, over, shared)

    def fit(rooms: tuple[int, ...], left: int) -> bool:
        if left == 0:
            return True
        if over == 1:
            return sum(rooms) >= left
        ways = combinations([n for n, room in enumerate(rooms) if room], over)
        return any(
            fit(tuple(r - (n in way) for n, r in enumerate(rooms)), left - 1) for way in ways
        )

    ways = [
        dealt
        for dealt in product(*(range(each // tensor + 1) for each in free))
        if sum(dealt) == groups
        and fit(
            tuple(
                (tensor * g if shared else f - tensor * g) // size
                for f, g in zip(free, dealt, strict=True)
            ),
            replicas,
        )
    ]
    try:
        found = plan(demand, here)
    except PlacementError:
        assert not ways
        return
    ranks, engines = counts(found, here)
    assert ways and tuple(each // tensor for each in ranks) in ways
    assert sum(engines) == replicas * over and sum(ranks) == demand.ranks
    for number in range(replicas):
        assert len(set(found.parts[number * over : (number + 1) * over])) == over
    for each, ours, theirs in zip(free, ranks, engines, strict=True):
        assert ours % tensor == 0 and ours <= each
        assert theirs * size <= ours if shared else theirs * size + ours <= each


@pytest.mark.parametrize(
    ("parallel", "free", "inside"),
    [
        ({"tensor": 2, "context": 2, "data": 2, "pipeline": 2}, (4, 8, 4), ("tensor", "context")),
        ({"tensor": 2, "data": 4, "expert": 4, "sequence": True}, (4, 4), ("tensor", "expert")),
        ({"tensor": 2, "context": 2, "data": 2}, (2, 6), ("tensor",)),
        ({"tensor": 4, "data": 2, "pipeline": 2}, (4, 5, 7, 4), ("tensor",)),
    ],
)
def test_megatrons_own_groups_are_inside_nodes(
    parallel: dict[str, int], free: tuple[int, ...], inside: tuple[str, ...]
) -> None:
    layout = ParallelConfig.model_validate(parallel)
    demand = Demand(layout.world_size, layout.tensor, layout.context, layout.expert)
    found = plan(demand, nodes(*free))
    groups = {
        "tensor": parallel_state.get_tensor_model_parallel_group,
        "context": parallel_state.get_context_parallel_group,
        "expert": parallel_state.get_expert_model_parallel_group,
    }
    for rank in range(layout.world_size):
        with pretend(layout, rank):
            for name in inside:
                members = dist.get_process_group_ranks(groups[name]())
                assert rank in members and len(members) == parallel[name]
                assert len({found.ranks[member] for member in members}) == 1, (
                    f"{name} group {members}"
                )


@pytest.mark.parametrize(
    ("demand", "where", "message"),
    [
        (
            Demand(16, tensor=16),
            "parallel.tensor",
            "16 GPUs is larger than a node: the largest has 8",
        ),
        (
            Demand(1, replicas=1, replica_gpus=16),
            "sglang.tensor_parallel",
            (
                r"a replica of 16 GPUs is larger than a(.|\n)*at most 8, or spread it over 2 nodes"
                r" \(sglang.nodes\)"
            ),
        ),
        (
            Demand(1, replicas=1, replica_gpus=48, replica_nodes=4),
            "sglang.tensor_parallel",
            (
                r"48 GPUs over 4 nodes, 12 on each, is larger than a(.|\n)*at most 32, or spread it"
                r" over 6 nodes"
            ),
        ),
        (
            Demand(1, replicas=1, replica_gpus=12, replica_nodes=3),
            "parallel",
            "1 engine of 12 GPUs over 3 nodes need",
        ),
        (
            Demand(4, replicas=3, replica_gpus=2, shared=True),
            "rollout.engines",
            "3 engines of 2 GPUs do not fit on the",
        ),
        (Demand(17), "parallel", "17 trainer ranks need 17 GPUs, more than these nodes could give"),
        (
            Demand(16, replicas=1, replica_gpus=1),
            "parallel",
            "16 trainer ranks and 1 engine of 1 GPUs need 17 GPUs",
        ),
    ],
)
def test_what_could_never_be_placed_is_refused_at_once(
    demand: Demand, where: str, message: str
) -> None:
    """By all GPUs of the nodes, whoever holds them now: the same layout on what is only in use is
    waited for."""
    busy = nodes(0, 1)
    with pytest.raises(ConfigError, match=message) as refused:
        check_possible(demand, busy)
    assert refused.value.where == where
    check_possible(Demand(16, tensor=8), busy)


def test_a_lost_node_is_named_and_not_planned_with() -> None:
    here = nodes(8, 8)
    gone = [here[0], replace(here[1], alive=False)]
    assert counts(plan(Demand(8), gone), gone)[0] == [8, 0]
    with pytest.raises(PlacementError, match=r"10\.0\.0\.2 \(bbbbbbbb\) is lost"):
        plan(Demand(16), gone)
    found = plan(Demand(16), here)
    assert lost_node(found.nodes, here) is None
    for now in (gone, here[:1]):  # known to be dead, and forgotten
        error = lost_node(found.nodes, now)
        assert (
            error is not None
            and "10.0.0.2 (bbbbbbbb)" in str(error)
            and "10.0.0.1" not in str(error)
        )


def test_gpus_that_somebody_else_took_meanwhile_are_named() -> None:
    here = nodes(8, 8)
    found = plan(Demand(8, replicas=1, replica_gpus=4), here)
    error = still_pending(found, [here[0], replace(here[1], free=3)], 30)
    assert "10.0.0.2 (bbbbbbbb) has 3 free of the 4 that the plan needs" in str(
        error
    ) and "10.0.0.1" not in str(error)


FOUR = plan(Demand(4, tensor=2, replicas=1, replica_gpus=2), nodes(4, 2))
SHARED = plan(Demand(4, tensor=2, replicas=2, replica_gpus=2, shared=True), nodes(2, 2))
A, B = (node.id for node in nodes(4, 2))


def test_ranks_are_numbered_by_node_and_gpu() -> None:
    assert [node.id for node in FOUR.ranks] == [A] * 4
    # Ray gives bundles their GPUs in any order; as text, 10 would come before 2
    spots = [Spot(A, ("10",)), Spot(A, ("2",)), Spot(A, ("0",)), Spot(A, ("1",))]
    assert rank_order(FOUR, spots) == [2, 3, 1, 0]
    assert rank_order(
        SHARED, [Spot(A, ("1",)), Spot(A, ("0",)), Spot(B, ("1",)), Spot(B, ("0",))]
    ) == [1, 0, 3, 2]
    assert rank_order(FOUR, [Spot(A)] * 4) == [0, 1, 2, 3]  # simulated GPUs have no index


RANKS = [Spot(A, (str(n),)) for n in range(4)]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            [*RANKS[:3], Spot(B, ("3",))],
            r"rank 3 was to be on node 10\.0\.0\.1 \(aaaaaaaa\), and is on bbbbbbbb",
        ),
        ([*RANKS[:3], Spot(A, ("3", "4"))], "rank 3 was to see 1 GPUs of node .*, and sees 3, 4"),
        (
            [*RANKS[:3], Spot(A, ())],
            "rank 3 was to see 1 GPUs of node .*, and was shown none in particular",
        ),
        (
            [*RANKS[:3], Spot(A, ("1",))],
            r"rank 1 and rank 3 were given the same GPU 1 of node 10\.0\.0\.1",
        ),
    ],
)
def test_ranks_that_are_not_where_they_were_to_be(ranks: list[Spot], message: str) -> None:
    check_ranks(FOUR, RANKS)
    with pytest.raises(PlacementError, match=message):
        check_ranks(FOUR, ranks)


def test_engines_that_are_not_where_they_were_to_be() -> None:
    check_replicas(FOUR, RANKS, [Spot(B, ("2", "3"))])  # of another node than the ranks' 2 and 3
    for spot, message in (
        (Spot(A, ("4", "5")), "engine 0 was to be on node"),
        (Spot(B, ("4",)), "engine 0 was to see 2 GPUs"),
    ):
        with pytest.raises(PlacementError, match=message):
            check_replicas(FOUR, RANKS, [spot])
    beside = plan(Demand(4, replicas=2, replica_gpus=2), nodes(8))
    check_replicas(beside, RANKS, [Spot(A, ("4", "5")), Spot(A, ("6", "7"))])
    with pytest.raises(PlacementError, match="rank 3 and engine 0 were given the same GPU 3"):
        check_replicas(beside, RANKS, [Spot(A, ("3", "4")), Spot(A, ("6", "7"))])
    with pytest.raises(PlacementError, match="engine 0 and engine 1 were given the same GPU 5"):
        check_replicas(beside, RANKS, [Spot(A, ("4", "5")), Spot(A, ("5", "6"))])


SPREAD = plan(Demand(2, replicas=1, replica_gpus=4, replica_nodes=2), nodes(4, 2, total=4))


def test_parts_of_an_engine_that_are_not_where_they_were_to_be() -> None:
    ranks = RANKS[:2]
    check_replicas(SPREAD, ranks, [Spot(A, ("2", "3")), Spot(B, ("0", "1"))])
    for spots, message in (
        (
            [Spot(A, ("2", "3")), Spot(A, ("0", "1"))],
            r"engine 0 \(2/2\) was to be on node 10\.0\.0\.2",
        ),
        ([Spot(A, ("2",)), Spot(B, ("0", "1"))], r"engine 0 \(1/2\) was to see 2 GPUs"),
        (
            [Spot(A, ("1", "2")), Spot(B, ("0", "1"))],
            r"rank 1 and engine 0 \(1/2\) were given the same GPU 1",
        ),
    ):
        with pytest.raises(PlacementError, match=message):
            check_replicas(SPREAD, ranks, spots)
    assert table(SPREAD, ranks, [Spot(A, ("2", "3")), Spot(B, ("0", "1"))])[2:] == [
        "10.0.0.1 (aaaaaaaa)  4 of 4     0-1 on 0-1     0 (1/2) on 2-3",
        "10.0.0.2 (bbbbbbbb)  2 of 4     -              0 (2/2) on 0-1",
    ]


def test_engines_that_share_are_shown_the_gpus_of_their_ranks() -> None:
    ranks = [Spot(A, ("5",)), Spot(A, ("7",)), Spot(B, ("0",)), Spot(B, ("1",))]
    assert shown(SHARED, ranks, 0) == {"CUDA_VISIBLE_DEVICES": "5,7"}
    assert shown(SHARED, ranks, 1) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert shown(FOUR, RANKS, 0) == {}  # Ray shows it its own
    assert shown(SHARED, [Spot(A), Spot(A), Spot(B), Spot(B)], 0) == {}
    check_replicas(SHARED, ranks, [Spot(A, ("5", "7")), Spot(B, ("0", "1"))])
    with pytest.raises(
        PlacementError, match="engine 1 does not see the GPUs of the ranks that it shares"
    ):
        check_replicas(SHARED, ranks, [Spot(A, ("5", "7")), Spot(B, ("1", "0"))])


def test_the_table() -> None:
    assert table(FOUR, RANKS, [Spot(B, ("0", "1"))]) == [
        "placement: 6 GPUs of 2 nodes; blocks of 2 ranks inside a node",
        "node                 GPUs free  trainer ranks  engines",
        "10.0.0.1 (aaaaaaaa)  4 of 8     0-3 on 0-3     -",
        "10.0.0.2 (bbbbbbbb)  2 of 8     -              0 on 0-1",
    ]
    assert table(SHARED) == [
        (
            "placement: 4 GPUs of 2 nodes; blocks of 2 ranks inside a node, engines on the"
            " trainer's GPUs"
        ),
        "node                 GPUs free  trainer ranks  engines",
        "10.0.0.1 (aaaaaaaa)  2 of 8     0-1            0",
        "10.0.0.2 (bbbbbbbb)  2 of 8     2-3            1",
    ]
    assert table(plan(Demand(1), nodes(1)), [Spot(A, ("MIG-1",))])[-1].endswith("0 on MIG-1     -")
