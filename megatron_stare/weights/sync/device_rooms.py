"""Memory of buckets that another process of this machine opens: of a GPU, or of the host in files
of its shared memory. There they stand for handles of GPU memory: as those, they are of use on one
machine alone.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import torch
from torch import Tensor

FOLDER, PREFIX = Path("/dev/shm"), "megatron-stare-weights-"


class DeviceRooms:
    """Two rooms, by turns: who asks for a bucket is done with the one before the last. `close`
    gives them back."""

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
        """Lets go of the memory; what has it open keeps it. Rooms are made anew when they are asked
        for again."""
        self._rooms = []
        while self._files:
            self._files.pop().unlink(missing_ok=True)


def open_shared(name: str, nbytes: int) -> torch.UntypedStorage:
    """Opens a room of another process of this machine. Raises ValueError for a file that is
    none."""
    if not name.startswith(PREFIX) or "/" in name:
        raise ValueError(f"{name} is no bucket of weights")
    file = FOLDER / name
    if not file.is_file():
        raise ValueError(f"there is no bucket {name} in the shared memory of this machine")
    return torch.from_file(str(file), shared=True, size=nbytes, dtype=torch.uint8).untyped_storage()


def shared_name(storage: torch.UntypedStorage) -> str | None:
    """The name by which `open_shared` opens it; None: it is not in such a file."""
    name = Path(storage.filename or "/").name if storage.device.type == "cpu" else ""
    return name if name.startswith(PREFIX) else None
