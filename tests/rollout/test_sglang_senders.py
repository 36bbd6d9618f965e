"""Several senders and several servers: who gets what from whom, and what is proven of it."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import sglang_servers as servers
from support.sglang_fake import SHAPE, FakeServer
from support.sglang_groups import JoiningServer

from megatron_stare.errors import UserError
from megatron_stare.models.shape import ModelShape
from megatron_stare.rollout.engines.engine import WeightUpdateError
from megatron_stare.rollout.engines.sglang import target
from megatron_stare.rollout.engines.sglang.fingerprint import Fingerprint, checksums_of
from megatron_stare.rollout.engines.sglang.place import Place, this_host
from megatron_stare.rollout.engines.sglang.protocol import SGLangError
from megatron_stare.rollout.engines.sglang.served_hash import TiledDigest
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.sync import Sending, Sent, WeightSync
from megatron_stare.rollout.engines.sglang.target import ServersTarget, TargetServer
from megatron_stare.rollout.engines.sglang.update import WeightUpdate
from megatron_stare.weights.sync.stream import Bucket
from megatron_stare.weights.sync.stream_plan import BucketLayout, Slot

TENSORS = servers.weights()
ONE, TWO = "localhost:1", "localhost:2"
LOST_S = 10.0  # until a call that never comes counts as lost


def bucket(names: list[str]) -> Bucket:
    slots, start = [], 0
    for name in names:
        slots.append(Slot(name, tuple(TENSORS[name].shape), start))
        start += TENSORS[name].numel()
    return Bucket(
        BucketLayout(torch.float32, tuple(slots)),
        torch.cat([TENSORS[name].flatten() for name in names]),
    )


def stages() -> list[list[Bucket]]:
    """The model cut in two, as two pipeline stages send it: in two buckets each."""
    first = [name for name in TENSORS if ".layers.0." in name or "embed" in name]
    rest = [name for name in TENSORS if name not in first]
    return [[bucket(names[::2]), bucket(names[1::2])] for names in (first, rest)]


class Run:
    """A weight update as a run does it: the servers' ends are those of engines, the senders those
    of trainer ranks."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, fakes: list[FakeServer], method: str, folder: Path
    ) -> None:
        by_url = {f"http://{fake.name}": fake for fake in fakes}
        monkeypatch.setattr(target, "SGLangClient", lambda url, key, timeout: by_url[url].client())
        self.fakes, alike = fakes, ServersTarget(method, 60.0, str(servers.MODEL), str(folder))
        found = [
            TargetServer(url, "key", ServerLayout("cpu", fake.ranks), Place(), SHAPE, torch.float32)
            for url, fake in by_url.items()
        ]
        each = [replace(alike, servers=(server,)) for server in found]
        self.target = each[0].joined(each)
        self.senders = [self.target.sender(rank) for rank in (0, 2)]

    def update(self, version: int, prove: bool = True, proven: dict | None = None) -> None:
        clients = [fake.client() for fake in self.fakes]
        syncs = [
            target.make_sync(self.target.method, [client], str(servers.MODEL), 60.0)
            for client in clients
        ]
        ends = [
            WeightUpdate([c], sync, version, SHAPE, torch.float32, proven=proven)
            for c, sync in zip(clients, syncs, strict=True)
        ]
        for end in ends:
            asyncio.run(end.begin())
        told: list[Sent] = []
        for sender, sent in zip(self.senders, stages(), strict=True):
            sender.expect(prove, sent[0])
            sender.begin()
            for each in sent:
                sender.send(each)
            told.append(sender.end())
        for end in ends:
            asyncio.run(end.end_sent(Sent.by_all(told)))
        for sender in self.senders:
            sender.forget()

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


@pytest.fixture
def joining() -> list[JoiningServer]:
    return [JoiningServer(ONE, 2), JoiningServer(TWO, 1)]


