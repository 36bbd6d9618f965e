"""What a rank holds, as its metrics say it."""

from __future__ import annotations

import contextlib

from torch import UntypedStorage

from megatron_stare.megatron.backend.cpu_backend import uses_cuda
from megatron_stare.megatron.optimizer.offload import DeviceState
from megatron_stare.megatron.step.saved_for_backward import SavedForBackward
from megatron_stare.process.peak_memory import device_used_bytes, take_peak_bytes


class RankMemory:
    """Of the rank that has this policy."""

    def __init__(self, policy: DeviceState) -> None:
        self._policy, self._saved = policy, SavedForBackward()

    def counting(self) -> contextlib.AbstractContextManager[None]:
        """While open, what autograd keeps for backward counts to `live_mb`; on CUDA the allocator knows."""
        return contextlib.nullcontext() if uses_cuda() else self._saved.counting(self._storages())

    def take_mb(self) -> dict[str, float]:
        """10^6 bytes: `peak_mb`, the most this process held since this was asked last; without CUDA `live_mb`, the
        policy's tensors now and the most that autograd kept since; `device_mb`, what all processes hold of its GPU now;
        what is not known is left out."""
        found = {"peak_mb": take_peak_bytes(), "device_mb": device_used_bytes()}
        if not uses_cuda():
            found["live_mb"] = sum(storage.nbytes() for storage in self._storages()) + self._saved.take_peak()
        return {name: size / 1e6 for name, size in found.items() if size is not None}

    def _storages(self) -> list[UntypedStorage]:
        return [storage for part in self._policy.storages().values() for storage in part]
