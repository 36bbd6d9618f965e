"""Trainer and servers that share their devices: who holds what at every moment of a run, by the
trainer's own storages and by what the servers were told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.held import held
from support.models import random_batch
from support.sglang_fake import FakeServer
from torch import Tensor

from megatron_stare.cluster import inline
from megatron_stare.cluster.colocation import Colocation
from megatron_stare.cluster.inline import InlineRunner
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.driver.parts import PhaseMemory
from megatron_stare.driver.policy_trainer import PolicyTrainer
from megatron_stare.driver.training_source import TrainingSource
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.models.shape import ModelShape
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.rollout.engines import replicas
from megatron_stare.rollout.engines.replicas import Replica, Site
from megatron_stare.rollout.engines.sglang.server_engine import SGLangEngine
from megatron_stare.rollout.engines.sglang.tensor_sync import TensorSync
from megatron_stare.rollout.sources.rollout_source import RolloutSource
from megatron_stare.run_dir.run_state import RunState
from megatron_stare.weights.sync.target import WeightStream

MODEL = str(Path(__file__).parents[2] / "assets" / "tiny-adder")
ALL = {"parameters", "gradients", "optimizer"}


class Moments:
    """Records what the trainer has on its device, and the servers of their memory, whenever
    something happens."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.trainer: Trainer | None = None
        self.server: FakeServer | None = None
        self.seen: list[tuple[str, set[str], set[str]]] = []

    def note(self, what: str) -> None:
        parts = (
            {part for part, nbytes in held(self.trainer).items() if nbytes}
            if self.trainer
            else set()
        )
        tags = {"weights", "kv_cache"} - self.server.released if self.server else set()
        self.seen.append((what, parts, tags))

    def at(self, what: str) -> list[tuple[set[str], set[str]]]:
        found = [(parts, tags) for name, parts, tags in self.seen if name == what]
        assert found, what
        return found


MOMENTS = Moments()


class WatchedServer(FakeServer):
    async def request(
        self, method: str, path: str, headers: Any, body: bytes | None
    ) -> tuple[int, bytes]:
        MOMENTS.note(path)
        return await super().request(method, path, headers, body)


class WatchedReplica(Replica):
    def __init__(self, config: Config, number: int, site: Site) -> None:
        MOMENTS.server = self._server = WatchedServer("one")

    def engine(self) -> SGLangEngine:
        client = self._server.client()
        return SGLangEngine(
            client, TensorSync([client]), MODEL, "float32", 2, asyncio.new_event_loop()
        )

    def close(self) -> None: ...

    @classmethod
    def check(cls, config: Config, shape: ModelShape) -> None: ...


class WatchedTrainer(Trainer):
    def __init__(self, *args: Any) -> None:
        MOMENTS.note("before the trainer")
        super().__init__(*args)
        MOMENTS.trainer = self

    def save(self, folder: str) -> None:
        super().save(folder)
        MOMENTS.note("saved")


class Rollouts(RolloutSource):
    """Random batches; the servers compute something for each, and are free after."""

    def __init__(self, runner: InlineRunner, colocation: Colocation) -> None:
        self._runner, self._colocation = runner, colocation

    def next(self, step: int) -> RolloutBatch:
        self._runner.engines.prompt_log_probs([(3, 4, 5)])
        self._colocation.release()
        return random_batch(step, 8, vocab=14)

    def publish(self, weights: WeightStream, version: int) -> None:
        self._runner.engines.update_weights(version, weights)

    def state(self) -> dict[str, int]:
        return {}


class Canary:
    """Servers and trainer compute log-probs after a sync, as AgreementWatch has them do."""

    def __init__(self, runner: InlineRunner) -> None:
        self._runner = runner

    def after_sync(self) -> None:
        batch = random_batch(9, 8, vocab=14)
        self._runner.engines.prompt_log_probs([(3, 4, 5)])
        self._runner.trainers.compare_with(batch, torch.zeros(1, len(batch.rollout_log_probs)), 1.0)
        MOMENTS.note("canary")

    def after_log_probs(self, step: int) -> dict[str, float]:
        return {}