@pytest.mark.distributed
def test_every_sender_has_a_group_with_all_ranks_of_all_servers(
    monkeypatch, joining, tmp_path
) -> None:
    """Both servers prove, rank by rank, that they hold what the two senders sent between them;
    groups are kept."""
    run = Run(monkeypatch, joining, "distributed", tmp_path)
    for version in (1, 2):
        run.update(version)
        assert [fake.version for fake in joining] == [str(version)] * 2
    assert [fake.worlds for fake in joining] == [[(1, 4)] * 2, [(3, 4)] * 2]
    assert all(len(fake.groups) == 2 for fake in joining)
    run.close()
    assert all(not fake.groups for fake in joining)


@pytest.mark.distributed
def test_an_element_that_arrives_otherwise_in_one_rank_is_named(
    monkeypatch, joining, tmp_path
) -> None:
    """At a proof, by server, rank and tensor; in between it passes."""
    run, name = (
        Run(monkeypatch, joining, "distributed", tmp_path),
        "model.layers.1.mlp.down_proj.weight",
    )
    run.update(1)
    joining[0].changed = (1, name)
    run.update(2, prove=False, proven={name: tensor.shape for name, tensor in TENSORS.items()})
    with pytest.raises(
        WeightUpdateError, match=rf"http://{ONE}: .*{name} has other values on rank 1\n"
    ) as error:
        run.update(3)
    assert "more" not in str(error.value) and TWO not in str(error.value)
    run.close()


@pytest.mark.distributed
def test_a_group_that_failed_is_made_anew(monkeypatch, joining, tmp_path) -> None:
    run = Run(monkeypatch, joining, "distributed", tmp_path)
    run.update(1)
    joining[1].broken = {"/update_weights_from_distributed"}
    joining[0].broken = {"/update_weights_from_distributed"}
    # would wait for those who refused
    monkeypatch.setattr(run.senders[0]._sync, "_broadcast", lambda flat: None)
    with pytest.raises(SGLangError, match="is broken"):
        run.update(2)
    for fake in joining:
        fake.broken = set()
        assert len(fake.groups) == 1  # the other sender's
    monkeypatch.undo()
    run.update(3)
    assert [len(fake.worlds) for fake in joining] == [3, 3]
    run.close()


def test_a_tensor_of_two_senders_is_refused() -> None:
    one, two = Sent({"a": torch.Size([2]), "b": torch.Size([3])}), Sent({"b": torch.Size([3])})
    assert Sent.by_all([one, Sent({"c": torch.Size([1])})]).sizes.keys() == {"a", "b", "c"}
    with pytest.raises(WeightUpdateError, match="'b' was sent twice"):
        Sent.by_all([one, two])


