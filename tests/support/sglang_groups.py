"""Servers in this process that join update groups and take broadcasts, rank by rank, as SGLang's
weight updaters do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from support.sglang_fake import FakeServer
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

LIMIT = timedelta(seconds=60)


class JoiningServer(FakeServer):
    """Server of `ranks` ranks. `groups` has each group by name, with a group of each rank; `worlds`
    has the first rank and the size of each group joined, in order."""

    def __init__(self, name: str, ranks: int) -> None:
        super().__init__(name)
        self.ranks = ranks
        self.groups: dict[str, list[ProcessGroupGloo]] = {}
        self.worlds: list[tuple[int, int]] = []  # of each group joined: first rank, size
        # a rank that gets one element of this tensor otherwise
        self.changed: tuple[int, str] | None = None
        self._turn = asyncio.Lock()  # one update request at a time

    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        status, answer = await super().request(method, path, headers, body)
        if status == 200 and path in (
            "/init_weights_update_group",
            "/update_weights_from_distributed",
        ):
            act = self._join if path == "/init_weights_update_group" else self._take
            async with self._turn:
                told = self.bodies[path]
                await asyncio.gather(
                    *(asyncio.to_thread(act, rank, told) for rank in range(self.ranks))
                )
        if status == 200 and path == "/destroy_weights_update_group":
            del self.groups[self.bodies[path]["group_name"]]
        return status, answer

    def _join(self, rank: int, told: Mapping[str, Any]) -> None:
        """Joins as init_custom_process_group does: over TCP, by the group's name, and again in the
        group's helper."""
        name, world = told["group_name"], told["world_size"]
        shared = TCPStore(
            told["master_address"], told["master_port"], world, is_master=False, timeout=LIMIT
        )
        store = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, shared)))
        group = ProcessGroupGloo(store, told["rank_offset"] + rank, world, LIMIT)
        self.groups.setdefault(name, [None] * self.ranks)[rank] = group  # type: ignore[list-item]
        if rank == 0:
            self.worlds.append((told["rank_offset"], world))

    def _take(self, rank: int, told: Mapping[str, Any]) -> None:
        dtypes = [getattr(torch, dtype) for dtype in told["dtypes"]]
        sizes = [
            torch.Size(shape).numel() * dtype.itemsize
            for shape, dtype in zip(told["shapes"], dtypes, strict=True)
        ]
        flat, options = torch.empty(sum(sizes), dtype=torch.uint8), BroadcastOptions()
        options.rootRank = 0
        self.groups[told["group_name"]][rank].broadcast([flat], options).wait(LIMIT)
        parts = zip(told["names"], told["shapes"], dtypes, flat.split(sizes), strict=True)
        for name, shape, dtype, part in parts:
            tensor = part.view(dtype).view(shape)
            if (rank, name) == self.changed:
                tensor.view(-1)[-1] += 1
            self._held[rank].add(name, tensor)
