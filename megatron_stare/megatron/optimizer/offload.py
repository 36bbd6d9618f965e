"""Moves parts of a rank's policy between device memory and host memory.

Offloading resizes the storage of each tensor to zero, and onloading restores the size of the
storage. Tensors that share a storage (parameters, their shards in the optimizer, buckets of
Megatron's buffers) therefore still share the storage after onloading. On a CPU, offloading moves
data within host memory, and otherwise works as on a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_stare.megatron.backend.cpu_backend import device, uses_cuda
from megatron_stare.megatron.model.model import finish_gather, gradient_buffers
from megatron_stare.megatron.optimizer.optimizer_state import chain

# The order matters: a storage shared by several parts moves with the first of them. Float32
# parameters are such a case: the optimizer holds them too, as their own masters.
PARTS = ("parameters", "gradients", "optimizer", "reference")


@dataclass(frozen=True)
class _Left:
    """Record of one tensor storage that was moved to host memory. Until the storage comes back, it
    has size 0 and takes no device memory.

    `copy`: uint8 [nbytes], a copy of the storage's contents in host memory. If the contents are not
        needed again, `copy` is None, and the storage is later filled with zeros.
    """

    storage: UntypedStorage
    nbytes: int
    copy: Tensor | None


class DeviceState:
    """Moves the parts of a rank's policy between device memory and host memory. PARTS lists the
    parts. Do not access a part while it is offloaded, because the part's tensors have no memory.

    Args:
        reference: model chunks of the reference policy, or empty if there is no reference policy.
    """

    def __init__(
        self,
        model: list[nn.Module],
        optimizer: MegatronOptimizer,
        reference: Collection[nn.Module] = (),
    ) -> None:
        self._model, self._optimizer, self._reference = model, optimizer, reference
        self._away: dict[str, list[_Left]] = {}
        self._kept: dict[int, list[Tensor]] = {}  # pinned memory for reuse, by size

    def storages(self) -> dict[str, list[UntypedStorage]]:
        """Returns the storages of each part. A storage that several parts share is listed only
        once. The storages of offloaded parts are included, and have size 0. Storages on other
        devices than this rank's device are not included."""
        found: dict[str, list[UntypedStorage]] = {}
        seen: set[StorageWeakRef] = set()
        for part in PARTS:
            found[part] = []
            for tensor in self._tensors(part):
                storage = tensor.untyped_storage()
                if tensor.device == device() and (known := StorageWeakRef(storage)) not in seen:
                    seen.add(known)
                    found[part].append(storage)
        return found

    def offload(self, parts: Collection[str] = PARTS) -> None:
        """Offloads parts, and skips parts that are already offloaded. Offloading gradients discards
        their values. All ranks must call `offload`."""
        leaving = [part for part in PARTS if part in parts and part not in self._away]
        if "parameters" in leaving:
            finish_gather(self._model)  # the last step's gather would still write them
        if "gradients" in leaving:
            self._optimizer.zero_grad()  # drops views of the buffers, and copies in another dtype
        storages = self.storages()
        for part in leaving:
            held = [storage for storage in storages[part] if storage.nbytes()]
            self._away[part] = [
                self._emptied(storage, keep=part != "gradients") for storage in held
            ]
        if uses_cuda() and leaving:
            torch.cuda.synchronize()  # copies are complete
            torch.cuda.empty_cache()  # hand memory that torch caches to others on the device

    def onload(self, parts: Collection[str] = PARTS) -> None:
        """Brings offloaded parts back to the device. Gradients become zeros, and the values of all
        other parts are unchanged. Skips parts that are on the device."""
        for part in PARTS:
            if part in parts:
                for left in self._away.pop(part, []):
                    self._fill(left)

    def _emptied(self, storage: UntypedStorage, *, keep: bool) -> _Left:
        nbytes, copy = storage.nbytes(), None
        if keep:
            kept = self._kept.get(nbytes)
            copy = (
                kept.pop()
                if kept
                else torch.empty(nbytes, dtype=torch.uint8, pin_memory=uses_cuda())
            )
            copy.copy_(_bytes(storage), non_blocking=True)
        storage.resize_(0)
        return _Left(storage, nbytes, copy)

    def _fill(self, left: _Left) -> None:
        left.storage.resize_(left.nbytes)
        values = _bytes(left.storage)
        if left.copy is None:
            values.zero_()
            return
        values.copy_(left.copy, non_blocking=True)
        # Pinned memory is kept because pinning takes longer than copying. Copies share one stream,
        # so it is never overwritten too early.
        if uses_cuda():
            self._kept.setdefault(left.nbytes, []).append(left.copy)

    def _tensors(self, part: str) -> Iterator[Tensor]:
        if part == "parameters":
            yield from _parameters(self._model)
        elif part == "gradients":
            yield from (buffer.grad_data for buffer in gradient_buffers(self._model))
        elif part == "reference":
            yield from _parameters(self._reference)
        else:
            for one in chain(self._optimizer):
                for group in one.param_groups:
                    for parameter in group["params"]:
                        yield parameter
                        yield from (
                            x
                            for x in one.optimizer.state.get(parameter, {}).values()
                            if torch.is_tensor(x)
                        )


def _parameters(chunks: Iterable[nn.Module]) -> Iterator[Tensor]:
    for chunk in chunks:
        yield from chunk.parameters()


def _bytes(storage: UntypedStorage) -> Tensor:
    """Views a whole storage as uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
