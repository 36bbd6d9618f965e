"""Defines three interfaces for the transfer of weights from the ranks to the engines. A
WeightStream supplies the weights, bucket by bucket. A SyncTarget is a destination to which ranks
send weights directly, and not through the driver. A Sender sends one rank's weights to a target.
To transfer weights, ranks use engines only through the interfaces of this module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from megatron_stare.process.workers import Handle
from megatron_stare.weights.sync.stream import Bucket
from megatron_stare.weights.sync.stream_plan import BucketLayout


class Sender(Protocol):
    """Sends one rank's weights to a target. A rank keeps its Sender between updates. Only one
    caller may use a Sender at a time. A Sender stays usable after a failure."""

    def expect(self, prove: bool, first: Bucket | None) -> None:
        """Prepares this sender for an update, before the sender's turn. Sends no weights.

        Args:
            prove: whether to collect checksums, which prove that the values arrived.
            first: the first bucket, or None if the first bucket is not ready.
        """

    def begin(self) -> None:
        """Starts this sender's turn. Waits until the receivers of the buckets are ready.

        Raises:
            UserError: the receivers cannot be made ready. No weights have been sent.
        """

    def handle(self, bucket: Bucket) -> Any:
        """Returns a handle of a bucket's memory. A rank of an engine on the same device can open
        the handle. This method may also be called outside the sender's turn. The sender may copy
        the bucket, and keeps the copies of two buckets until `free` is called."""

    def free(self) -> None:
        """Frees the memory that the sender keeps for handles. This method is called after the
        engine has received every bucket, or after sending has failed."""

    def send(self, bucket: Bucket, handles: Sequence[Any] = ()) -> None:
        """Waits until the previous bucket is sent, and then starts to send a bucket. If the
        previous bucket could not be sent, `send` raises the error of that failure. After this call,
        the bucket's memory belongs to the sender.

        Args:
            handles: one handle for each rank of the engine, if the engine opens memory on its
                devices. Without handles, the bucket itself is sent.
        """

    def end(self) -> Any:
        """Waits until the last bucket is sent. If the last bucket could not be sent, `end` raises
        the error of that failure. Returns a report about the sent weights, such as names, shapes
        and hashes. The engines compare the report with the weights that the engines hold."""

    def forget(self) -> None:
        """Removes the files that this sender left for the engines. This method is called after the
        engines have fetched the files."""

    def close(self) -> None:
        """Frees the resources that this sender keeps from one update to the next."""


class SyncTarget(Protocol):
    """A destination to which ranks send weights directly, and not through the driver. The
    destination consists of the servers of one engine, or of the servers of all engines of a run.

    Engines create a SyncTarget, and ranks send weights through the SyncTarget. A SyncTarget is
    serialised and sent to the ranks. Ranks compare SyncTargets by value. A rank that receives a
    SyncTarget equal to its previous SyncTarget keeps its Sender.
    """

    @property
    def one_sender_at_a_time(self) -> bool:
        """True if senders must take turns."""

    @property
    def leaves_files(self) -> bool:
        """True if senders write the weights to files, and engines read the weights from these
        files. The files stay until `forget` is called on the senders."""

    @property
    def owners_send(self) -> bool:
        """True if each rank sends the experts that the rank holds. If `owners_send` is False,
        experts are sent like all other tensors."""

    @property
    def shares_devices(self) -> bool:
        """True if engines run on the devices of the trainer's ranks, and receive weights by opening
        the memory of the ranks on these devices. If `shares_devices` is True, all ranks send at the
        same time, and each rank sends to the engines on its own device."""

    def here(self, device: torch.device) -> Any:
        """Returns an identifier of this rank's machine and device."""

    def carriers(self, places: Sequence[Any]) -> list[tuple[int, ...]]:
        """Returns, for each engine, a tuple of trainer ranks. The tuple contains one trainer rank
        for each rank of the engine, in the order of the engine's ranks. A rank of the engine uses
        the same device as the trainer rank at its place in the tuple.

        Args:
            places: identifiers of all trainer ranks, see `here`.

        Raises:
            UserError: a rank of an engine runs on a device that no trainer rank uses.
        """

    def towards(self, engine: int, rank: int) -> Sender:
        """Makes a Sender to a single engine; see `sender`."""

    def joined(self, targets: Sequence[Any]) -> SyncTarget:
        """Combines several targets into one target. The combined target contains the engines of all
        given targets. The target on which `joined` is called must be one of `targets`."""

    def sender(self, rank: int) -> Sender:
        """Makes the Sender with which one trainer rank sends its weights."""


class WeightStream(Protocol):
    """Streams the policy's weights once. With `buckets`, the caller receives the weights bucket by
    bucket and passes them to engines. With `send_to`, the ranks that hold the weights send the
    weights to a target."""

    layouts: tuple[BucketLayout, ...]  # what the buckets hold, in order

    def buckets(self, checksums: bool = True) -> Iterator[tuple[Handle, list[Handle]]]:
        """Yields a pair for each bucket: a handle of the bucket, and a list with the handles of the
        gather calls. One rank gathers the bucket. Each gather call runs on another rank, and sends
        that rank's part of the bucket to the rank that gathers the bucket. Gather calls may still
        be running when `buckets` yields the pair. The caller can start worker calls with the handle
        of the bucket as an argument. The caller should then wait for its worker calls and for the
        gather calls together, in one call of `Workers.wait`. `Workers.wait` raises the error of a
        failed call immediately. The iterator of `buckets` can be used only once.

        Args:
            checksums: whether to compute the checksums that the method `checksums` returns.
        """

    def checksums(self) -> dict[str, str]:
        """Returns the checksum of every streamed tensor, by name. The checksums are complete after
        the last bucket. A checksum is "" if it was not computed."""

    def prepare(self, target: SyncTarget, prove: bool) -> None:
        """Starts to gather the weights for a later call of `send_to` with the same arguments. A
        caller may also call `prepare` without calling `send_to` later. Returns immediately."""

    def send_to(self, target: SyncTarget, prove: bool) -> list[Any]:
        """Sends all weights to the target. Returns one report per sender (see `Sender.end`). The
        caller passes the senders' reports to the engines.

        Args:
            prove: whether to report checksums, which prove that the values arrived.

        Raises:
            UserError: the weights could not be sent.
        """

    def forget(self) -> None:
        """Removes the files that senders left for the engines."""
