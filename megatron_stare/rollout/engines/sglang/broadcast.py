"""Broadcasts weights in a process group that consists of one sender and all servers. The sender is
rank 0 of the group. The group's other ranks are the ranks of the first server, then the ranks of
the second server, and so on. The machines on which the servers run do not affect the order of the
ranks.

Each sender forms its own process group through a TCP store. The sender does not register this group
with torch.distributed, because the sender is a rank of the trainer and already has its own default
group.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

from megatron_stare.rollout.engines.sglang.client import ABORT_S, SGLangClient, everywhere
from megatron_stare.rollout.engines.sglang.place import Place
from megatron_stare.rollout.engines.sglang.protocol import SGLangError
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.sync import Bucket, WeightSync, meeting_device

LOOPBACK = "127.0.0.1"
JOIN_S = 120.0  # time limit for all ranks to join; a server may be lost after it was asked to join


class BroadcastSync(WeightSync):
    """Broadcasts each bucket once, to all servers. The process group is made at the first update
    and kept until a broadcast fails.

    Args:
        places: places of the servers, whose ranks may be on several machines. None: all ranks of a
            server are on the machine that answers the server's requests.
    """

    def __init__(
        self,
        clients: Sequence[SGLangClient],
        timeout_s: float,
        places: Sequence[Place] | None = None,
    ) -> None:
        super().__init__(clients)
        self._timeout_s = timeout_s
        # URLs of the machines with ranks of the group
        self._met = [client.url for client in self._clients]
        self._met += [f"http://{address}" for place in places or () for address in place.others]
        self._store: TCPStore | None = None
        self._group: Any = None  # a process group; its class depends on the backend
        self._name = ""
        self._where = torch.device("cpu")

    async def meet(self, layouts: Sequence[ServerLayout]) -> None:
        if self._group is None:
            await self._join(layouts)

    async def _join(self, layouts: Sequence[ServerLayout]) -> None:
        """Creates the process group. A process joins the process group with a blocking call, which
        returns only after all members have joined. This process therefore makes the blocking call
        in a separate thread. While the blocking call waits, this process asks the servers to join
        the process group."""
        self._where = meeting_device(layouts)
        offsets, timeout = rank_offsets(layouts), timedelta(seconds=min(self._timeout_s, JOIN_S))
        world = offsets.pop()
        address = address_facing(self._met)
        # rank 0 holds the store; the servers' rendezvous waits for it
        self._store = bound_store(address, world, timeout)
        # A random name, because a server that never left an earlier run's group refuses another one
        # with the same name.
        self._name = name = f"megatron_stare_{secrets.token_hex(4)}"
        # the servers' group prefixes its keys with these names
        store = PrefixStore(
            f"{self._where.type}/", PrefixStore(f"{name}/", PrefixStore(name, self._store))
        )
        body = {
            "master_address": address,
            "master_port": self._store.port,
            "world_size": world,
            "group_name": name,
            "backend": "nccl" if self._where.type == "cuda" else "gloo",
        }
        joined = await everywhere(
            asyncio.to_thread(self._made, store, world, timeout),
            *(
                client.post("/init_weights_update_group", body | {"rank_offset": offset})
                for offset, client in zip(offsets, self._clients, strict=True)
            ),
        )
        self._group = joined[0]

    def _made(self, store: Store, world: int, timeout: timedelta) -> Any:
        if self._where.type == "cpu":
            return ProcessGroupGloo(store, 0, world, timeout)
        from torch.distributed import ProcessGroupNCCL  # absent in builds without CUDA

        torch.cuda.set_device(self._where)
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        return ProcessGroupNCCL(store, 0, world, options)

    async def send(self, bucket: Bucket, handles: Sequence[str] = ()) -> None:
        assert self._group is not None
        flat = flat_bytes([tensor for _, tensor in bucket]).to(self._where)
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        try:
            await everywhere(
                asyncio.to_thread(self._broadcast, flat),
                *(
                    client.post("/update_weights_from_distributed", body)
                    for client in self._clients
                ),
            )
        except BaseException:
            await self.close()  # its ranks may be at different buckets
            raise

    def _broadcast(self, flat: torch.Tensor) -> None:
        group, limit = self._group, timedelta(seconds=self._timeout_s)
        assert group is not None
        options = BroadcastOptions()
        options.rootRank, options.timeout = 0, limit
        try:
            group.broadcast([flat], options).wait(limit)
        except RuntimeError as error:
            # closes the connections; otherwise servers would wait on them forever
            del group
            self._group = None
            raise SGLangError(
                f"a broadcast of weights failed: {error}", where=self._clients[0].url
            ) from None
        if flat.is_cuda:
            # NCCL's wait blocks only the stream, and the caller may reuse the memory after this
            torch.cuda.synchronize(self._where)

    async def close(self) -> None:
        self._group = None
        name, self._name = self._name, ""
        if name:
            body = {"group_name": name}
            await asyncio.gather(
                *(
                    asyncio.wait_for(c.post("/destroy_weights_update_group", body), ABORT_S)
                    for c in self._clients
                ),
                # a lost server has left the group; a hanging one has ABORT_S
                return_exceptions=True,
            )
        self._store = None


def rank_offsets(layouts: Sequence[ServerLayout]) -> list[int]:
    """Returns the rank offset of each server, followed by the size of the process group. In the
    process group, rank r of a server has the rank `offset + r`, where `offset` is the server's rank
    offset."""
    return list(accumulate((layout.tensor for layout in layouts), initial=1))


def address_facing(urls: Sequence[str]) -> str:
    """Returns this machine's address on the network interface that connects to the servers. Returns
    the loopback address if all servers are on this machine.

    Raises:
        SGLangError: one of the servers is unreachable.
    """
    facing = LOOPBACK
    for url in urls:
        parts = urlsplit(url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                # connecting a datagram socket sends nothing
                probe.connect((parts.hostname, parts.port or 80))
            except OSError as error:
                raise SGLangError(
                    f"there is no way from this machine to the server: {error}", where=url
                ) from error
            found = probe.getsockname()[0]
        # a server on loopback also reaches this machine's other addresses
        if not found.startswith("127."):
            facing = found
    return facing


def bound_store(address: str, world: int, timeout: timedelta) -> TCPStore:
    """Makes a TCP store that listens only on `address`. By default, torch's TCP store listens on
    all addresses of the machine."""
    listening = socket.create_server((address, 0))
    port = listening.getsockname()[1]
    # the store owns the socket from here on
    return TCPStore(
        address,
        port,
        world,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def flat_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates the tensors' bytes. If the tensors are adjacent in memory, returns a view of
    their memory instead of a copy."""
    pieces = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    start = pieces[0]
    end = start.data_ptr()
    for piece in pieces:
        if (
            piece.data_ptr() != end
            or piece.untyped_storage().data_ptr() != start.untyped_storage().data_ptr()
        ):
            return torch.cat(pieces)
        end += piece.numel()
    return start.as_strided((end - start.data_ptr(),), (1,))
