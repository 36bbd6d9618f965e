"""How many bytes autograd keeps from forward to backward on a CPU, whose allocator, unlike CUDA's, does not say."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks


class SavedForBackward:
    """The bytes that are kept now, and the most that were since it was last asked. Memory that several saved tensors
    look into counts once, that of the policy itself not at all."""

    def __init__(self) -> None:
        self._own: frozenset[int] = frozenset()
        self._held: dict[int, list[int]] = {}  # address: how many saved tensors look into it, and bytes
        self._now = self._peak = 0

    @contextlib.contextmanager
    def counting(self, own: Collection[UntypedStorage]) -> Iterator[None]:
        """While open, what autograd saves counts until it is let go.

        Args:
            own: the policy's memory.
        """
        self._own = frozenset(storage.data_ptr() for storage in own)
        with saved_tensors_hooks(lambda tensor: _Kept(tensor, self), lambda kept: kept.tensor):
            yield

    def take_peak(self) -> int:
        """Bytes. Counts anew from here."""
        peak, self._peak = self._peak, self._now
        return peak

    def add(self, storage: UntypedStorage) -> int | None:
        """Address of what is counted from here on; None: it is the policy's."""
        address = storage.data_ptr()
        if address in self._own:
            return None
        known = self._held.setdefault(address, [0, storage.nbytes()])
        if not known[0]:
            self._now += known[1]
            self._peak = max(self._peak, self._now)
        known[0] += 1
        return address

    def drop(self, address: int) -> None:
        """One tensor fewer that looks into this memory."""
        known = self._held[address]
        known[0] -= 1
        if not known[0]:
            self._now -= self._held.pop(address)[1]


class _Kept:
    """A saved tensor, for as long as the graph holds it."""

    __slots__ = ("_address", "_count", "tensor")

    def __init__(self, tensor: Tensor, count: SavedForBackward) -> None:
        self._address: int | None = None  # a signal may end this here, and then `__del__` is still called
        self.tensor, self._count = tensor, count
        self._address = count.add(tensor.untyped_storage())

    def __del__(self) -> None:
        if self._address is not None:
            self._count.drop(self._address)
