"""Servers on the trainer's devices: which rank's memory each of their ranks opens, what is sent for
it, and what is proven. And which ways of syncing are refused where servers and trainer share GPUs,
and where they do not."""

from __future__ import annotations

import asyncio
import base64
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import sglang_servers as servers
from support.sglang_fake import SHAPE, FakeServer

from megatron_stare.config.engines_alone import synced_in
from megatron_stare.errors import ConfigError
from megatron_stare.planning.preflight import RUN
from megatron_stare.rollout.engines.engine import WeightUpdateError
from megatron_stare.rollout.engines.replicas import check_sync
from megatron_stare.rollout.engines.sglang import target
from megatron_stare.rollout.engines.sglang.place import Place, carriers, this_host
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.sync import Sent
from megatron_stare.rollout.engines.sglang.target import ServersTarget, TargetServer
from megatron_stare.rollout.engines.sglang.tensor_sync import packed
from megatron_stare.rollout.engines.sglang.update import WeightUpdate
from megatron_stare.weights.sync.device_rooms import FOLDER, PREFIX, DeviceRooms, open_shared
from megatron_stare.weights.sync.stream import Bucket
from megatron_stare.weights.sync.stream_plan import BucketLayout, Slot

TENSORS = servers.weights()
CPU, GPU = ServerLayout("cpu", 2), ServerLayout("cuda", 2)
# ranks 0 to 7: two nodes of four GPUs, whose numbers are not in the order of the ranks
RANKS = [Place(f"node{n // 4} boot", (f"GPU-{n ^ 1}",)) for n in range(8)]


def server(place: Place, layout: ServerLayout = GPU) -> tuple[str, Place, ServerLayout]:
    return "http://one", place, layout


def test_a_server_s_ranks_open_memory_of_the_ranks_on_their_own_gpus() -> None:
    """In the order of the server's ranks, which is that in which it sees its GPUs."""
    found = carriers(
        [
            server(Place("node1 boot", ("GPU-6", "GPU-7"))),
            server(Place("node0 boot", ("GPU-0", "GPU-2"))),
        ],
        RANKS,
    )
    assert found == [(7, 6), (1, 3)]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            Place("node0 boot", ("GPU-0", "GPU-6")),
            "the server is on GPU GPU-6 of node0, but no trainer rank is",
        ),
        (
            Place("node2 boot", ("GPU-0", "GPU-1")),
            "the server is on GPU GPU-0 of node2, but no trainer rank is",
        ),
        (Place("node0 boot", ("GPU-0",)), "the server sees 1 GPUs, but has 2 ranks"),
        (Place(), "the GPUs of the server are not known"),
        (
            Place("node0 boot", ("GPU-0", "GPU-1"), ("10.0.0.2",)),
            "ranks of the server are on 10.0.0.2 as well",
        ),
    ],
)
def test_a_server_on_no_gpu_of_the_trainer_is_refused(place: Place, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        carriers([server(place)], RANKS)
    assert "http://one" in str(error.value)


def test_on_cpus_a_server_opens_memory_of_its_own_machine_s_ranks_by_turns() -> None:
    ranks = [Place("node0"), Place("node1"), Place("node0")]
    found = carriers([server(Place(f"node{n}"), CPU) for n in (0, 1, 0)], ranks)
    assert found == [(0, 2), (1, 1), (0, 2)]
    with pytest.raises(ConfigError, match="the server is on node2, but no trainer rank is"):
        carriers([server(Place("node2"), CPU)], ranks)


def bucket(rooms: DeviceRooms, names: list[str]) -> Bucket:
    slots, start = [], 0
    for name in names:
        slots.append(Slot(name, tuple(TENSORS[name].shape), start))
        start += TENSORS[name].numel()
    made = Bucket(
        BucketLayout(torch.float32, tuple(slots)), rooms(start, torch.float32, torch.device("cpu"))
    )
    for name, room in made.tensors():
        room.copy_(TENSORS[name])
    return made


def test_what_is_sent_names_memory_that_is_opened_where_it_lies() -> None:
    """A bucket of half a megabyte in some hundred bytes a tensor; what changes there is seen by who
    opened it."""
    rooms = DeviceRooms()
    one = bucket(rooms, list(TENSORS))
    opened = dict(pickle.loads(base64.b64decode(packed(one.tensors()))))
    assert opened.keys() == TENSORS.keys() and all(
        torch.equal(opened[n], t) for n, t in TENSORS.items()
    )
    one.flat.zero_()
    assert not any(tensor.any() for tensor in opened.values())
    assert len(packed(one.tensors())) < one.layout.nbytes / 10
    rooms.close()


def test_rooms_are_used_by_turns_and_leave_nothing() -> None:
    rooms, before = DeviceRooms(), set(FOLDER.glob(f"{PREFIX}*"))
    one, two, three = (rooms(n, torch.float32, torch.device("cpu")) for n in (8, 8, 4))
    assert three.data_ptr() == one.data_ptr() != two.data_ptr()
    assert len(set(FOLDER.glob(f"{PREFIX}*")) - before) == 2
    rooms.close()
    assert set(FOLDER.glob(f"{PREFIX}*")) == before


@pytest.mark.parametrize(
    "name", ["../etc/hostname", "sem.other", f"{PREFIX}../../etc/passwd", f"{PREFIX}0000"]
)
def test_nothing_but_a_bucket_of_this_machine_is_opened(name: str) -> None:
    with pytest.raises(ValueError, match="no bucket"):
        open_shared(name, 4)


class Run:
    """Two servers of two ranks, each on the devices of two ranks of the trainer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fakes = [FakeServer("localhost:1"), FakeServer("localhost:2")]
        for fake in self.fakes:
            fake.ranks = 2
        by_url = {f"http://{fake.name}": fake for fake in self.fakes}
        monkeypatch.setattr(target, "SGLangClient", lambda url, key, timeout: by_url[url].client())
        found = [
            TargetServer(url, "key", CPU, Place(this_host()), SHAPE, torch.float32)
            for url in by_url
        ]
        whole = ServersTarget(
            "tensor", 60.0, str(servers.MODEL), colocated=True, servers=tuple(found)
        )
        assert whole.shares_devices and not whole.one_sender_at_a_time and not whole.owners_send
        self.senders = [whole.towards(number, 2 * number) for number in range(2)]
        self.rooms = [DeviceRooms(), DeviceRooms()]  # of the ranks of the second server

    def update(self, other: str | None = None, spoiled: bool = False) -> None:
        """Args: other: a tensor of which the second server is sent other values. spoiled: its last
        rank's alone."""
        ends = [
            WeightUpdate(
                [f.client()],
                target.make_sync("tensor", [f.client()], "", 60.0),
                1,
                SHAPE,
                torch.float32,
            )
            for f in self.fakes
        ]
        told: list[Sent] = []
        for end in ends:
            asyncio.run(end.begin())
        for number, sender in enumerate(self.senders):
            sender.expect(True, None)
            sender.begin()
            for names in (list(TENSORS)[::2], list(TENSORS)[1::2]):
                made = [bucket(rooms, names) for rooms in self.rooms]
                for rank, of_rank in enumerate(made):
                    if number == 1 and other in names and (rank == 1 or not spoiled):
                        dict(of_rank.tensors())[other or ""].view(-1)[0] += 1
                sender.send(made[0], [sender.handle(of_rank) for of_rank in made])
            told.append(sender.end())
        assert [sent.to for sent in told] == ["http://localhost:1", "http://localhost:2"]
        for end, fake in zip(ends, self.fakes, strict=True):
            asyncio.run(end.end_sent(Sent.arrived(told, f"http://{fake.name}")))

    def close(self) -> None:
        for each in (*self.senders, *self.rooms):
            each.close()


def test_each_server_proves_what_its_own_ranks_handed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.update()
    assert [fake.version for fake in run.fakes] == ["1", "1"]
    body = run.fakes[1].bodies["/update_weights_from_tensor"]["serialized_named_tensors"]
    assert len(body) == len(set(body)) == 2  # each rank of the server has memory of its own to open
    run.close()


def test_memory_of_one_device_that_differs_is_named_with_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch)
    with pytest.raises(
        WeightUpdateError,
        match=r"http://localhost:2: .*model\.norm\.weight has other values on rank 1",
    ):
        run.update("model.norm.weight", spoiled=True)
    run.close()


