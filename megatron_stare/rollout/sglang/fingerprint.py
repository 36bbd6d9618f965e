"""The checksums that an SGLang server's ranks must report once they hold the weights that were sent. Pure.

SGLang stacks some Hugging Face tensors into one parameter, cuts each over its ranks, and a rank reports a hash of what
it holds of every parameter. So the parts of the tensors that were sent are hashed in the order in which SGLang stacks
them, and the lists compared rank by rank: names as well as values, because a server answers an unknown name with
success.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_stare.models import family_of
from megatron_stare.models.shape import ModelShape
from megatron_stare.rollout.sglang.served_hash import Digest, digest_on
from megatron_stare.rollout.sglang.server_layout import ServerLayout

Checksums = Mapping[str, str]  # of one rank, by SGLang's name


@dataclass
class _Stack:
    """One parameter of a rank while its parts come in."""

    count: int | None
    digest: Digest
    hashed: int = 0
    early: dict[int, Sequence[Tensor]] = field(default_factory=dict)  # parts that came before their turn

    def take(self, index: int, parts: Sequence[Tensor]) -> None:
        self.early[index] = parts
        while self.hashed in self.early:
            for part in self.early.pop(self.hashed):
                self.digest.update(part)
            self.hashed += 1

    @property
    def complete(self) -> bool:
        return not self.early and self.count in (None, self.hashed)


class Fingerprint:
    """Hashes a weight update as it goes by, for servers of one layout.

    Args:
        shape: of the model, whose family says what is stacked and cut.
        dtype: that the server computes in, and casts weights to.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, layout: ServerLayout) -> None:
        self._family, self._shape, self._dtype, self._layout = family_of(shape), shape, dtype, layout
        self._ranks: list[dict[str, _Stack]] = [{} for _ in range(layout.tensor)]

    def add(self, name: str, tensor: Tensor) -> None:
        """One tensor by its Hugging Face name, hashed where it lies. It must keep its values until the update is
        over."""
        place, held = self._family.served(name), tensor.detach().to(self._dtype)
        for rank, stacks in enumerate(self._ranks):
            if not (parts := self._layout.parts(name, held, self._shape, rank)):
                continue
            index = place.index
            if place.count is None:  # experts are counted from the first that the rank holds
                index -= self._layout.first_expert(self._shape, rank) * place.an_expert
            stacks.setdefault(place.name, _Stack(place.count, digest_on(self._layout.device))).take(index, parts)

    def checksums(self) -> list[dict[str, str]]:
        """What each rank must report, by SGLang's names; incomplete stacks are left out. Asked once, at the end."""
        return [{name: s.digest.hexdigest() for name, s in stacks.items() if s.complete} for stacks in self._ranks]


def differences(sent: Sequence[Checksums], held: Sequence[Checksums]) -> Sequence[str]:
    """What is wrong with the weights a server's ranks hold, a line each; none: they are those that were sent."""
    if len(sent) != len(held):
        return [f"{len(held)} ranks report what they hold, of {len(sent)}"]
    return [
        f"{line}{f' on rank {rank}' if len(sent) > 1 else ''}"
        for rank, (wanted, found) in enumerate(zip(sent, held, strict=True))
        for line in _differences(wanted, found)
    ]


def _differences(sent: Checksums, held: Checksums) -> list[str]:
    lines = [f"{name} was not sent" for name in sorted(held.keys() - sent.keys())]
    lines += [f"{name} does not exist there" for name in sorted(sent.keys() - held.keys())]
    lines += [f"{name} has other values" for name in sorted(sent.keys() & held.keys()) if sent[name] != held[name]]
    return lines
