"""Weights on their way to engines on the trainer's own devices: the ranks that hold the model
between them gather every bucket on each of them, and each hands the engine's rank on its device a
handle of it.

Of the ranks that an engine shares devices with the first collects the handles and sends them, one a
rank of the engine; nothing passes between the devices of two engines but what the ranks of one copy
of the model gather.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.export.export import shards
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.sync.device_rooms import DeviceRooms
from megatron_stare.weights.sync.stream import Bucket, everywhere
from megatron_stare.weights.sync.stream_plan import plan_stream
from megatron_stare.weights.sync.target import Sender, SyncTarget


class DeviceSend:
    """A rank's end. All ranks must make it and make the same calls, in order: `prepare`, then
    `send`."""

    def __init__(
        self, model: list[nn.Module], layout: Layout, shape: ModelShape, bucket_bytes: int
    ) -> None:
        self._model, self._layout = model, layout
        self._plan = plan_stream(shards(model, layout), shape, bucket_bytes, layout.model_group)
        self._rooms = DeviceRooms()
        self._target: SyncTarget | None = None  # that the engines below are of
        self._carried: list[_Carried] = []  # engines with a rank on this device

    def prepare(self, target: SyncTarget, prove: bool) -> None:
        """Finds the engines on this rank's device, where the target is another than before.

        Args:
            prove: tell the engines what proves the values.

        Raises:
            UserError: an engine is on no rank's device.
        """
        if target != self._target:
            self.close()
            self._carried = self._found(target)
            self._target = target
        for each in self._carried:
            each.expect(prove)

    def _found(self, target: SyncTarget) -> list[_Carried]:
        rank, places = self._layout.rank, [None] * self._layout.world
        dist.all_gather_object(places, target.here(next(self._model[0].parameters()).device))
        return [
            _Carried(target.towards(engine, rank), rank, ranks)
            for engine, ranks in enumerate(target.carriers(places))
            if rank in ranks
        ]

    @torch.no_grad()
    def send(self) -> list[Any]:
        """Sends all weights. All ranks must call it.

        Returns:
            What each engine is told whose handles this rank collects.

        Raises:
            UserError: they could not be sent. The other ranks have not waited for it.
        """
        try:
            for each in self._carried:
                each.begin()
            held, group = shards(self._model, self._layout), self._layout.model_group
            for bucket in everywhere(self._plan, held, group, self._rooms):
                for each in self._carried:
                    each.hand(bucket)
                for each in self._carried:
                    each.meet()
            for each in self._carried:
                each.end()
            for each in self._carried:
                each.meet()
        finally:
            self._rooms.close()
        return [each.result() for each in self._carried if each.leads]

    def close(self) -> None:
        """Lets go of the way to the engines."""
        carried, self._carried, self._target = self._carried, [], None
        for each in carried:
            each.close()


class _Carried:
    """An engine of which a rank is on this rank's device.

    What fails here is kept until `result`: the other ranks go on meeting.

    Args:
        ranks: whose memory the engine's ranks open, in the order of these.
    """

    def __init__(self, sender: Sender, rank: int, ranks: tuple[int, ...]) -> None:
        self._sender, self._rank, self._ranks = sender, rank, ranks
        self._members = sorted(set(ranks))
        self.leads = rank == ranks[0]
        self._group: ProcessGroup | None = None
        if len(self._members) > 1:
            # handles are words: they need no GPU, whose communicators would take memory of it
            self._group = dist.new_group(
                self._members, backend="gloo", use_local_synchronization=True
            )
        self._told: Any = None
        self._error: Exception | None = None

    def expect(self, prove: bool) -> None:
        self._told = self._error = None
        if self.leads:
            self._sender.expect(prove, None)

    def begin(self) -> None:
        self._try(self._sender.begin)

    def hand(self, bucket: Bucket) -> None:
        """Hands over a bucket. The one before was taken when the ranks have met after this."""
        handle = self._sender.handle(bucket)
        handles: list[Any] | None = [handle]
        if self._group is not None:
            handles = [None] * len(self._members) if self.leads else None
            dist.gather_object(handle, handles, dst=self._ranks[0], group=self._group)
        if handles is not None:
            by_rank = dict(zip(self._members, handles, strict=True))
            self._try(self._sender.send, bucket, [by_rank[rank] for rank in self._ranks])

    def end(self) -> None:
        self._told = self._try(self._sender.end)

    def _try(self, call: Any, *args: Any) -> Any:
        if not self.leads or self._error is not None:
            return None
        try:
            return call(*args)
        except Exception as error:
            self._error = error
            return None

    def meet(self) -> None:
        """Waits for the other ranks on the engine's devices."""
        if self._group is not None:
            dist.barrier(self._group)

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._told

    def close(self) -> None:
        self._sender.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)
