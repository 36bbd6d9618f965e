"""Memory that is used again for every block of a conversion: new memory costs a page fault every 4 KB."""

from __future__ import annotations

import torch
from torch import Tensor

_ALIGNED = 64  # bytes


class Buffer:
    """Gives out parts of one stretch of memory, until it is cleared for the next block."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._wanted = 0  # since the last `clear`; the stretch grows to it there, where nothing points into it

    def take(self, nbytes: int) -> Tensor:
        """[nbytes] uint8, of any content, the caller's until `clear`."""
        start, self._used = self._used, self._used + nbytes + -nbytes % _ALIGNED
        self._wanted += nbytes + -nbytes % _ALIGNED
        if self._used > len(self._memory):
            self._used = start
            return torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[start : start + nbytes]

    def clear(self) -> None:
        """Takes back everything that was given out."""
        if self._wanted > len(self._memory):
            self._memory = torch.empty(self._wanted, dtype=torch.uint8)
        self._used = self._wanted = 0
