"""Placement on real Ray clusters whose GPUs are simulated: actors are where the plan has them, a
node that is lost is named, and so is one whose GPUs are in use. Nothing computes on a GPU here."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file
from support.cluster import FAKE, Nodes, joined, left_behind, simulated
from support.memory_sink import FILE
from support.parts import First, Part, first_of, part_of
from support.replicas import TOKENIZER, judged
from support.runs import ROOT, metrics, model, train

from megatron_stare.cluster import ray as ray_module
from megatron_stare.cluster import ray_runner
from megatron_stare.cluster.placed import Spot, check_ranks, check_replicas, rank_order, shown
from megatron_stare.cluster.ray import Reservation, WorkerLostError, cluster_nodes, start_actors
from megatron_stare.cluster.ray_runner import planned, reserve
from megatron_stare.config.load import load_config
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.environments.single_turn import SingleTurn
from megatron_stare.errors import ConfigError
from megatron_stare.planning.placement import Awaited, Demand, PlacementError, plan
from megatron_stare.process.memory import own_home
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.rollout.engines.engine_worker import EngineWorker
from megatron_stare.rollout.engines.replicas import Site
from megatron_stare.rollout.engines.state import EngineState
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.rollout_source import Rollouts
from megatron_stare.weights.sync.stream import tensor_checksum
from megatron_stare.weights.sync.stream_plan import BucketLayout, Slot

pytestmark = pytest.mark.distributed
WAIT_S = 60.0


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Nodes]:
    with simulated(2, 2) as nodes, joined(nodes):
        yield nodes


def config(**runtime: object) -> Config:
    given = [model(), *(f"runtime.{name}={value}" for name, value in runtime.items())]
    return load_config(str(ROOT / "configs/quickstart.yaml"), given)


@pytest.mark.wide
@pytest.mark.parametrize(
    "shared",
    [pytest.param(False, id="apart", marks=pytest.mark.slow), pytest.param(True, id="shared")],
)
def test_actors_are_where_the_plan_has_them(two_nodes: Nodes, shared: bool) -> None:
    """Two ranks on one node, and an engine of two GPUs beside them or on theirs; Ray counts and
    shows GPUs as if there were some."""
    resource = "GPU"
    here = [node for node in cluster_nodes(resource) if node.total]
    assert [(node.free, node.total, node.alive) for node in here] == [(2, 2, True)] * 2
    found = plan(Demand(2, tensor=2, replicas=1, replica_gpus=2, shared=shared), here)
    reserved = Reservation(found, resource, WAIT_S)
    started = []
    try:
        started.append(
            ranks := start_actors([reserved.rank(number) for number in range(2)], 1, "rank", WAIT_S)
        )
        spots = reserved.spots(ranks, WAIT_S)
        order = rank_order(found, spots)
        spots = [spots[number] for number in order]
        check_ranks(found, spots)
        assert [spot.gpus for spot in spots] == [("0",), ("1",)]
        started.append(
            engine := start_actors(
                [reserved.part(0)], 1, "engine", WAIT_S, {}, [shown(found, spots, 0)]
            )
        )
        (seen,) = reserved.spots(engine, WAIT_S)
        check_replicas(found, spots, [seen])
        assert (seen.node == spots[0].node) is shared
        assert seen.gpus == ("0", "1")
        until_free(resource, 2 if shared else 0)
    finally:
        for workers in started:
            workers.close()
        reserved.release()
        until_free(resource, 4)


@pytest.mark.wide
def test_the_parts_of_an_engine_are_on_several_nodes(two_nodes: Nodes) -> None:
    """An engine of four GPUs on nodes of two, on those of the ranks. Its worker reaches that of the
    other node, with no help of the driver's, and hears of its end."""
    found = plan(
        Demand(4, tensor=2, replicas=1, replica_gpus=4, replica_nodes=2, shared=True),
        cluster_nodes(FAKE),
    )
    reserved = Reservation(found, FAKE, WAIT_S)
    started = []
    try:
        started += [
            start_actors([reserved.part(number)], 1, "engine", WAIT_S) for number in range(2)
        ]
        seen = [spot for workers in started for spot in reserved.spots(workers, WAIT_S)]
        check_replicas(found, [Spot(node.id) for node in found.ranks], seen)
        first, part = started
        part.build(Part, [(1,)])
        first.build(First, [(Site(part.peers([0]), "10.0.0.1", ("10.0.0.2",)),)])
        assert first.call("asked") == [[f"1 on {found.parts[1].id}", "10.0.0.1", "10.0.0.2"]]
        part.close()
        with pytest.raises(WorkerLostError, match="a engine process died"):
            until_lost(first)
    finally:
        for each in started:
            each.close()
        reserved.release()
        until_free(FAKE, 4)


