"""Sends the weights of one pipeline stage to the inference engines. The first rank of the stage
gathers the weights from the other ranks of the stage, and sends the gathered weights. If
`SyncTarget.owners_send` is True, each rank sends its own experts directly, without a gather."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.export.export import shards
from megatron_stare.megatron.model.model import is_expert
from megatron_stare.models import rule_for
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.sync.stream import Bucket, RoomsByTurns, stream
from megatron_stare.weights.sync.stream_plan import (
    SENDER,
    StreamPlan,
    held_pieces,
    plan_of,
    plan_stream,
)
from megatron_stare.weights.sync.target import Sender, SyncTarget


@dataclass(frozen=True)
class _Plans:
    """Stream plans of one rank.

    `gathered`: plan for the weights that the stage's first rank gathers and sends.
    `own`: plan for the experts that this rank sends to the engines directly, without a gather.
        `own` is None if this rank sends no experts directly.
    """

    gathered: StreamPlan
    own: StreamPlan | None


class StageSend:
    """Sends a pipeline stage's weights. All ranks must create a StageSend. The ranks of a stage
    must make the same calls in this order: `prepare`, `send`, and also `send_own` if ranks send the
    experts that they own."""

    def __init__(
        self,
        model: list[nn.Module],
        layout: Layout,
        shape: ModelShape,
        whole: StreamPlan,
        bucket_bytes: int,
    ) -> None:
        """The argument `whole` is the stream plan for the weights of all pipeline stages. In the
        plan `whole`, all pieces of a tensor come from the ranks of one stage. A tied embedding
        comes from the first stage."""
        self._model, self._layout, self._shape, self._bytes = model, layout, shape, bucket_bytes
        self._group = layout.stage_group
        ranks = set(dist.get_process_group_ranks(self._group))
        planned = [tensor for bucket in whole.buckets for tensor in bucket.tensors]
        mine = [tensor for tensor in planned if {piece.rank for piece in tensor.pieces} <= ranks]
        self._of_stage = {tensor.name for tensor in mine}
        experts = [tensor for tensor in mine if is_expert(tensor.pieces[0].parameter)]
        self._experts = {tensor.name for tensor in experts}
        self._owned = {tensor.name for tensor in experts if tensor.pieces[0].rank == layout.rank}
        self._plans: dict[bool, _Plans] = {}  # keyed by whether owners send
        self._rooms = RoomsByTurns()  # the sender holds at most one bucket during the next gather
        self._own: StreamPlan | None = None  # still to be sent
        self._buckets: Iterator[Bucket | None] = iter(())
        self._first: Bucket | None = None
        self._target: SyncTarget | None = None  # `_sender` belongs to it
        self._sender: Sender | None = None

    def _planned(self, owners_send: bool) -> _Plans:
        if owners_send not in self._plans:
            gathered = self._of_stage - self._experts if owners_send else self._of_stage
            plan = plan_stream(self._holding(gathered), self._shape, self._bytes, self._group)
            owned, own = self._holding(self._owned) if owners_send else [], None
            if owned:
                own = plan_of([held_pieces(owned, self._shape, SENDER)], self._shape, self._bytes)
            self._plans[owners_send] = _Plans(plan, own)
        return self._plans[owners_send]

    def _holding(self, names: set[str]) -> list[Any]:
        """Returns this rank's shards of the Hugging Face tensors `names`."""
        held = shards(self._model, self._layout)
        return [
            shard for shard in held if names.issuperset(rule_for(shard.name, self._shape).sources)
        ]

    @torch.no_grad()
    def prepare(self, target: SyncTarget, prove: bool) -> None:
        """Gathers the first bucket of the current weights. The weights must not change until all
        buckets have been sent.

        Args:
            prove: whether the sender computes checksums for the engines to verify.
        """
        # Drains messages left over from a sync that an error interrupted, which would be mistaken
        # for this one's.
        self._drain()
        if target != self._target:
            self.close()
        self._target = target
        plans = self._planned(target.owners_send)
        self._own = plans.own
        self._buckets = stream(
            plans.gathered, shards(self._model, self._layout), self._group, self._rooms
        )
        self._first = next(self._buckets)
        if self._first is not None or self._own is not None:
            self._sender = self._sender or target.sender(self._layout.rank)
            self._sender.expect(prove, self._first)

    @torch.no_grad()
    def send(self) -> Any:
        """Sends the buckets that the stage gathers, and then this rank's own experts. The stage
        gathers the next bucket while the current bucket is sent.

        Returns:
            The report of `Sender.end` on the first rank of the stage, and None on other ranks. The
                engines compare the report with the weights that they received.

        Raises:
            UserError: sending failed.
        """
        if dist.get_rank(self._group) != SENDER:
            self._drain()
            return None
        try:
            return self._sent(self._gathered_and_own())
        finally:
            self._drain()  # after an error too: other ranks wait until their pieces are taken

    @torch.no_grad()
    def send_own(self) -> Any:
        """Sends the experts that this rank owns and has not sent yet. Returns the report of
        `Sender.end`, or None if this rank has no experts left to send. The engines compare the
        report with the weights that they received.

        Raises:
            UserError: sending failed.
        """
        return self._sent(self._of_own()) if self._own is not None else None

    def _gathered_and_own(self) -> Iterator[Bucket]:
        bucket, self._first = self._first, None
        while bucket is not None:
            yield bucket
            bucket = next(self._buckets, None)
        yield from self._of_own()

    def _of_own(self) -> Iterator[Bucket]:
        plan, self._own = self._own, None
        if plan is not None:
            buckets = stream(plan, shards(self._model, self._layout), rooms=self._rooms)
            yield from (bucket for bucket in buckets if bucket is not None)

    def _sent(self, buckets: Iterator[Bucket]) -> Any:
        assert self._sender is not None
        self._sender.begin()
        for bucket in buckets:
            self._sender.send(bucket)
        return self._sender.end()

    def _drain(self) -> None:
        for _ in self._buckets:
            pass

    def forget(self) -> None:
        """Deletes the weight files that this rank has written for the engines. Does nothing if the
        engines do not read the weights from files."""
        if self._sender is not None:
            self._sender.forget()

    def close(self) -> None:
        """Closes the connections to the engines."""
        if self._sender is not None:
            sender, self._sender = self._sender, None
            sender.close()
