"""Sends to engines on the ranks' own devices: every tensor, from memory of each of the engine's
devices."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import save_model
from support.ranks import RankPool
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.megatron.export import device_send
from megatron_stare.megatron.export.device_send import DeviceSend
from megatron_stare.megatron.model.model import named_parameters
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.rollout.engines.sglang.tensor_sync import packed
from megatron_stare.weights.sync.device_rooms import FOLDER, PREFIX, DeviceRooms, shared_name
from megatron_stare.weights.sync.stream import Bucket
from megatron_stare.weights.sync.target import Sender

BOUND = 8 * 2**10  # bytes a bucket: far below the model


class Opened(Sender):
    """Stands for an engine: it opens every handle when the next bucket is sent, and not before, as
    a slow server does.

    Args:
        fail_at: fails at the bucket of this number, once.
    """

    def __init__(self, fail_at: int | None) -> None:
        self._fail_at = fail_at
        self._open: tuple[Bucket, Sequence[Any]] | None = None
        self.held: list[dict[str, Tensor]] = []  # by rank of the engine
        self.made = 0  # handles
        self.freed = 0  # updates after which the memory behind handles was freed
        self.closed = False

    def expect(self, prove: bool, first: Bucket | None) -> None:
        self.held, self._open = [], None

    def begin(self) -> None: ...

    def handle(self, bucket: Bucket) -> Any:
        self.made += 1
        name = shared_name(bucket.flat.untyped_storage())
        # a name, not the values
        assert name is not None and len(packed(bucket.tensors())) < bucket.layout.nbytes
        return os.getpid(), name

    def free(self) -> None:
        self.freed += 1

    def send(self, bucket: Bucket, handles: Sequence[Any] = ()) -> None:
        self._take()
        if self._fail_at == 0:
            self._fail_at = None
            raise UserError("lost")
        self._fail_at = None if self._fail_at is None else self._fail_at - 1
        self._open = bucket, handles

    def _take(self) -> None:
        if self._open is None:
            return
        bucket, handles = self._open
        self.held = self.held or [{} for _ in handles]
        for held, (_, name) in zip(self.held, handles, strict=True):
            held |= {n: t.clone() for n, t in bucket.layout.tensors(_values(name, bucket))}

    def end(self) -> Any:
        handles = self._open[1] if self._open else ()
        self._take()
        self._open = None
        return [process for process, _ in handles], self.held

    def forget(self) -> None: ...

    def close(self) -> None:
        self.closed = True


OPENED: list[Opened] = []  # of this rank


def _values(name: str, bucket: Bucket) -> Tensor:
    """Process whose memory the name is of."""
    whole = torch.from_file(
        str(FOLDER / name), shared=True, size=bucket.layout.nbytes, dtype=torch.uint8
    )
    return whole.view(bucket.layout.dtype)


@dataclass(frozen=True)
class OnDevices:
    """Engines whose ranks are on the devices of these ranks of the trainer."""

    engines: tuple[tuple[int, ...], ...]
    fail_at: int | None = None
    one_sender_at_a_time: bool = False
    owners_send: bool = False
    shares_devices: bool = True

    def here(self, device: torch.device) -> Any:
        return os.getpid()

    def carriers(self, places: Sequence[Any]) -> list[tuple[int, ...]]:
        assert len(set(places)) == 4
        return list(self.engines)

    def towards(self, engine: int, rank: int) -> Opened:
        OPENED.append(Opened(self.fail_at if engine == 0 else None))
        return OPENED[-1]


def sent_twice(rank: int, init: str, config: Config, target: OnDevices) -> tuple[Any, ...]:
    """Sends two updates, each of changed weights. Returned are the process, what it tells of each
    update (an error in its words), and the weights."""
    OPENED.clear()
    trainer = Trainer(resolve_run(config), rank, init)
    policy = trainer.policy
    trainer._device_send = DeviceSend(policy.model, policy.layout, policy.shape, BOUND)
    assert len(trainer._device_send._plan.buckets) > 3  # so that rooms are used again
    told: list[Any] = []
    for _ in range(2):
        with torch.no_grad():
            for _, parameter in named_parameters(trainer.policy.model):
                parameter.mul_(2).add_(1)  # other weights than those of the folder
        trainer.prepare_weights(target, prove=True)  # type: ignore[arg-type]
        try:
            told.append(trainer.send_weights())
        except UserError as error:
            told.append(str(error))
    found = os.getpid(), told, trainer.export()
    trainer.close()
    assert all(each.closed for each in OPENED)
    return found


def alive_when_handed_back(rank: int, init: str, config: Config, target: OnDevices) -> list[int]:
    """Returns how many of the buckets' buffers were alive each time that the rank gave its cached
    memory back. Stands in for the calls of a GPU."""
    rooms: list[StorageWeakRef] = []
    alive: list[int] = []

    class Seen(DeviceRooms):
        def __call__(self, *args: Any) -> Tensor:
            room = super().__call__(*args)
            rooms.append(StorageWeakRef(room.untyped_storage()))
            return room

    trainer = Trainer(resolve_run(config), rank, init)
    policy = trainer.policy
    sending = DeviceSend(policy.model, policy.layout, policy.shape, BOUND)
    sending._rooms = Seen()
    sending.prepare(target, False)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_send, "uses_cuda", lambda: True)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "ipc_collect", lambda: None)
        patch.setattr(
            torch.cuda,
            "empty_cache",
            lambda: alive.append(sum(not room.expired() for room in rooms)),
        )
        sending.send()
    sending.close()
    assert len(rooms) > 3
    trainer.close()
    return alive


PAIRS, CROSSED = ((0, 1), (2, 3)), ((1, 0), (3, 2))


@pytest.mark.distributed
def test_no_bucket_is_left_when_a_rank_gives_its_memory_back(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Servers on the same GPU take their cache back next. What torch caches is lost to them."""
    save_model(tmp_path, "qwen3")
    config = config_of(tmp_path, {"data": 4})
    found = ranks.run(alive_when_handed_back, 4, config, OnDevices(((0,), (1,), (2,), (3,))))
    assert found == [[0]] * 4


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "layout", "engines"),
    [
        ("qwen2_tied", {"tensor": 2, "pipeline": 2}, PAIRS),
        ("qwen3", {"tensor": 2, "data": 2}, CROSSED),
        ("qwen3", {"tensor": 2, "data": 2}, ((0, 1, 2, 3),)),  # over two copies of the model
        ("qwen3", {"data": 4}, ((0,), (1,), (2,), (3,))),
        ("qwen3_moe", {"data": 2, "expert": 2, "pipeline": 2}, PAIRS),
        # more ranks of engines than the trainer has, as on CPUs
        ("qwen3", {"data": 4}, ((0, 0), (3,), (0,))),
    ],
    ids=["tp2-pp2-tied", "tp2-dp2", "one-engine", "dp4", "ep2-pp2", "several-a-rank"],
)
def test_every_engine_opens_all_tensors_in_memory_of_its_own_devices(
    ranks: RankPool,
    tmp_path: Path,
    family: str,
    layout: dict[str, int],
    engines: tuple[tuple[int, ...], ...],
) -> None:
    save_model(tmp_path, family)
    config = config_of(tmp_path, layout)
    before = set(FOLDER.glob(f"{PREFIX}*"))
    found = ranks.run(sent_twice, 4, config, OnDevices(engines))
    assert set(FOLDER.glob(f"{PREFIX}*")) == before
    processes, wanted = [process for process, *_ in found], found[0][2]
    for rank, (_, told, _) in enumerate(found):
        leads = [engine for engine in engines if engine[0] == rank]
        assert [len(each) for each in told] == [len(leads)] * 2
        for engine, (opened, held) in zip(leads, told[1], strict=True):
            assert opened == [processes[of] for of in engine]
            for of_rank in held:
                assert of_rank.keys() == wanted.keys()
                assert all(torch.equal(of_rank[name], tensor) for name, tensor in wanted.items())


