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
        """Prepares this sender for an update. The caller calls this method before `begin`. Sends no
        weights.

        Args:
            prove: whether to collect checksums, which prove that the values arrived.
            first: the first bucket, or None if the first bucket is not ready.
        """

    def begin(self) -> None:
        """Begins an update. Waits until the receivers are ready for the buckets.

        Raises:
            UserError: the receivers cannot be made ready. No weights have been sent.
        """

    def handle(self, bucket: Bucket) -> Any:
        """Returns a handle of a bucket's memory. An engine rank can open the handle if the engine
        rank uses the same device as this sender's rank. A caller may call `handle` without calling
        `begin` first. Some senders copy the bucket and return a handle of the copy. Such a sender
        keeps the two newest copies until `free` is called."""

    def free(self) -> None:
        """Frees the copies of buckets that `handle` made. This method is called after the engine
        has received every bucket, or after sending has failed."""

    def send(self, bucket: Bucket, handles: Sequence[Any] = ()) -> None:
        """Waits until the previous bucket is sent, and then starts to send a bucket. If the
        previous bucket could not be sent, `send` raises the error of that failure. After this call,
        the bucket's memory belongs to the sender.

        Args:
            handles: one handle for each rank of the engine, if `SyncTarget.shares_devices` is True.
                Without handles, the bucket itself is sent.
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
        """Returns True if only one sender may send weights at a time."""

    @property
    def leaves_files(self) -> bool:
        """Returns True if senders write the weights to files, and engines read the weights from
        these files. The files stay until `forget` is called on the senders."""

    @property
    def owners_send(self) -> bool:
        """Returns True if each rank sends the experts that the rank holds. If `owners_send` is
        False, experts are sent like all other tensors."""

    @property
    def shares_devices(self) -> bool:
        """Returns True if the engines run on the trainer's devices, and open the memory of the
        trainer's ranks to read the weights. If `shares_devices` is True, all ranks send at the same
        time, and each rank sends to the engines on its own device."""

    def here(self, device: torch.device) -> Any:
        """Returns an identifier of this rank's machine and device."""

    def carriers(self, places: Sequence[Any]) -> list[tuple[int, ...]]:
        """Returns one tuple of trainer ranks for each engine. Entry i of the tuple is a trainer
        rank that uses the same device as rank i of the engine. A tuple can contain the same trainer
        rank several times, because several ranks of an engine can use the same device.

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
        gather calls. One rank, the gathering rank, gathers the bucket. Each gather call makes one
        of the other ranks send pieces of the bucket to the gathering rank. Gather calls may still
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
