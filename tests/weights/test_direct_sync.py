"""Weights that the trainer's ranks send to servers themselves, as the driver sees it: it is handed
no bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.sglang_groups import JoiningServer

from megatron_stare.cluster.inline import InlineWorkers
from megatron_stare.cluster.trainer_group import TrainerWeights
from megatron_stare.config.schema import Config
from megatron_stare.rollout.engines import engine_worker
from megatron_stare.rollout.engines.engine import WeightUpdateError
from megatron_stare.rollout.engines.sglang import target
from megatron_stare.rollout.engines.sglang.protocol import SGLangError
from megatron_stare.rollout.engines.sglang.server_engine import SGLangEngine
from megatron_stare.rollout.engines.sglang.target import ServersTarget, make_sync
from megatron_stare.rollout.engines.state import EngineState
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.weights.sync.stream import Bucket
from megatron_stare.weights.sync.stream_plan import BucketLayout, Slot
from megatron_stare.weights.sync.target import SyncTarget

MODEL = str(Path(__file__).parents[2] / "assets" / "tiny-adder")
TENSORS = load_file(Path(MODEL) / "model.safetensors")


class Rank:
    """One trainer rank with all tensors, a bucket each. It has no way to hand out a bucket."""

    def __init__(self) -> None:
        self.prepared = self.forgotten = 0
        self.left_out: set[str] = set()
        self._connection: Any = None
        self._buckets: list[Bucket] = []

    def prepare_weights(self, target: SyncTarget, prove: bool) -> None:
        assert not target.owners_send
        self.prepared += 1
        self._buckets = [
            Bucket(
                BucketLayout(tensor.dtype, (Slot(name, tuple(tensor.shape), 0),)), tensor.flatten()
            )
            for name, tensor in TENSORS.items()
            if name not in self.left_out
        ]
        self._connection = self._connection or target.sender(0)
        self._connection.expect(prove, self._buckets[0])

    def send_weights(self) -> Any:
        self._connection.begin()
        for bucket in self._buckets:
            self._connection.send(bucket)
        return self._connection.end()

    def forget_weights(self) -> None:
        self.forgotten += 1

    def close(self) -> None:
        self._connection.close()


class Up:
    """Stands for what brings engines up."""

    def __init__(self, engine: SGLangEngine) -> None:
        self.engine = lambda: engine

    def close(self) -> None: ...


class Elsewhere(InlineWorkers):
    """Workers that raise only to whoever waits for them, as workers in other processes do."""

    def start_on(self, worker: int, method: str, *args: Any) -> Any:
        try:
            return super().start_on(worker, method, *args)
        except Exception as error:
            return error

    def wait(self, handles: Sequence[Any], *_: Any) -> list[Any]:
        for handle in handles:
            if isinstance(handle, Exception):
                raise handle
        return list(handles)


class Run:
    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, fakes: list[JoiningServer], prove_every: int
    ) -> None:
        by_url = {f"http://{fake.name}": fake for fake in fakes}
        monkeypatch.setattr(target, "SGLangClient", lambda url, key, timeout: by_url[url].client())
        engines = []
        for fake in fakes:
            client, loop = fake.client(), asyncio.new_event_loop()
            sync, to = (
                make_sync("distributed", [client], MODEL, 60),
                ServersTarget("distributed", 60, MODEL),
            )
            engines.append(SGLangEngine(client, sync, MODEL, "float32", 2, loop, target=to))
        monkeypatch.setattr(
            engine_worker, "make_replica", lambda config, number, beside: Up(engines[number])
        )
        config = Config.model_validate({"model": {"path": MODEL}})
        workers = InlineWorkers(
            [engine_worker.EngineWorker(config, number) for number in range(len(fakes))]
        )
        self.rank, self.pool = Rank(), EnginePool(workers, prove_every)
        self._ranks = InlineWorkers([self.rank])

    def sync(self, version: int) -> set[tuple[EngineState, int | None]]:
        self.pool.update_weights(version, TrainerWeights(self._ranks, (), [0]))
        return {(info.state, info.weight_version) for info in self.pool.infos()}

    def close(self) -> None:
        self._ranks.close()
        self.pool.close()


@pytest.fixture
def fakes() -> list[JoiningServer]:
    return [JoiningServer("localhost:1", 2), JoiningServer("localhost:2", 1)]


@pytest.mark.distributed
def test_ranks_send_to_all_servers_and_the_driver_hands_on_what_they_tell(
    monkeypatch, fakes
) -> None:
    run = Run(monkeypatch, fakes, prove_every=2)
    assert run.sync(1) == {(EngineState.HEALTHY, 1)}
    assert run.sync(2) == {(EngineState.UNPROVED, 2)}
    assert (
        "/weights_checker"
        not in fakes[0].calls[fakes[0].calls.index("/update_weight_version") + 1 :]
    )
    assert run.sync(3) == {(EngineState.HEALTHY, 3)}
    assert run.rank.prepared == 3 and run.rank.forgotten == 0  # a broadcast leaves nothing
    assert [len(fake.worlds) for fake in fakes] == [1, 1]  # one group, kept
    run.close()


@pytest.mark.distributed
def test_ranks_gather_while_servers_are_asked_to_pause(monkeypatch, fakes) -> None:
    """From the second update on, when the way is known; nobody has waited for the servers by
    then."""
    run, seen = Run(monkeypatch, fakes[:1], prove_every=1), []
    wait, prepare = run.pool._fleet.workers.wait, run.rank.prepare_weights
    monkeypatch.setattr(
        run.pool._fleet.workers, "wait", lambda *args: seen.append("waited") or wait(*args)
    )
    monkeypatch.setattr(
        run.rank, "prepare_weights", lambda *args: seen.append("prepared") or prepare(*args)
    )
    run.sync(1)
    assert seen[:2] == ["waited", "prepared"]
    seen.clear()
    run.sync(2)
    assert seen[:2] == ["prepared", "waited"] and seen.count("prepared") == 1
    run.close()


@pytest.mark.distributed
def test_what_ranks_gathered_for_servers_that_did_not_pause_is_not_sent_later(
    monkeypatch, fakes
) -> None:
    """The next update gathers anew: by then the policy has moved on."""
    run = Run(monkeypatch, fakes[:1], prove_every=1)
    monkeypatch.setattr(run.pool._fleet, "workers", Elsewhere(run.pool._fleet.workers._workers))
    run.sync(1)
    fakes[0].broken = {"/pause_generation"}
    with pytest.raises(SGLangError, match="is broken"):
        run.sync(2)
    assert run.rank.prepared == 2
    fakes[0].broken = set()
    assert run.sync(3) == {(EngineState.HEALTHY, 3)} and run.rank.prepared == 3
    run.close()


@pytest.mark.distributed
def test_a_failure_is_seen_and_what_follows_it_is_proven(monkeypatch, fakes) -> None:
    """By names and counts alone, and by checksums; what was left for the servers is removed all the
    same."""
    run = Run(monkeypatch, fakes[:1], prove_every=3)
    run.sync(1)
    run.rank.left_out = {"model.norm.weight"}
    with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight was not sent"):
        run.sync(2)
    assert EngineState.DIRTY in {info.state for info in run.pool.infos()}
    run.rank.left_out, fakes[0].changed = set(), (1, "model.norm.weight")
    with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight has other values on rank 1"):
        run.sync(3)
    assert run.rank.forgotten == 2
    fakes[0].changed = None
    assert run.sync(4) == {(EngineState.HEALTHY, 4)}
    run.close()
