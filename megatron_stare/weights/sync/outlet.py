"""A way out of the trainer for weights that do not pass through the driver: what the engines' side makes, and the ranks
that send weights use. Ranks know nothing of engines beyond this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from megatron_stare.weights.sync.stream import Bucket


class Connection(Protocol):
    """A sender's end, kept from one update to the next. One caller at a time; a failure leaves it usable."""

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

    def send(self, bucket: Bucket) -> None:
        """Starts to send a bucket, whose memory is the connection's now. Waits for the one before, raises its error."""

    def end(self) -> Any:
        """What the engines are to compare with what they hold. Waits for the last bucket, and raises its error."""

    def forget(self) -> None:
        """Removes what was left for the engines to fetch; they have it."""

    def close(self) -> None:
        """Lets go of what is held between updates."""


class Outlet(Protocol):
    """Describes the way; travels to the ranks, and is compared by value: an equal one keeps its connections."""

    @property
    def one_sender_at_a_time(self) -> bool:
        """Whether senders must take turns."""

    @property
    def leaves_files(self) -> bool:
        """Whether the engines fetch what senders leave, until these are told to `forget`."""

    @property
    def owners_send(self) -> bool:
        """Whether a rank sends the experts it holds itself. Else they go the way of all other tensors."""

    def connect(self, sender: int) -> Connection:
        """Args: sender: rank of the trainer that sends by it."""


class Route(Protocol):
    """One engine's part of the way."""

    def outlet(self, routes: Sequence[Any]) -> Outlet:
        """The way to all engines of a run. Args: routes: of each, this one's among them."""
