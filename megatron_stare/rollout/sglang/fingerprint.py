"""The checksums that an SGLang server must report once it holds the weights that were sent. Pure.

SGLang stacks some Hugging Face tensors into one parameter and reports the first 64 bits of the SHA-256 of a parameter's
bytes. So the tensors that were sent are hashed in the order in which SGLang stacks them, and the two lists compared:
names as well as values, because a server answers an unknown name with success.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_stare.models.family import ModelFamily

VOCAB_MULTIPLE = 64  # SGLang pads embedding and head with rows of zeros up to a multiple


@dataclass
class _Stack:
    """One parameter of SGLang while its parts come in."""

    count: int | None
    digest: Any = field(default_factory=hashlib.sha256)
    hashed: int = 0
    early: dict[int, Tensor] = field(default_factory=dict)  # parts that came before their turn

    def take(self, index: int, part: Tensor) -> None:
        self.early[index] = part
        while self.hashed in self.early:
            flat = self.early.pop(self.hashed).contiguous().reshape(-1)
            if flat.numel():
                self.digest.update(flat.view(torch.uint8).numpy().data)
            self.hashed += 1

    @property
    def complete(self) -> bool:
        return not self.early and self.count in (None, self.hashed)


class Fingerprint:
    """Hashes a weight update as it goes by.

    Args:
        family: of the model, which says what is stacked and padded.
        dtype: that the server computes in, and casts weights to.
    """

    def __init__(self, family: ModelFamily, dtype: torch.dtype) -> None:
        self._family, self._dtype = family, dtype
        self._stacks: dict[str, _Stack] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """One tensor on the CPU, by its Hugging Face name. It must keep its values until the update is over."""
        place, held = self._family.served(name), tensor.detach().to(self._dtype)
        stack = self._stacks.setdefault(place.name, _Stack(place.count))
        stack.take(place.index, held)
        rows = -len(held) % VOCAB_MULTIPLE
        if name in self._family.vocabulary and rows:
            stack.digest.update(torch.zeros(rows, *held.shape[1:], dtype=self._dtype).view(torch.uint8).numpy().data)

    def checksums(self) -> dict[str, str]:
        """What the server must report, by SGLang's names; incomplete stacks are left out."""
        return {name: s.digest.hexdigest()[:16] for name, s in self._stacks.items() if s.complete}


def differences(sent: Mapping[str, str], held: Mapping[str, str]) -> Sequence[str]:
    """What is wrong with the weights a server holds, a line each; none: they are those that were sent."""
    lines = [f"{name} was not sent" for name in sorted(held.keys() - sent.keys())]
    lines += [f"{name} does not exist there" for name in sorted(sent.keys() - held.keys())]
    lines += [f"{name} has other values" for name in sorted(sent.keys() & held.keys()) if sent[name] != held[name]]
    return lines