def test_copies_of_the_model_that_differ_are_named_though_each_server_holds_what_it_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch)
    with pytest.raises(WeightUpdateError, match=r"copies of the model differ: model\.norm\.weight"):
        run.update("model.norm.weight")
    run.close()


def test_servers_that_are_attached_to_or_on_several_nodes_are_sent_bytes_on_cpus() -> None:
    one = TargetServer("http://one", "key", CPU, Place("node0"), SHAPE, torch.float32)
    whole = ServersTarget("tensor", 60.0, "", colocated=True, servers=(one,))
    assert whole.shares_devices
    for place in (Place(), Place("node0", (), ("10.0.0.2",))):
        assert not replace(whole, servers=(one, replace(one, place=place))).shares_devices
    assert not replace(whole, colocated=False).shares_devices
    assert not replace(whole, method="distributed").shares_devices


@pytest.mark.parametrize(
    ("device", "colocated", "sync", "message"),
    [
        ("cuda", True, "tensor", None),
        ("cuda", True, "distributed", "two ranks have the same GPU"),
        ("cuda", True, "disk", None),
        ("cuda", False, "tensor", "does not see the trainer's GPUs"),
        ("cuda", False, "distributed", None),
        ("cuda", False, "disk", None),
        *(
            ("cpu", colocated, sync, None)
            for colocated in (True, False)
            for sync in ("tensor", "distributed", "disk")
        ),
    ],
)
def test_a_way_of_syncing_that_the_gpus_do_not_have_is_refused_by_name(
    device: str, colocated: bool, sync: str, message: str | None
) -> None:
    assert "weight sync" in RUN
    asked = servers.config(device=device, colocated=colocated, sync=sync)
    if message is None:
        return check_sync(asked)
    with pytest.raises(ConfigError, match=message) as error:
        check_sync(asked)
    assert error.value.where == "sglang.sync" and "disk" in (error.value.fix or "")


def test_disk_goes_through_the_run_s_directory_unless_a_folder_is_named(tmp_path: Path) -> None:
    assert synced_in(servers.config(), tmp_path).sglang.sync_folder == str(tmp_path / "weight_sync")
    assert (
        synced_in(servers.config(sync_folder="/shared"), tmp_path).sglang.sync_folder == "/shared"
    )
