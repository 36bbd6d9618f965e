"""Measures the memory that a rank holds, and what autograd keeps for backward on a CPU, for its
metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from megatron_stare.megatron.backend.cpu_backend import uses_cuda
from megatron_stare.megatron.optimizer.offload import DeviceState
from megatron_stare.process.memory import device_used_bytes, take_peak_bytes


class SavedForBackward:
    """The bytes that are kept now, and the most that were since it was last asked. Memory that
    several saved tensors look into counts once, that of the policy itself not at all."""

    def __init__(self) -> None:
        self._own: frozenset[int] = frozenset()
        # by address: how many saved tensors share the memory, and its bytes
        self._held: dict[int, list[int]] = {}
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
        # a signal may end this here, and then `__del__` is still called
        self._address: int | None = None
        self.tensor, self._count = tensor, count
        self._address = count.add(tensor.untyped_storage())

    def __del__(self) -> None:
        if self._address is not None:
            self._count.drop(self._address)


class RankMemory:
    """The memory of the rank that has this policy."""

    def __init__(self, policy: DeviceState) -> None:
        self._policy, self._saved = policy, SavedForBackward()

    def counting(self) -> contextlib.AbstractContextManager[None]:
        """While open, what autograd keeps for backward counts to `live_mb`; on CUDA the allocator
        knows."""
        return contextlib.nullcontext() if uses_cuda() else self._saved.counting(self._storages())

    def take_mb(self) -> dict[str, float]:
        """10^6 bytes: `peak_mb`, the most this process held since this was asked last; without CUDA
        `live_mb`, the policy's tensors now and the most that autograd kept since; `device_mb`, what
        all processes hold of its GPU now; what is not known is left out."""
        found = {"peak_mb": take_peak_bytes(), "device_mb": device_used_bytes()}
        if not uses_cuda():
            found["live_mb"] = (
                sum(storage.nbytes() for storage in self._storages()) + self._saved.take_peak()
            )
        return {name: size / 1e6 for name, size in found.items() if size is not None}

    def _storages(self) -> list[UntypedStorage]:
        return [storage for part in self._policy.storages().values() for storage in part]
