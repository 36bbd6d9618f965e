"""Measures a rank's memory for the memory metrics. On a CPU, `SavedForBackward` counts the tensors
that autograd keeps for backward."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from megatron_stare.megatron.backend.cpu_backend import uses_cuda
from megatron_stare.megatron.optimizer.offload import DeviceState
from megatron_stare.process.memory import device_used_bytes, take_peak_bytes


class SavedForBackward:
    """Counts the bytes that autograd currently keeps for backward, and the peak of these bytes
    since the last `take_peak`. If several saved tensors share one storage, the bytes of this
    storage are counted once. The counted bytes exclude the policy's own memory."""

    def __init__(self) -> None:
        self._own: frozenset[int] = frozenset()
        # by address: how many saved tensors share the memory, and its bytes
        self._held: dict[int, list[int]] = {}
        self._now = self._peak = 0

    @contextlib.contextmanager
    def counting(self, own: Collection[UntypedStorage]) -> Iterator[None]:
        """Counts the tensors that autograd saves inside this context. Each tensor is counted until
        autograd releases the tensor.

        Args:
            own: the policy's memory.
        """
        self._own = frozenset(storage.data_ptr() for storage in own)
        with saved_tensors_hooks(lambda tensor: _Kept(tensor, self), lambda kept: kept.tensor):
            yield

    def take_peak(self) -> int:
        """Returns the peak of the counted bytes, and then resets the peak to the number of bytes
        that autograd keeps at the time of this call."""
        peak, self._peak = self._peak, self._now
        return peak

    def add(self, storage: UntypedStorage) -> int | None:
        """Counts a saved tensor's storage. Returns the storage's address, or None if the storage
        belongs to the policy."""
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
        """Records that a saved tensor no longer uses the storage at this address."""
        known = self._held[address]
        known[0] -= 1
        if not known[0]:
            self._now -= self._held.pop(address)[1]


class _Kept:
    """Counts a saved tensor for as long as the autograd graph holds the tensor."""

    __slots__ = ("_address", "_count", "tensor")

    def __init__(self, tensor: Tensor, count: SavedForBackward) -> None:
        # if a signal interrupts this, `__del__` is still called
        self._address: int | None = None
        # detached: a node that keeps its own output would else be held by it for good
        self.tensor, self._count = tensor.detach(), count
        self._address = count.add(tensor.untyped_storage())

    def __del__(self) -> None:
        if self._address is not None:
            self._count.drop(self._address)


class RankMemory:
    """The memory of the rank that holds this policy."""

    def __init__(self, policy: DeviceState) -> None:
        self._policy, self._saved = policy, SavedForBackward()

    def counting(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that counts the tensors that autograd saves for the backward
        pass. `live_mb` includes the counted tensors. On CUDA the context manager does nothing,
        because CUDA's allocator already counts saved tensors."""
        return contextlib.nullcontext() if uses_cuda() else self._saved.counting(self._storages())

    def take_mb(self) -> dict[str, float]:
        """Returns memory in 10^6 bytes. Leaves out each value that cannot be measured on this
        machine.

        `peak_mb` is this process's peak memory since the last call. Without CUDA, `live_mb` is the
        sum of two sizes: the current size of the policy's tensors, and the peak size of the tensors
        that autograd keeps for backward. The peak size of these tensors is the peak since the last
        call of `take_mb`. `device_mb` is the memory that all processes together currently hold on
        this GPU.
        """
        found = {"peak_mb": take_peak_bytes(), "device_mb": device_used_bytes()}
        if not uses_cuda():
            found["live_mb"] = (
                sum(storage.nbytes() for storage in self._storages()) + self._saved.take_peak()
            )
        return {name: size / 1e6 for name, size in found.items() if size is not None}

    def _storages(self) -> list[UntypedStorage]:
        return [storage for part in self._policy.storages().values() for storage in part]
