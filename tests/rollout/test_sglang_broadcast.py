"""Buckets are broadcast as they lie or copied in order; senders and receivers meet at one
address."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import ClassVar

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from megatron_stare.rollout.engines.sglang.broadcast import (
    LOOPBACK,
    address_facing,
    bound_store,
    flat_bytes,
    rank_offsets,
)
from megatron_stare.rollout.engines.sglang.protocol import SGLangError
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout


def test_a_bucket_is_sent_as_it_lies() -> None:
    flat = torch.arange(20, dtype=torch.float32)
    lying = [flat[3:9].view(2, 3), flat[9:10], flat[10:18].view(4, 2)]
    found = flat_bytes(lying)
    assert found.data_ptr() == flat[3:].data_ptr()
    assert torch.equal(found.view(torch.float32), flat[3:18])


def test_what_lies_otherwise_is_copied_in_order() -> None:
    flat = torch.arange(24, dtype=torch.bfloat16)
    for tensors in (
        [flat[:4], flat[8:12]],  # a gap
        [flat[4:8], flat[:4]],  # another order
        [flat[:6].view(2, 3).t(), flat[6:8]],  # not contiguous
        [flat[:4], flat[4:8].clone()],
    ):
        wanted = torch.cat([tensor.reshape(-1) for tensor in tensors])
        assert torch.equal(flat_bytes(tensors).view(torch.bfloat16), wanted)


def test_a_servers_ranks_follow_those_of_the_servers_before_it() -> None:
    """The last number is the size of the group: this process and all their ranks."""
    layouts = [ServerLayout("cpu", 2), ServerLayout("cpu", 4), ServerLayout("cpu", 1)]
    assert rank_offsets(layouts) == [1, 3, 7, 8]
    assert rank_offsets([ServerLayout()]) == [1, 2]


def test_the_store_listens_on_one_address_alone() -> None:
    store = bound_store(LOOPBACK, 2, timedelta(seconds=10))
    listening = {
        c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN
    }
    assert [at.ip for at in listening if at.port == store.port] == [LOOPBACK]
    other = TCPStore(
        LOOPBACK,
        store.port,
        2,
        is_master=False,
        timeout=timedelta(seconds=10),
        wait_for_workers=False,
    )
    store.set("key", "value")
    assert other.get("key") == b"value"


class Sockets:
    """Stands for the network: from which address each host is reached."""

    routes: ClassVar = {"here": "127.0.0.1", "10.0.0.5": "10.0.0.1", "10.0.0.6": "10.0.0.1"}

    def __init__(self, *_: object) -> None:
        self._host = ""

    def __enter__(self) -> Sockets:
        return self

    def __exit__(self, *_: object) -> None: ...

    def connect(self, to: tuple[str, int]) -> None:
        if to[0] not in self.routes:
            raise OSError("no route to host")
        self._host = to[0]

    def getsockname(self) -> tuple[str, int]:
        return self.routes[self._host], 0


def test_servers_are_met_on_the_interface_that_leads_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On loopback where all are here; an address that the others reach as soon as one is not."""
    assert address_facing([f"http://{LOOPBACK}:30000", "http://localhost:30001"]) == LOOPBACK
    monkeypatch.setattr(socket, "socket", Sockets)
    assert address_facing(["http://here:1", "http://here:2"]) == LOOPBACK
    assert address_facing(["http://here:1", "http://10.0.0.5:30000", "http://here:2"]) == "10.0.0.1"
    with pytest.raises(SGLangError, match="no way from this machine to the server") as error:
        address_facing(["http://here:1", "http://elsewhere:1"])
    assert "http://elsewhere:1" in str(error.value)