class LoadingServer(FakeServer):
    """Server of two ranks. The first reads the folder it is told of and answers; the other reads
    when all ranks must meet."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.names: list[str] = []
        self.found: list[dict[str, torch.Tensor]] = []  # by rank

    def _answer(self, path, body):  # type: ignore[no-untyped-def]
        if path == "/update_weights_from_disk":
            self.found, self._held = [self._read(Path(body["model_path"]))], self._nothing()
            for name, tensor in self.found[0].items():
                self._held[0].add(name, tensor)
        elif path == "/begin_weight_update":
            self.found.append(
                self._read(Path(self.bodies["/update_weights_from_disk"]["model_path"]))
            )
            return {"success": True}
        return super()._answer(path, body)

    def _read(self, folder: Path) -> dict[str, torch.Tensor]:
        self.names = sorted(file.name for file in folder.iterdir())
        return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def test_senders_write_one_folder_which_is_removed(monkeypatch, tmp_path) -> None:
    """Every tensor once, in files of the rank that sent it, below the folder that was named. It is
    there until every rank has read it, and then no more."""
    fakes = [LoadingServer(ONE), LoadingServer(TWO)]
    run = Run(monkeypatch, fakes, "disk", tmp_path / "shared")
    for version in (1, 2):
        run.update(version)
        for fake in fakes:
            assert len(fake.found) == 2
            for found in fake.found:
                assert found.keys() == TENSORS.keys()
                assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
            weights = [
                f"model-0000{rank}-0000{number}.safetensors" for rank in (0, 2) for number in (1, 2)
            ]
            assert fake.names == ["config.json", "generation_config.json", *weights]
            assert (
                Path(fake.bodies["/update_weights_from_disk"]["model_path"]).parent
                == tmp_path / "shared"
            )
        assert list((tmp_path / "shared").iterdir()) == []
    run.close()


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path) -> None:
    """A folder that cannot be made is named, and one without room; of the latter nothing stays."""
    (tmp_path / "file").touch()
    run = Run(monkeypatch, [FakeServer(ONE)], "disk", tmp_path / "file")
    run.senders[0].expect(True, None)
    with pytest.raises(
        UserError, match=r"cannot be written \(Not a directory\)(?s:.*)sglang\.sync_folder"
    ):
        run.senders[0].begin()
    run.close()
    run = Run(monkeypatch, [FakeServer(ONE)], "disk", tmp_path / "full")
    run.senders[0].expect(True, None)
    run.senders[0].begin()
    monkeypatch.setattr(os, "fsync", full)
    run.senders[0].send(stages()[0][0])
    with pytest.raises(UserError, match="No space left on device"):
        run.senders[0].end()
    monkeypatch.undo()
    run.senders[0].forget()
    assert list((tmp_path / "full").iterdir()) == []
    run.close()


def full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_targets_draw_a_folder_as_they_are_joined_and_do_not_show_the_key() -> None:
    server = TargetServer("http://one", "key", ServerLayout(), Place(), SHAPE, torch.float32)
    alone = ServersTarget("disk", 1.0, "model", servers=(server,))
    one, other = alone.joined([alone]), alone.joined([alone])
    assert one != other and one.folder != other.folder and one.servers == other.servers
    assert "key" not in repr(one).replace("api_key", "")


def test_a_broadcast_waits_as_long_as_a_collective_and_not_as_a_call() -> None:
    server = TargetServer("http://one", "key", ServerLayout(), Place(), SHAPE, torch.float32)
    for limits, waits in (({"collective_s": 77.0}, 77.0), ({}, 7200.0)):
        target = ServersTarget("distributed", 7200.0, "model", servers=(server,), **limits)
        sender = target.towards(0, 0)
        assert sender._sync._timeout_s == waits
        assert sender._clients[0]._timeout_s == 7200.0
        sender.close()


def test_a_server_on_another_machines_loopback_is_refused(monkeypatch, tmp_path) -> None:
    run = Run(monkeypatch, [FakeServer("127.0.0.1")], "tensor", tmp_path)
    server = run.target.servers[0]
    for place, refused in (
        (Place(), False),
        (Place(this_host()), False),
        (Place("node7 1234"), True),
    ):
        there = replace(run.target, servers=(replace(server, place=place),))
        sender = there.joined([there]).sender(0)
        sender.expect(True, None)
        if refused:
            with pytest.raises(Exception, match=r"loopback of node7, .*(?s:.*)sglang\.host"):
                sender.begin()
        else:
            sender.begin()
        sender.close()
    run.close()


EXPERTS = ModelShape(
    family="qwen3_moe",
    layers=1,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=0,
    vocab_size=40,
    max_positions=64,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=False,
    qkv_bias=False,
    qk_norm=True,
    experts=6,
    experts_per_token=2,
    expert_ffn=96,
)


def matrices() -> dict[str, torch.Tensor]:
    """Matrices of six experts. A rank's share of them is more than a tile of the hash, and ends
    within one."""
    generator = torch.Generator().manual_seed(3)
    sizes = {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}
    return {
        f"model.layers.0.mlp.experts.{number}.{kind}_proj.weight": torch.randn(
            size, generator=generator
        )
        for number in range(6)
        for kind, size in sizes.items()
    }


def hashed_by(
    owners: list[tuple[int, ...]], tensors: dict[str, torch.Tensor], layout: ServerLayout
) -> Sent:
    """Hashes that senders which own these experts tell between them, after they were pickled."""
    told = []
    for owned in owners:
        fingerprint, sizes = Fingerprint(EXPERTS, torch.bfloat16, layout), {}
        for name, tensor in tensors.items():
            if int(name.split(".")[5]) in owned:
                fingerprint.add(name, tensor)
                sizes[name] = tensor.shape
        told.append(Sent(sizes, {layout: fingerprint.hashes()}))
    return Sent.by_all(pickle.loads(pickle.dumps(told)))


@pytest.mark.parametrize(
    "layout", [ServerLayout("cuda", 2), ServerLayout("cuda", 2, 2), ServerLayout("cuda")]
)
def test_owners_of_experts_prove_them_together(layout: ServerLayout) -> None:
    """Whatever they own, in whatever order they tell: what SGLang stacks, hashed in one place; and
    no more if one of them has another value, or is missing."""
    tensors = matrices()
    whole = Fingerprint(EXPERTS, torch.bfloat16, layout)
    for name, tensor in tensors.items():
        whole.add(name, tensor)
    want = by_hand(tensors, layout)
    assert whole.checksums() == want
    for owners in ([(0, 1, 2), (3, 4, 5)], [(5,), (0, 2), (1, 3, 4)], [tuple(range(6))]):
        assert checksums_of(hashed_by(owners, tensors, layout).hashed[layout]) == want
    found = checksums_of(hashed_by([(0, 1), (4, 5)], tensors, layout).hashed[layout])
    assert sum(map(len, found)) == 0 if layout.expert == 1 else found != want
    other = dict(tensors)
    other["model.layers.0.mlp.experts.4.up_proj.weight"] = (
        tensors["model.layers.0.mlp.experts.4.up_proj.weight"] * 2
    )
    assert checksums_of(hashed_by([(0, 1, 2), (3, 4, 5)], other, layout).hashed[layout]) != want


def test_a_sender_of_one_server_tells_finished_checksums(monkeypatch) -> None:
    """They pass through the driver, to every engine; unfinished hashes are thousands of times as
    large, and no other sender has a part of them."""

    class Taken(WeightSync):
        async def meet(self, layouts: Sequence[ServerLayout]) -> None: ...
        async def send(self, bucket: object, handles: Sequence[str] = ()) -> None: ...
        async def close(self) -> None: ...

    monkeypatch.setattr(target, "make_sync", lambda *_, **__: Taken([]))
    layout, tensors = ServerLayout("cuda", 2), matrices()
    server = TargetServer(f"http://{ONE}", "key", layout, Place(), EXPERTS, torch.bfloat16)
    to = ServersTarget("tensor", 60.0, str(servers.MODEL), colocated=True, servers=(server,))
    sender = to.towards(0, 0)
    sender.expect(True, None)
    for name, tensor in tensors.items():
        slots = (Slot(name, tuple(tensor.shape), 0),)
        sender.send(Bucket(BucketLayout(torch.float32, slots), tensor.flatten()))
    sent = sender.end()
    sender.close()
    assert (sent.to, sent.hashed) == (server.url, {layout: by_hand(tensors, layout)})


def by_hand(tensors: dict[str, torch.Tensor], layout: ServerLayout) -> list[dict[str, str]]:
    """Gate over up of every expert a rank holds, then down: rows, and columns, cut over the ranks
    that share one."""
    ranks, sharing = [], layout.tensor // layout.expert
    for rank in range(layout.tensor):
        held = range(
            6 // layout.expert * (rank // sharing), 6 // layout.expert * (rank // sharing + 1)
        )
        stacks: dict[str, list[torch.Tensor]] = {"w13_weight": [], "w2_weight": []}
        for number in held:
            gate, up, down = (
                tensors[f"model.layers.0.mlp.experts.{number}.{kind}_proj.weight"].bfloat16()
                for kind in ("gate", "up", "down")
            )
            rows, columns = gate.chunk(sharing), down.chunk(sharing, 1)
            stacks["w13_weight"] += [rows[rank % sharing], up.chunk(sharing)[rank % sharing]]
            stacks["w2_weight"].append(columns[rank % sharing])
        ranks.append(
            {f"model.layers.0.mlp.experts.{name}": hash_of(parts) for name, parts in stacks.items()}
        )
    return ranks


def hash_of(parts: list[torch.Tensor]) -> str:
    digest = TiledDigest()
    digest.update(torch.cat([part.flatten() for part in parts]))
    return digest.hexdigest()


def test_a_bucket_may_change_once_it_was_hashed() -> None:
    """Also a part that came before its turn: memory of buckets is used again."""
    layout, names = (
        ServerLayout(),
        [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkv"],
    )
    told = []
    for order in (names, names[::-1]):
        fingerprint = Fingerprint(SHAPE, torch.float32, layout)
        for name in order:
            tensor = TENSORS[name].clone()
            fingerprint.add(name, tensor)
            tensor.zero_()
        told.append(fingerprint.checksums())
    assert told[0] == told[1] and len(told[0][0]) == 1


def test_a_bucket_is_hashed_ahead_of_its_turn(monkeypatch, tmp_path) -> None:
    """The first one, once; no server hears of it. Whatever the hash comes to is told at the end."""
    fake = FakeServer(ONE)
    run = Run(monkeypatch, [fake], "tensor", tmp_path)
    hashed: list[str] = []
    of = Sending.hash

    def counted(self: Sending, bucket: list[tuple[str, torch.Tensor]]) -> None:
        of(self, bucket)
        hashed.extend(name for name, _ in bucket)

    monkeypatch.setattr(Sending, "hash", counted)
    (first, second), _ = stages()
    sender = run.senders[0]
    sender.expect(True, first)
    sender._hashing.submit(lambda: None).result()  # behind it
    assert hashed == [name for name, _ in first.tensors()] and not fake.calls
    sender.begin()
    for each in (first, second):
        sender.send(each)
    told = sender.end()
    (layout,) = told.hashed
    assert hashed == [*told.sizes]
    alone = Fingerprint(SHAPE, torch.float32, layout)
    for each in (first, second):
        for name, tensor in each.tensors():
            alone.add(name, tensor)
    assert told.hashed[layout] == alone.hashes()
    run.close()


class SlowServer(FakeServer):
    """Takes a bucket only once its sender has gone on."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.gone_on = threading.Event()

    def _load(self, body):  # type: ignore[no-untyped-def]
        if not self.gone_on.wait(LOST_S):
            return {
                "success": False,
                "message": "the sender waits for me, and gathers nothing meanwhile",
            }
        return super()._load(body)


def test_a_rank_goes_on_while_servers_take_its_bucket(monkeypatch, tmp_path) -> None:
    """With one bucket under way at most: the next `send` waits for it, and raises its error."""
    fake = SlowServer(ONE)
    run = Run(monkeypatch, [fake], "tensor", tmp_path)
    (first, second), _ = stages()
    sender = run.senders[0]
    sender.expect(True, None)
    sender.begin()
    sender.send(first)
    fake.gone_on.set()
    sender.send(second)
    assert sender.end().sizes.keys() == {*dict(first.tensors()), *dict(second.tensors())}
    fake.broken = {"/update_weights_from_tensor"}
    sender.expect(True, None)
    sender.begin()
    sender.send(first)
    with pytest.raises(SGLangError, match="is broken"):
        sender.send(second)
    run.close()
