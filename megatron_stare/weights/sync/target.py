"""The way of weights from whoever has them to the engines, as three interfaces: a WeightStream
gives the weights, bucket by bucket; a SyncTarget says where they go, past the driver; a Sender is a
rank's own end of a target. Ranks know nothing of engines beyond this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from megatron_stare.process.workers import Handle
from megatron_stare.weights.sync.stream import Bucket
from megatron_stare.weights.sync.stream_plan import BucketLayout


class Sender(Protocol):
    """A rank's end of a target, kept from one update to the next. One caller at a time; a failure
    leaves it usable."""

    def expect(self, prove: bool, first: Bucket | None) -> None:
        """Opens an update, ahead of this sender's turn: nothing leaves this process.

        Args:
            prove: gather what will prove that the values arrived.
            first: what is sent first, if it is there already.
        """

    def begin(self) -> None:
        """The turn has come: waits until whoever takes the buckets is there.

        Raises:
            UserError: they cannot be brought there; nothing has been sent.
        """

    def handle(self, bucket: Bucket) -> Any:
        """Names a bucket's memory for an engine's rank on this rank's device, which opens it. No
        turn is needed."""

    def send(self, bucket: Bucket, handles: Sequence[Any] = ()) -> None:
        """Starts to send a bucket, whose memory is the sender's now. Waits for the one before,
        raises its error.

        Args:
            handles: of each rank of the one engine, where it opens memory of its device; none: the
                bucket is sent.
        """

    def end(self) -> Any:
        """Returns what the engines are to compare with what they hold. Waits for the last bucket,
        and raises its error."""

    def forget(self) -> None:
        """Removes what was left for the engines to fetch; they have it."""

    def close(self) -> None:
        """Lets go of what is held between updates."""


class SyncTarget(Protocol):
    """A place for weights that do not pass through the driver: the servers of one engine, or of all
    of a run.

    The engines' side describes it, ranks send by it. It travels to them, and is compared by value:
    who is given an equal one keeps its sender.
    """

    @property
    def one_sender_at_a_time(self) -> bool:
        """True where senders must take turns."""

    @property
    def leaves_files(self) -> bool:
        """True where the engines fetch what senders leave, until these are told to `forget`."""

    @property
    def owners_send(self) -> bool:
        """True where a rank sends the experts it holds itself. Else they go the way of all other
        tensors."""

    @property
    def shares_devices(self) -> bool:
        """True where engines are on the ranks' devices, and open memory there. Then all ranks send
        at once, each to the engines on its own device."""

    def here(self, device: torch.device) -> Any:
        """Names this rank's machine and device."""

    def carriers(self, places: Sequence[Any]) -> list[tuple[int, ...]]:
        """Finds, of each engine, the ranks on the devices of its own ranks, in the order of these.

        Args:
            places: of all ranks of the trainer, see `here`.

        Raises:
            UserError: an engine's rank is on no device of the trainer's.
        """

    def towards(self, engine: int, rank: int) -> Sender:
        """Makes a rank's end that leads to one engine alone, see `sender`."""

    def joined(self, targets: Sequence[Any]) -> SyncTarget:
        """Makes the target that leads to the engines of all of these, this one among them."""

    def sender(self, rank: int) -> Sender:
        """Makes a rank's end. Args: rank: of the trainer that sends by it."""


class WeightStream(Protocol):
    """The policy's weights on their way, once: bucket by bucket to engines in processes of the run,
    or sent to a target by those who have them."""

    layouts: tuple[BucketLayout, ...]  # what the buckets hold, in order

    def buckets(self, checksums: bool = True) -> Iterator[tuple[Handle, list[Handle]]]:
        """Gives each bucket as a handle that workers can take, and the calls that it needs: wait
        for them together with the bucket's use, so that an error of any of them is seen at once.
        Can be gone through once.

        Args:
            checksums: compute what `checksums` gives.
        """

    def checksums(self) -> dict[str, str]:
        """Checksums of every tensor that was given out, by name, "" where none were computed; after
        the last bucket."""

    def prepare(self, target: SyncTarget, prove: bool) -> None:
        """Begins to gather for a `send_to` of the same arguments, which need not follow. Returns at
        once."""

    def send_to(self, target: SyncTarget, prove: bool) -> list[Any]:
        """Has all weights sent to the target. Returns what each sender tells the engines of it.

        Args:
            prove: let them tell what proves the values.

        Raises:
            UserError: they could not be sent.
        """

    def forget(self) -> None:
        """Has removed what was left for the engines to fetch."""