def two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: str | None
) -> tuple[dict[str, Tensor], Any]:
    """A run of two steps with a checkpoint between them. The weights after, and the metrics of
    memory."""
    MOMENTS.forget()
    monkeypatch.setitem(replicas.ENGINES, "sglang", f"{__name__}.WatchedReplica")
    monkeypatch.setattr(inline, "Trainer", WatchedTrainer)
    config = Config.model_validate(
        {
            "model": {"path": MODEL},
            "batch": {"micro_batch_tokens": 48},
            "optimizer": {"lr": 1e-2},
            "algorithm": {"name": "grpo"},
            "rollout": {"engine": "sglang"},
            "sglang": {"colocated": True},
            "memory": {"offload": offload},
        }
    )
    runner = InlineRunner(resolve_run(config))

    @contextlib.contextmanager
    def noted(name: str) -> Iterator[None]:
        yield
        MOMENTS.note(name)

    with contextlib.closing(runner):
        memory = PhaseMemory(noted, runner.trainers, runner.engines)
        for name in ("hold_restarts", "allow_restarts"):
            note = partial(MOMENTS.note, name)
            monkeypatch.setattr(runner.engines, name, note)
        colocation = Colocation(config, runner.trainers, runner.engines)
        canary: Any = Canary(runner)
        rollouts = TrainingSource(
            Rollouts(runner, colocation),
            lambda batch: batch,
            colocation,
            canary,
            memory.phase,
            lambda version: None,
            contextlib.nullcontext,
        )
        state = RunState(method={})
        trainer = PolicyTrainer(config, runner.trainers, state, canary, memory.phase)
        rollouts.publish(trainer.weights(), 0)
        for step in (1, 2):
            trainer.step(rollouts.next(step))
            rollouts.publish(trainer.weights(), step)
            if step == 1:
                (tmp_path / str(offload)).mkdir()
                with memory.phase("checkpoint"), colocation.saving():
                    runner.trainers.save(str(tmp_path / str(offload)))
        runner.trainers.finish_save()
        return runner.trainers.weights(), memory.metrics()


def test_no_two_share_the_device_that_need_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, metrics = two_steps(tmp_path, monkeypatch, None)
    assert MOMENTS.at("before the trainer") == [(set(), set())]
    # started, then released
    assert MOMENTS.at("/server_info")[0] == (set(), {"weights", "kv_cache"})
    for what, parts, tags in MOMENTS.seen:
        assert not ("optimizer" in parts and "kv_cache" in tags), what
        assert not ("gradients" in parts and tags), what
    assert MOMENTS.at("log_probs") == [({"parameters"}, set())] * 2
    assert MOMENTS.at("update") == [(ALL, set())] * 2
    assert MOMENTS.at("/update_weights_from_tensor") == [({"parameters"}, {"weights"})] * 3
    assert MOMENTS.at("canary") == [({"parameters"}, {"weights", "kv_cache"})] * 3
    assert MOMENTS.at("sync") == [(set(), {"weights", "kv_cache"})] * 3
    assert MOMENTS.at("saved") == [({"parameters", "optimizer"}, {"weights"})]
    assert MOMENTS.at("checkpoint") == [(set(), {"weights", "kv_cache"})]
    # a server that restarts sizes its cache by the free memory: the trainer is away from the device
    assert MOMENTS.at("allow_restarts") == [(set(), {"weights", "kv_cache"})] * 4
    assert [name for name, *_ in MOMENTS.seen if name.endswith("_restarts")] == [
        "allow_restarts",
        "hold_restarts",
    ] * 3 + ["allow_restarts"]
    held_from = [i for i, (name, *_) in enumerate(MOMENTS.seen) if name == "hold_restarts"]
    allowed_from = [i for i, (name, *_) in enumerate(MOMENTS.seen) if name == "allow_restarts"]
    for first, last in zip(allowed_from, held_from, strict=False):
        assert not any(parts for _, parts, _ in MOMENTS.seen[first : last + 1])
    for phase in ("rollout", "log_probs", "update", "sync", "checkpoint"):
        assert metrics[f"memory/{phase}_peak_mb"] > 0
    stayed, _ = two_steps(tmp_path, monkeypatch, "none")
    assert moved.keys() == stayed.keys()
    for name, weight in stayed.items():
        assert torch.equal(moved[name], weight), name
    assert {frozenset(parts) for _, parts, _ in MOMENTS.seen[-20:]} == {frozenset(ALL)}


def test_parameters_may_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_steps(tmp_path, monkeypatch, "optimizer")
    for what, parts, tags in MOMENTS.seen[
        MOMENTS.seen.index(("canary", {"parameters"}, {"weights", "kv_cache"})) :
    ]:
        assert "parameters" in parts, what
        assert not ("optimizer" in parts and "kv_cache" in tags), what
    assert MOMENTS.at("saved") == [({"parameters", "optimizer"}, {"weights"})]


class CountedEngines:
    """Servers whose memory is asked for, without anything else."""

    def __init__(self) -> None:
        self.measures_memory, self.reads = True, 0

    def memory_mb(self) -> float | None:
        self.reads += self.measures_memory
        return 1.0 if self.measures_memory else None

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_servers_memory_is_read_in_few_steps() -> None:
    """Reading it walks all of a server's mappings."""
    config = Config.model_validate(
        {
            "model": {"path": MODEL},
            "rollout": {"engine": "sglang"},
            "sglang": {"colocated": True},
        }
    )
    engines: Any = CountedEngines()
    ranks: Any = CountedEngines()
    colocation = Colocation(config, ranks, engines)
    measured = []
    for step in range(1, 31):
        before = engines.reads
        colocation.release()
        with colocation.syncing():
            pass
        if colocation.metrics:
            names = {"memory/engines_freed_mb", "memory/engines_taken_mb"}
            assert colocation.metrics.keys() == names
            measured.append(step)
        assert engines.reads - before == (4 if measured[-1:] == [step] else 0)
    assert measured == [1, 2, 3, 10, 20, 30]
