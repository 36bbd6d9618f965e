"""The way of weights from the ranks to the engines, as three interfaces. A WeightStream supplies
the weights, bucket by bucket. A SyncTarget is a destination that bypasses the driver. A Sender is
one rank's end of a target. Ranks know nothing else about engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from megatron_stare.process.workers import Handle
from megatron_stare.weights.sync.stream import Bucket
from megatron_stare.weights.sync.stream_plan import BucketLayout


class Sender(Protocol):
    """One rank's end of a target, kept between updates. Has one caller at a time, and stays usable
    after a failure."""

    def expect(self, prove: bool, first: Bucket | None) -> None:
        """Prepares an update before this sender's turn; sends nothing.

        Args:
            prove: collect checksums, which prove that the values arrived.
            first: the first bucket, if it is ready.
        """

    def begin(self) -> None:
        """Starts this sender's turn: waits until the receivers of the buckets are ready.

        Raises:
            UserError: the receivers cannot be made ready; nothing has been sent.
        """

    def handle(self, bucket: Bucket) -> Any:
        """Returns a handle of a bucket's memory that an engine's rank on the same device can open.
        Needs no turn."""

    def send(self, bucket: Bucket, handles: Sequence[Any] = ()) -> None:
        """Starts to send a bucket, whose memory then belongs to the sender. First waits for the
        previous bucket and raises its error.

        Args:
            handles: one for each rank of the engine, if it opens memory on its devices; none: the
                bucket itself is sent.
        """

    def end(self) -> Any:
        """Waits for the last bucket, raising its error. Returns what the engines are to compare
        with the weights that they hold."""

    def forget(self) -> None:
        """Removes what was left for the engines to fetch, once they have fetched it."""

    def close(self) -> None:
        """Frees what is held between updates."""


class SyncTarget(Protocol):
    """A destination for weights that bypass the driver: the servers of one engine, or of all
    engines of a run.

    The engines' side creates it, and ranks send through it. It is serialised to the ranks and
    compared by value: a rank that gets an equal target keeps its sender.
    """

    @property
    def one_sender_at_a_time(self) -> bool:
        """True if senders must take turns."""

    @property
    def leaves_files(self) -> bool:
        """True if engines fetch files that senders leave, until the senders are told to
        `forget`."""

    @property
    def owners_send(self) -> bool:
        """True if each rank sends the experts that it holds. Otherwise they are sent like all other
        tensors."""

    @property
    def shares_devices(self) -> bool:
        """True if engines run on the ranks' devices and open memory there. Then all ranks send at
        once, each to the engines on its own device."""

    def here(self, device: torch.device) -> Any:
        """Returns an identifier of this rank's machine and device."""

    def carriers(self, places: Sequence[Any]) -> list[tuple[int, ...]]:
        """Returns for each engine the trainer ranks on the devices of the engine's ranks, in the
        order of the engine's ranks.

        Args:
            places: identifiers of all trainer ranks, see `here`.

        Raises:
            UserError: an engine's rank is on none of the trainer's devices.
        """

    def towards(self, engine: int, rank: int) -> Sender:
        """Makes a sender to one engine alone, see `sender`."""

    def joined(self, targets: Sequence[Any]) -> SyncTarget:
        """Makes a target for the engines of all `targets`, which include this one."""

    def sender(self, rank: int) -> Sender:
        """Makes the sender of a trainer rank."""


class WeightStream(Protocol):
    """One pass over the policy's weights: bucket by bucket to engines in processes of the run, or
    sent to a target by the ranks that hold them."""

    layouts: tuple[BucketLayout, ...]  # what the buckets hold, in order

    def buckets(self, checksums: bool = True) -> Iterator[tuple[Handle, list[Handle]]]:
        """Yields each bucket as a handle for workers, with the calls that it depends on. Wait for
        these calls together with the bucket's use, to see any error at once. Can be iterated once.

        Args:
            checksums: compute the result of the method `checksums`.
        """

    def checksums(self) -> dict[str, str]:
        """Returns the checksum of every streamed tensor, by name, after the last bucket; "" if not
        computed."""

    def prepare(self, target: SyncTarget, prove: bool) -> None:
        """Starts to gather for a `send_to` with the same arguments, which need not follow. Returns
        at once."""

    def send_to(self, target: SyncTarget, prove: bool) -> list[Any]:
        """Sends all weights to the target. Returns what each sender reports for the engines.

        Args:
            prove: report checksums, which prove that the values arrived.

        Raises:
            UserError: the weights could not be sent.
        """

    def forget(self) -> None:
        """Removes what senders left for the engines to fetch."""