@pytest.mark.wide
def test_an_engine_that_lost_a_worker_on_another_node_comes_back_whole(two_nodes: Nodes) -> None:
    """Two engines on both nodes. The worker of the second one's part is killed, and comes back on
    its node; the first one's part stays as it is."""
    layout = ("rollout.engine=sglang", "rollout.engines=2", "sglang.device=cuda")
    layout += ("sglang.tensor_parallel=2", "sglang.nodes=2", f"runtime.gpu_resource={FAKE}")
    asked = load_config(str(ROOT / "configs/quickstart.yaml"), [model(), *layout])
    demand = Demand(4, tensor=2, replicas=2, replica_gpus=2, replica_nodes=2, shared=True)
    reserved = Reservation(plan(demand, cluster_nodes(FAKE)), FAKE, WAIT_S)
    started = []
    try:
        started += [
            start_actors([reserved.part(number) for number in numbers], 1, "engine", WAIT_S)
            for numbers in ((0, 2), (1, 3))
        ]
        firsts, others = started
        ray_runner.build_replicas(asked, firsts, others, first_of, part_of)
        before = firsts.call("asked")
        assert [[said[0].split()[0], said[1]] for said in before] == [
            ["1", "engine 0"],
            ["11", "engine 1"],
        ]
        kept, killed = (
            ray.get(actor.__ray_call__.remote(lambda _: os.getpid())) for actor in others._actors
        )
        os.kill(killed, signal.SIGKILL)
        deadline = time.monotonic() + WAIT_S
        while not others.dead(1):
            assert time.monotonic() < deadline
        firsts.replace(1)
        assert firsts.call("asked") == before
        (same, other) = (
            ray.get(actor.__ray_call__.remote(lambda _: os.getpid())) for actor in others._actors
        )
        assert (same, other != killed) == (kept, True)
    finally:
        for each in started:
            each.close()
        reserved.release()
        until_free(FAKE, 4)


