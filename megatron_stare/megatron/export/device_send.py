"""Sends weights to engines that share devices with the trainer.

Several trainer ranks together hold one copy of the model. Each of these ranks broadcasts its pieces
of a bucket to the others, so that every one of these ranks has the whole bucket. Each trainer rank
then makes a handle, through which the engine rank on the same device accesses the bucket's memory.
Among the trainer ranks that share devices with an engine, the first rank collects the handles and
sends one handle to each rank of the engine. Weights move between devices only while the trainer
ranks gather a bucket.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from megatron_stare.megatron.backend.cpu_backend import uses_cuda
from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.export.export import shards
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.sync.device_rooms import DeviceRooms
from megatron_stare.weights.sync.stream import Bucket, everywhere
from megatron_stare.weights.sync.stream_plan import plan_stream
from megatron_stare.weights.sync.target import Sender, SyncTarget


class DeviceSend:
    """Sends weights from one trainer rank. All ranks must create a DeviceSend and make the same
    calls, in order: `prepare`, then `send`."""

    def __init__(
        self, model: list[nn.Module], layout: Layout, shape: ModelShape, bucket_bytes: int
    ) -> None:
        self._model, self._layout = model, layout
        self._plan = plan_stream(shards(model, layout), shape, bucket_bytes, layout.model_group)
        self._rooms = DeviceRooms()
        # By their ranks, and never made twice: torch would name the second group of the same ranks
        # as the first, and connect to the first one's addresses.
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._target: SyncTarget | None = None  # the engines of `_carried` belong to it
        self._carried: list[_Carried] = []  # engines with a rank on this device

    def prepare(self, target: SyncTarget, prove: bool) -> None:
        """If `target` differs from the previous call's target, finds the engines that have a rank
        on this trainer rank's device.

        Args:
            prove: whether the senders compute checksums for the engines to verify.

        Raises:
            UserError: a rank of an engine uses a device that no trainer rank uses.
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
            _Carried(target.towards(engine, rank), rank, ranks, self._group(ranks))
            for engine, ranks in enumerate(target.carriers(places))
            if rank in ranks
        ]

    def _group(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        """Returns the process group of the trainer ranks that share devices with an engine, or None
        if there is only one such rank."""
        members = tuple(sorted(set(ranks)))
        if len(members) > 1 and members not in self._groups:
            # handles are small objects: gloo gathers them without GPU memory, which NCCL
            # communicators would take
            self._groups[members] = dist.new_group(
                list(members), backend="gloo", use_local_synchronization=True
            )
        return self._groups.get(members)

    @torch.no_grad()
    def send(self) -> list[Any]:
        """Sends all weights. All ranks must call it.

        Returns:
            One `Sender.end` result, which the engine verifies, for each engine whose handles this
                rank collects.

        Raises:
            UserError: sending failed. The other ranks are not left waiting.
        """
        try:
            self._send_all()
        finally:
            self._rooms.close()
            for each in self._carried:
                each.free()
            # the engines on the device take memory next, and cannot see what torch only caches
            if uses_cuda():
                torch.cuda.synchronize()
                torch.cuda.ipc_collect()
                torch.cuda.empty_cache()
        return [each.result() for each in self._carried if each.leads]

    def _send_all(self) -> None:
        """Sends all buckets. After `_send_all` has returned, no variable keeps the last bucket's
        memory alive."""
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

    def close(self) -> None:
        """Closes the connections to the engines. The process groups for sending remain until
        `layout.leave` destroys all process groups."""
        carried, self._carried, self._target = self._carried, [], None
        for each in carried:
            each.close()


class _Carried:
    """An engine that has at least one rank on the device of this trainer rank.

    If sending fails, the object stores the error and does not raise the error immediately, because
    the other trainer ranks wait for this rank in `meet`. The caller must call `result` after the
    last call of `meet`. If an error is stored, `result` raises this error.

    Args:
        ranks: trainer ranks whose memory the engine's ranks open, in the order of the engine's
            ranks.
        group: process group of `ranks`, or None if there is only one rank.
    """

    def __init__(
        self, sender: Sender, rank: int, ranks: tuple[int, ...], group: ProcessGroup | None
    ) -> None:
        self._sender, self._ranks = sender, ranks
        self._members = sorted(set(ranks))
        self.leads = rank == ranks[0]
        self._group = group
        self._told: Any = None
        self._error: Exception | None = None
        self._failed = False  # whether the first of the ranks has an error; set in `meet`

    def expect(self, prove: bool) -> None:
        self._told = self._error = None
        self._failed = False
        if self.leads:
            self._sender.expect(prove, None)

    def begin(self) -> None:
        self._try(self._sender.begin)

    def hand(self, bucket: Bucket) -> None:
        """Passes the handles of a bucket to the engine. The trainer rank `ranks[0]` collects the
        handles of all trainer ranks in `ranks`. `ranks[0]` then waits until the engine has received
        the previous bucket, and starts to send the handles to the engine. If waiting or sending
        fails, `ranks[0]` stores the error.

        After `hand`, every rank in `ranks` must call `meet`. On every rank, `meet` returns only
        after `ranks[0]` has finished `hand`. If `ranks[0]` has then stored no error, the engine has
        received the previous bucket. If `ranks[0]` has stored an error, later calls of `hand` do
        nothing.
        """
        if self._failed:  # nobody would open or release the handle
            return
        handle = self._sender.handle(bucket)
        handles: list[Any] | None = [handle]
        if self._group is not None:
            handles = [None] * len(self._members) if self.leads else None
            dist.gather_object(handle, handles, dst=self._ranks[0], group=self._group)
        if handles is not None:
            by_rank = dict(zip(self._members, handles, strict=True))
            self._try(self._sender.send, bucket, [by_rank[rank] for rank in self._ranks])

    def free(self) -> None:
        self._sender.free()

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
        """Barrier: waits until all trainer ranks on the engine's devices have called `meet`. When
        `meet` returns, every trainer rank that called `meet` knows whether sending has failed."""
        failed = torch.tensor(int(self._error is not None))
        if self._group is not None:
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group)
        self._failed = bool(failed)

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._told

    def close(self) -> None:
        self._sender.close()
