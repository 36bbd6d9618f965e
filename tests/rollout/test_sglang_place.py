"""To whom a handle of GPU memory is sent, and that a server can open it."""

from __future__ import annotations

import asyncio
import base64
import io
import pickle

import pytest
import torch
from support import sglang_servers as servers
from support.gpu_handles import OnGPU, gpus, opened_by_sglang, shared_from
from support.sglang_fake import FakeServer

from megatron_stare.errors import ConfigError
from megatron_stare.rollout.engines.sglang.place import Place, require_reach, seen_here, this_host
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.tensor_sync import TensorSync, packed

SEEN = ("GPU-a", "GPU-b", "GPU-c")
MINE = Place("node1 boot", ("GPU-b",))
REFUSED = [
    (Place(), "the GPUs of the server are not known"),
    (Place("node1 boot"), "the GPUs of the server are not known"),
    (Place("node2 boot", SEEN), "the server runs on node2, this rank on node1"),
    (Place("node1 rebooted", SEEN), "the server runs on node1"),
    (Place("node1 boot", ("GPU-a", "GPU-c")), "does not see this rank's GPU GPU-b"),
    (Place("node1 boot", SEEN, ("10.0.0.2",)), "ranks of the server are on 10.0.0.2 as well"),
]


def handle(device: int, seen: tuple[str, ...] = SEEN) -> str:
    """Payload for a tensor on one of the GPUs that the sender sees."""
    tensor = torch.ones(3).as_subclass(OnGPU)
    with gpus(seen), shared_from(device):
        return packed([("model.norm.weight", tensor)])


@pytest.mark.parametrize(("server", "message"), REFUSED)
def test_a_server_that_could_not_open_a_handle_is_refused(server: Place, message: str) -> None:
    require_reach(Place("node1 boot", SEEN), MINE, "http://one")
    with pytest.raises(ConfigError, match=message) as error:
        require_reach(server, MINE, "http://one")
    assert "http://one" in str(error.value) and "sglang.sync=distributed" in str(error.value)


@pytest.mark.parametrize(
    "server", [Place(), Place(this_host(), ("GPU-b",))], ids=["unknown", "sees another"]
)
def test_it_is_refused_before_anything_is_sent(server: Place) -> None:
    """The second of two servers; the first is sent nothing either."""
    fakes = [FakeServer("one"), FakeServer("two")]
    sync = TensorSync([fake.client() for fake in fakes], [Place(this_host(), SEEN), server])
    with gpus(SEEN), pytest.raises(ConfigError) as error:
        asyncio.run(sync.meet([ServerLayout("cuda", 2)] * 2))
    assert "http://two" in str(error.value)
    assert fakes[0].calls == fakes[1].calls == []


def test_bytes_go_to_servers_wherever_they_are() -> None:
    """To a CPU server, from a rank with a GPU or without."""
    for layout in (ServerLayout("cpu"), ServerLayout("cuda")):
        sync = TensorSync([FakeServer("one").client()], [Place("node2 boot")])
        if layout.device == "cpu":
            with gpus(SEEN):
                asyncio.run(sync.meet([layout]))
        else:
            asyncio.run(sync.meet([layout]))


def test_every_gpu_that_is_seen_here_is_told() -> None:
    with gpus(SEEN):
        assert seen_here() == Place(this_host(), SEEN)
    if not torch.cuda.is_available():
        assert seen_here() == Place(this_host())


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING))
def test_sglang_opens_handles_where_they_are_sent_and_nowhere_else() -> None:
    """By its own source: on the GPU of that UUID, whatever its number there; a foreign one kills
    the server."""
    payload = handle(1)
    for seen, number in ((SEEN, "1"), (("GPU-b",), "0"), (("GPU-c", "GPU-a", "GPU-b"), "2")):
        require_reach(Place(MINE.host, seen), MINE, "")
        assert opened_by_sglang(servers.PYTHON, payload, seen) == number
    with pytest.raises(ConfigError):
        require_reach(Place(MINE.host, ("GPU-a", "GPU-c")), MINE, "")
    assert "Invalid device_uuid=GPU-b" in opened_by_sglang(
        servers.PYTHON, payload, ("GPU-a", "GPU-c")
    )


def test_bytes_name_torch_s_own_reader_whatever_stands_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes name torch's reader though megatron-core 0.19 replaces it by its own, which no server
    knows. SGLang puts a reader of its own under torch's name."""
    bucket = [
        ("a", torch.arange(6.0).view(2, 3)),
        ("b", torch.tensor([1, 2], dtype=torch.bfloat16)),
    ]
    torchs = torch.storage._load_from_bytes

    def _load_safely(data: bytes) -> torch.UntypedStorage:
        raise AssertionError("the sender's reader is asked for")

    monkeypatch.setattr(torch.storage, "_load_from_bytes", _load_safely)
    body = base64.b64decode(packed(bucket))
    monkeypatch.setattr(torch.storage, "_load_from_bytes", torchs)
    names = []

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            names.append(f"{module}.{name}")
            return super().find_class(module, name)

    received = Reader(io.BytesIO(body)).load()
    assert "torch.storage._load_from_bytes" in names
    assert not [name for name in names if "safely" in name or name.startswith("megatron")]
    assert [name for name, _ in received] == ["a", "b"]
    assert all(torch.equal(got, sent) for (_, got), (_, sent) in zip(received, bucket, strict=True))