def test_workers_on_the_drivers_machine_are_known_by_their_pids(
    two_nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers do not descend from a driver that has joined the cluster."""
    workers = start_actors([{}, {}], 1, "rank", WAIT_S)
    try:
        assert workers.pids_here() == []
        workers.build(Part, [(0,), (1,)])
        assert workers.pids_here() == workers.call("pid")
        workers.replace(0)
        assert workers.pids_here() == workers.call("pid")
        elsewhere = replace(own_home(), space="of another machine")
        with monkeypatch.context() as patched:
            patched.setattr(ray_module, "own_home", lambda: elsewhere)
            assert workers.pids_here() == []
    finally:
        workers.close()
    assert workers.pids_here() == []


def until_lost(engine: Any) -> None:
    """Calls an engine until a call fails, for Ray ends a part after its `close` has returned."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        engine.call("asked")


def until_free(resource: str, gpus: int) -> None:
    """Waits until so many GPUs are counted as free. The count is late by a moment, both when GPUs
    are taken and when they are given back."""
    deadline = time.monotonic() + WAIT_S
    while sum(node.free for node in cluster_nodes(resource)) != gpus:
        assert time.monotonic() < deadline


def test_gpus_in_use_are_waited_for_and_then_named(two_nodes: Nodes) -> None:
    """A tensor group of two fits neither node of which one GPU is taken, though two are free."""
    assert planned(config(gpu_resource=FAKE), 0) is not None
    groups = [ray.util.placement_group([{FAKE: 1}] * 2, strategy="STRICT_SPREAD")]
    assert groups[0].wait(WAIT_S)
    until_free(FAKE, 2)
    try:
        with pytest.raises(PlacementError, match="2 of a tensor group on one node") as refused:
            planned(config(gpu_resource=FAKE), 0)
        for node in cluster_nodes(FAKE):
            assert (f"{node} has 1 of 2 free" in str(refused.value)) is bool(node.total)
    finally:
        ray.util.remove_placement_group(groups[0])
    waited = planned(config(gpu_resource=FAKE), WAIT_S)
    assert waited is not None and len(set(waited.ranks)) == 1


def test_a_run_that_lost_a_node_waits_for_it_and_no_other_does(two_nodes: Nodes) -> None:
    """Three tensor groups of two need a node more than there is, which comes when the run says so.
    A run that never had it is refused at once, and so is one whose time is over."""
    asked = load_config(
        str(ROOT / "configs/quickstart.yaml"),
        ["parallel.data=3", f"runtime.gpu_resource={FAKE}", "eval.prompts=0"],
    )
    said: list[str] = []
    for awaited in (None, Awaited(0, True, said.append)):
        with pytest.raises(ConfigError, match="more than these nodes could give"):
            reserve(asked, awaited)
    assert said == []
    more: list[str] = []

    def tell(line: str) -> None:
        said.append(line)
        if not more:
            more.append(two_nodes.add())

    reserved = reserve(asked, Awaited(WAIT_S, True, tell))
    assert reserved is not None
    try:
        assert (
            more[0] in {node.id for node in reserved.plan.ranks} and len(reserved.plan.nodes) == 3
        )
        assert said[0].startswith(
            "waiting up to 60 s (faults.run.nodes_s) for the GPUs that this run had: 6 trainer"
            " ranks"
        )
    finally:
        reserved.release()
        two_nodes.kill(more[0])
        deadline = time.monotonic() + WAIT_S
        while any(node.alive for node in cluster_nodes(FAKE) if node.id == more[0]):
            assert time.monotonic() < deadline
        until_free(FAKE, 4)


def test_a_run_that_was_on_gpus_is_not_put_on_nodes_without_any(
    two_nodes: Nodes, monkeypatch
) -> None:
    """All of its nodes may be lost at once, and the one that the driver is on has none."""
    monkeypatch.setattr(
        ray_runner,
        "cluster_nodes",
        lambda _: [each for each in cluster_nodes("GPU") if not each.total],
    )
    said: list[str] = []
    assert reserve(config()) is None and reserve(config(), Awaited(0, False, said.append)) is None
    with pytest.raises(PlacementError, match="none of the remaining nodes has GPUs"):
        reserve(config(), Awaited(0, True, said.append))


def test_a_node_that_is_lost_once_more_is_a_loss_once_more(monkeypatch) -> None:
    """While ranks are placed again; at the first start it is said, and ends the run, as ever."""

    class Reserved:
        def release(self) -> None:
            """Nothing was."""

    def lose(*_: object) -> None:
        raise PlacementError("lost: node b")

    for name, stand_in in (
        ("start_ray", lambda _: None),
        ("leave_ray", lambda: None),
        ("reserve", lambda *_: Reserved()),
    ):
        monkeypatch.setattr(ray_runner, name, stand_in)
    monkeypatch.setattr(ray_runner.RayRunner, "_placed", lose)
    run = resolve_run(config())
    with pytest.raises(PlacementError, match="lost: node b"):
        ray_runner.RayRunner(run)
    with pytest.raises(WorkerLostError, match="lost: node b"):
        ray_runner.RayRunner(run, Awaited(WAIT_S, True, print))


@pytest.mark.slow
def test_an_engine_whose_process_is_killed_is_brought_back_where_it_was(two_nodes: Nodes) -> None:
    """On its node and GPU, though the other node has one that is free; beside a rollout that the
    other one makes, and with all weights proved before it is asked for tokens."""
    adder, resource = ROOT / "assets" / "tiny-adder", "GPU"
    nodes = [node for node in cluster_nodes(resource) if node.total]
    reserved = Reservation(plan(Demand(1, replicas=2, replica_gpus=1), nodes), resource, WAIT_S)
    asked = Config.model_validate({"model": {"path": str(adder)}, "rollout": {"max_new_tokens": 4}})
    engines = start_actors(
        [reserved.part(number) for number in range(2)], 1, "rollout engine", WAIT_S
    )
    try:
        before = reserved.spots(engines, WAIT_S)
        engines.build(EngineWorker, [(asked, number) for number in range(2)])
        pool = EnginePool(engines)
        tensors = load_file(adder / "model.safetensors")
        weights = Whole(tensors)
        pool.update_weights(1, weights)
        prompts = [Prompt(n, str(n), "", "", (2, 3 + n)) for n in range(4)]
        params = SamplingParams(1.0, 4, seed=1, step=1, stop_token_ids=(1,))
        rollouts = Rollouts(pool, SingleTurn(asked, TOKENIZER), judged)
        whole = rollouts.make(prompts, 2, params)
        (killed,) = ray.get([engines._actors[0].__ray_call__.remote(lambda actor: os.getpid())])
        os.kill(killed, signal.SIGKILL)
        made = rollouts.make(prompts, 2, params)
        assert [t.tokens.tolist() for t in made] == [t.tokens.tolist() for t in whole]
        pool.update_weights(2, weights)
        assert [info.weight_version for info in pool.infos()] == [2]
        pool._fleet._coming[0].result(WAIT_S)
        pool.update_weights(3, weights)
        assert [(info.state, info.weight_version) for info in pool.infos()] == [
            (EngineState.HEALTHY, 3)
        ] * 2
        assert reserved.spots(engines, WAIT_S) == before
        assert [t.tokens.tolist() for t in rollouts.make(prompts, 2, params)] == [
            t.tokens.tolist() for t in whole
        ]
        assert [line.split()[3] for line in pool.news()] == ["dead", "starting", "dirty", "healthy"]
    finally:
        engines.close()
        reserved.release()
        until_free(resource, 4)


class Whole:
    """All weights in one bucket."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        slots, start = [], 0
        for name, tensor in tensors.items():
            slots.append(Slot(name, tuple(tensor.shape), start))
            start += tensor.numel()
        self.layouts = (BucketLayout(torch.float32, tuple(slots)),)
        self._flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
        self._checksums = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}

    def buckets(self, checksums: bool = True) -> Iterator[tuple[Any, list[Any]]]:
        yield ray.put(self._flat), []

    def checksums(self) -> dict[str, str]:
        return self._checksums


def test_what_somebody_else_took_meanwhile_is_not_waited_for_forever(two_nodes: Nodes) -> None:
    stale = plan(Demand(4, tensor=2), cluster_nodes(FAKE))
    quicker = Reservation(plan(Demand(1), cluster_nodes(FAKE)), FAKE, WAIT_S)
    until_free(FAKE, 3)
    try:
        with pytest.raises(
            PlacementError, match=r"did not set aside 4 GPUs within 0 s.* has 1 free of the 2"
        ):
            Reservation(stale, FAKE, 0)
    finally:
        quicker.release()
        until_free(FAKE, 4)  # the one that was refused holds nothing either


def test_an_actor_that_does_not_start_is_not_waited_for_forever(two_nodes: Nodes) -> None:
    reserved = Reservation(plan(Demand(1), cluster_nodes(FAKE)), FAKE, WAIT_S)
    try:
        never = start_actors([{"resources": {"of no node": 1}}], 1, "rank", WAIT_S)
        with pytest.raises(WorkerLostError, match="a rank did not answer"):
            reserved.spots(never, 0)
    finally:
        reserved.release()
        until_free(FAKE, 4)


def test_a_resource_that_no_node_has_is_refused(two_nodes: Nodes) -> None:
    with pytest.raises(Exception, match="no node of the cluster has the resource 'fake_gpus'"):
        planned(config(gpu_resource="fake_gpus"), 0)


def test_a_node_lost_before_the_start_is_named(two_nodes: Nodes) -> None:
    """While the plan is made, and while its actors start. The last test here: the cluster is one
    node less."""
    found = plan(Demand(4, tensor=2), cluster_nodes(FAKE))
    reserved = Reservation(found, FAKE, WAIT_S)
    victim, other = found.nodes
    two_nodes.kill(victim.id)
    try:
        workers = start_actors([reserved.rank(number) for number in range(4)], 1, "rank", WAIT_S)
        with pytest.raises(
            PlacementError, match=f"lost before the run could start.*{victim.id[:8]}"
        ) as lost:
            reserved.spots(workers, WAIT_S)
        assert other.id[:8] not in str(lost.value)
    finally:
        reserved.release()
    with pytest.raises(PlacementError, match=f"lost before the run could start.*{victim.id[:8]}"):
        Reservation(found, FAKE, WAIT_S)
    with pytest.raises(
        PlacementError, match=rf"{other.id[:8]}\) has . of 2 free.*{victim.id[:8]}\) is lost"
    ):
        plan(Demand(4, tensor=2), cluster_nodes(FAKE))


@pytest.mark.slow
def test_a_run_on_six_nodes_of_which_one_gpu_is_taken(tmp_path: Path) -> None:
    """Three steps of the quickstart over two nodes; a layout for which the taken GPU is missing
    names its node; and a run that joins no cluster starts one of its own beside it."""
    with simulated(6, 2) as nodes, joined(nodes):
        taken = ray.util.placement_group([{FAKE: 1}])
        assert taken.wait(WAIT_S)
        until_free(FAKE, 11)
        (busy,) = (node for node in cluster_nodes(FAKE) if node.free == 1)
        runtime = (
            f"runtime.ray_address={nodes.address}",
            f"runtime.gpu_resource={FAKE}",
            "runtime.interface=lo",
        )
        ports = "runtime.ports=[21000, 21099]"
        done = train(
            model(),
            f"run.dir={tmp_path / 'run'}",
            *runtime,
            ports,
            "observability.sinks=[jsonl, console, support.memory_sink.OwnTree]",
            cwd=tmp_path,
            **{"run.steps": 3, "parallel.data": 2, "eval.prompts": 0},
        )
        assert done.returncode == 0, done.stderr
        rows = metrics(tmp_path / "run")
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert all(row["ratio/max_abs_log"] == 0.0 for row in rows)
        # ranks and engines count, each of which has torch for itself
        own_tree = float((tmp_path / "run" / FILE).read_text())
        whole, *_ = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        assert json.loads(whole)["memory/tree_pss_gb"] > own_tree + 0.2
        lines = (tmp_path / "run" / "placement.txt").read_text().splitlines()
        assert lines[0] == "placement: 4 GPUs of 2 nodes; blocks of 2 ranks inside a node"
        assert [re.split(" {2,}", line)[2] for line in lines[2:]] == ["0-1", "2-3"]
        assert busy.id[:8] not in "".join(lines)
        assert lines[0] in done.stdout

        asked = (model(), f"run.dir={tmp_path / 'refused'}", *runtime, "runtime.placement_s=0")
        refused = train(*asked, cwd=tmp_path, **{"parallel.data": 6})
        assert refused.returncode == 2 and "Traceback" not in refused.stderr
        assert f"({busy.id[:8]}) has 1 of 2 free" in refused.stderr
        assert left_behind(tmp_path / "refused") == []
        rehearsed = train(*asked, "--dry-run", cwd=tmp_path, **{"parallel.data": 2})
        assert rehearsed.returncode == 0, rehearsed.stderr
        assert f"# {lines[0]}" in rehearsed.stdout
        too_large = train(*asked, "--dry-run", cwd=tmp_path, **{"parallel.tensor": 4})
        assert too_large.returncode == 2
        assert (
            "a tensor-parallel group of 4 GPUs is larger than a node: the largest has 2"
            in too_large.stderr
        )
        own = train(
            model(),
            f"run.dir={tmp_path / 'own'}",
            cwd=tmp_path,
            **{"run.steps": 1, "eval.prompts": 0},
        )
        assert own.returncode == 0, own.stderr


@pytest.mark.slow
def test_an_engine_of_eight_gpus_on_nodes_of_four() -> None:
    """Beside a trainer of four; with one GPU taken it is refused, and every node named with what it
    has. It leaves the two nodes, so it stands after all tests on them."""
    layout = (
        "parallel.tensor=4",
        "rollout.engine=sglang",
        "sglang.tensor_parallel=8",
        "sglang.device=cuda",
    )
    asked = load_config(
        str(ROOT / "configs/quickstart.yaml"),
        [*layout, "sglang.nodes=2", f"runtime.gpu_resource={FAKE}"],
    )
    with simulated(3, 4) as nodes, joined(nodes):
        found = planned(asked, 0)
        assert (
            found is not None
            and len(set(found.parts)) == 2
            and set(found.ranks).isdisjoint(found.parts)
        )
        reserved = Reservation(found, FAKE, WAIT_S)
        try:
            workers = start_actors([reserved.part(part) for part in range(2)], 1, "engine", WAIT_S)
            check_replicas(
                found, [Spot(node.id) for node in found.ranks], reserved.spots(workers, WAIT_S)
            )
            workers.close()
        finally:
            reserved.release()
            until_free(FAKE, 12)
        taken = ray.util.placement_group([{FAKE: 1}])
        assert taken.wait(WAIT_S)
        until_free(FAKE, 11)
        (busy,) = (node for node in cluster_nodes(FAKE) if node.free == 3)
        with pytest.raises(PlacementError, match="1 engine of 8 GPUs over 2 nodes") as refused:
            planned(asked, 0)
        assert f"{busy} has 3 of 4 free" in str(refused.value)
        with pytest.raises(ConfigError, match=r"or spread it over 2 nodes \(sglang.nodes\)"):
            planned(
                load_config(
                    str(ROOT / "configs/quickstart.yaml"), [*layout, f"runtime.gpu_resource={FAKE}"]
                ),
                0,
            )
