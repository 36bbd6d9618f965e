"""Provides memory for weight buckets. An engine's process on the same machine can read the buckets
directly from this memory. The memory is on a GPU, or in shared-memory files on the host. The
engine's process accesses memory on a GPU through a handle, and memory on the host through the
shared-memory file. Handles and shared-memory files can be opened only by processes on the same
machine."""

from __future__ import annotations

import secrets
from pathlib import Path

import torch
from torch import Tensor

FOLDER, PREFIX = Path("/dev/shm"), "megatron-stare-weights-"


class DeviceRooms:
    """Provides memory for buckets by alternating between two buffers. The third bucket reuses the
    memory of the first bucket, so a caller must finish with the first bucket before requesting the
    third. `close` frees both buffers."""

    def __init__(self) -> None:
        self._rooms: list[Tensor] = []
        self._files: list[Path] = []

    def __call__(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        nbytes = numel * dtype.itemsize
        room = self._rooms.pop(0) if len(self._rooms) == 2 else None
        if room is None or room.numel() < nbytes or room.device != device:
            room = (
                self._new(nbytes)
                if device.type == "cpu"
                else torch.empty(nbytes, dtype=torch.uint8, device=device)
            )
        self._rooms.append(room)
        return room[:nbytes].view(dtype)

    def _new(self, nbytes: int) -> Tensor:
        file = FOLDER / f"{PREFIX}{secrets.token_hex(8)}"
        self._files.append(file)
        return torch.from_file(str(file), shared=True, size=nbytes, dtype=torch.uint8)

    def close(self) -> None:
        """Frees the memory. A process that has already opened a buffer can still use the buffer.
        Later requests for memory allocate new buffers."""
        self._rooms = []
        while self._files:
            self._files.pop().unlink(missing_ok=True)


def open_shared(name: str, nbytes: int) -> torch.UntypedStorage:
    """Opens a buffer of another process on this machine. Raises ValueError if this machine has no
    weight buffer with the name `name`."""
    if not name.startswith(PREFIX) or "/" in name:
        raise ValueError(f"{name} is no bucket of weights")
    file = FOLDER / name
    if not file.is_file():
        raise ValueError(f"there is no bucket {name} in the shared memory of this machine")
    return torch.from_file(str(file), shared=True, size=nbytes, dtype=torch.uint8).untyped_storage()


def shared_name(storage: torch.UntypedStorage) -> str | None:
    """Returns the name by which `open_shared` opens the storage. Returns None if the storage is not
    in a shared file."""
    name = Path(storage.filename or "/").name if storage.device.type == "cpu" else ""
    return name if name.startswith(PREFIX) else None
