"""What is broadcast of a bucket, and where the senders and receivers meet."""

from __future__ import annotations

from datetime import timedelta

import psutil
import torch
from torch.distributed import TCPStore

from megatron_stare.rollout.sglang.broadcast import LOOPBACK, flat_bytes, loopback_store, rank_offsets
from megatron_stare.rollout.sglang.server_layout import ServerLayout


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


def test_the_store_listens_on_loopback_alone() -> None:
    store = loopback_store(2, timedelta(seconds=10))
    listening = {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert [at.ip for at in listening if at.port == store.port] == [LOOPBACK]
    other = TCPStore(LOOPBACK, store.port, 2, is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False)
    store.set("key", "value")
    assert other.get("key") == b"value"