def sent_to_each(
    rank: int, init: str, config: Config, targets: Sequence[OnDevices]
) -> tuple[list[Any], list[dict[str, Tensor]]]:
    """Sends an update to each of the targets. Returned is what was told, and the weights sent."""
    trainer = Trainer(resolve_run(config), rank, init)
    told, sent = [], []
    for target in targets:
        with torch.no_grad():
            for _, parameter in named_parameters(trainer.policy.model):
                parameter.add_(1)
        trainer.prepare_weights(target, prove=True)  # type: ignore[arg-type]
        told.append(trainer.send_weights())
        sent.append({name: tensor.clone() for name, tensor in trainer.export().items()})
    trainer.close()
    return told, sent


@pytest.mark.distributed
def test_an_engine_that_was_lost_and_came_back_gets_everything(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Its ranks meet again, and those of the other engine go on."""
    save_model(tmp_path, "qwen3")
    fleets = [OnDevices(each) for each in (PAIRS, PAIRS[1:], PAIRS, PAIRS[:1], PAIRS)]
    found = ranks.run(sent_to_each, 4, config_of(tmp_path, {"tensor": 2, "data": 2}), fleets)
    weights = found[0][1]
    for rank, first in ((0, PAIRS[0]), (2, PAIRS[1])):
        for step, (fleet, told) in enumerate(zip(fleets, found[rank][0], strict=True)):
            assert len(told) == (first in fleet.engines)
            for _, held in told:
                for name, tensor in weights[step].items():
                    assert torch.equal(held[0][name], tensor) and torch.equal(held[1][name], tensor)


@pytest.mark.distributed
def test_an_engine_that_fails_is_told_by_its_rank_alone_and_the_next_update_is_whole(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Nobody waits for it meanwhile, and the other engine gets everything."""
    save_model(tmp_path, "qwen3")
    found = ranks.run(
        sent_twice, 4, config_of(tmp_path, {"tensor": 2, "data": 2}), OnDevices(PAIRS, fail_at=1)
    )
    told = [each for _, each, _ in found]
    assert "lost" in told[0][0] and told[1] == [[], []] == told[3]
    (_, other), (_, again) = told[2][0][0], told[0][1][0]
    assert other[0].keys() == again[0].keys() == found[0][2].keys()
    assert all(torch.equal(again[1][name], tensor) for name, tensor in found[0][2].items())


def handles_made(rank: int, init: str, config: Config, target: OnDevices) -> tuple[int, int, int]:
    """Sends an update. Returned are the numbers of handles that the rank made, of buckets, and of
    times that the memory behind handles was freed."""
    OPENED.clear()
    trainer = Trainer(resolve_run(config), rank, init)
    policy = trainer.policy
    sending = DeviceSend(policy.model, policy.layout, policy.shape, BOUND)
    sending.prepare(target, True)  # type: ignore[arg-type]
    with contextlib.suppress(UserError):
        sending.send()
    sending.close()
    trainer.close()
    return OPENED[0].made, len(sending._plan.buckets), OPENED[0].freed


@pytest.mark.distributed
@pytest.mark.parametrize("engines", [PAIRS, ((0,), (1,), (2,), (3,))], ids=["pairs", "single"])
def test_no_handles_are_made_for_an_engine_that_failed(
    ranks: RankPool, tmp_path: Path, engines: tuple[tuple[int, ...], ...]
) -> None:
    """On none of its ranks: nobody opens them, and torch keeps what they are of until someone
    does."""
    save_model(tmp_path, "qwen3")
    config = config_of(tmp_path, {"tensor": 2, "data": 2})
    found = ranks.run(handles_made, 4, config, OnDevices(engines, fail_at=1))
    for rank, (made, buckets, freed) in enumerate(found):
        assert buckets > 3 and freed == 1
        assert made == (2 if rank in engines[0] else buckets)


def config_of(path: Path, layout: dict[str, int]) -> Config:
    sequence = {"sequence": True} if layout.get("expert") and layout.get("tensor") else {}
    given = {"model": {"path": str(path)}, "parallel": {**layout, **sequence}}
    return Config.model_validate(given)
