"""What a server keeps on its GPUs, and the setting that bounds its cache."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ServedMemory:
    """Of a server's rank on its GPU, bytes.

    token: keys and values of a token.
    setting: full name of what bounds the cache; a unit of it is `unit` bytes, of which `before` are not the cache's.
    digits: after the point, that a value of the setting has.
    """

    weights: int
    cache: int
    token: int
    setting: str
    unit: int
    before: int = 0
    digits: int = 0

    def value_for(self, room: int) -> float | int:
        """The setting with which the cache takes at most `room` bytes."""
        value = math.floor((room + self.before) / self.unit * 10**self.digits) / 10**self.digits
        return value if self.digits else int(value)
