"""The checksums that an SGLang server's ranks must report once they hold the weights that were
sent. Pure.

SGLang stacks some Hugging Face tensors into one parameter, cuts each over its ranks, and a rank
reports a hash of what it holds of every parameter. So the parts of the tensors that were sent are
hashed in the order in which SGLang stacks them, and the lists compared rank by rank: names as well
as values, because a server answers an unknown name with success.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_stare.models import family_of
from megatron_stare.models.shape import ModelShape
from megatron_stare.rollout.engines.sglang.served_hash import Digest, TiledDigest, digest_on
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout

Checksums = Mapping[str, str]  # of one rank, by SGLang's name


@dataclass
class Stack:
    """One parameter of a rank while its parts come in. Of experts' matrices on a GPU several
    senders can have a part each: there the hash is a sum over positions."""

    count: int | None
    digest: Digest
    hashed: int = 0
    # parts that came before their turn
    early: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    placed: set[int] = field(default_factory=set)  # of experts' matrices on a GPU, those that came

    def take(self, index: int, parts: Sequence[Tensor]) -> None:
        nbytes = sum(part.nbytes for part in parts)
        if (
            self.count is None
            and isinstance(self.digest, TiledDigest)
            and all(part.nbytes % 4 == 0 for part in parts)
        ):
            start = index * nbytes  # experts are of one size
            for part in parts:
                self.digest.update_at(start, part)
                start += part.nbytes
            self.placed.add(index)
            return
        self.early[index] = parts
        while self.hashed in self.early:
            for part in self.early.pop(self.hashed):
                self.digest.update(part)
            self.hashed += 1
        if index in self.early:  # its bucket's memory is used again
            self.early[index] = [part.clone() for part in parts]

    @property
    def complete(self) -> bool:
        if self.placed:
            return self.placed == set(range(len(self.placed)))
        return not self.early and self.count in (None, self.hashed)

    def joined(self, other: Stack) -> Stack:
        """Joins the parts of experts' matrices that either stack took on a GPU."""
        assert isinstance(self.digest, TiledDigest) and isinstance(other.digest, TiledDigest)
        return Stack(
            self.count, self.digest.joined(other.digest), placed=self.placed | other.placed
        )


class Fingerprint:
    """Hashes a weight update as it goes by, for servers of one layout.

    Args:
        shape: of the model, whose family says what is stacked and cut.
        dtype: that the server computes in, and casts weights to.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, layout: ServerLayout) -> None:
        self._family = family_of(shape)
        self._shape = shape
        self._dtype = dtype
        self._layout = layout
        self._ranks: list[dict[str, Stack]] = [{} for _ in range(layout.tensor)]  # by SGLang's name

    def add(self, name: str, tensor: Tensor) -> None:
        """One tensor by its Hugging Face name, hashed where it lies. It may change afterwards."""
        place = self._family.served(name, self._shape)
        held = tensor.detach().to(place.dtype or self._dtype)
        for rank, stacks in enumerate(self._ranks):
            if not (parts := self._layout.parts(name, held, self._shape, rank)):
                continue
            index = place.index
            if place.count is None:  # experts are counted from the first that the rank holds
                index -= self._layout.first_expert(self._shape, rank) * place.an_expert
            stacks.setdefault(place.name, Stack(place.count, digest_on(self._layout.device))).take(
                index, parts
            )

    def checksums(self) -> list[dict[str, str]]:
        """Checksums that each rank must report, by SGLang's names, of complete stacks alone. Asked
        once, at the end."""
        return checksums_of(self._ranks)

    def hashes(self) -> list[dict[str, str | Stack]]:
        """Gives `checksums` of one sender among several; experts' matrices on GPUs stay stacks, to
        be joined."""
        return [
            {
                n: s if s.placed else s.digest.hexdigest()
                for n, s in stacks.items()
                if s.placed or s.complete
            }
            for stacks in self._ranks
        ]


def checksums_of(ranks: Sequence[Mapping[str, str | Stack]]) -> list[dict[str, str]]:
    """By rank and name, of what is complete."""
    return [
        {
            n: s if isinstance(s, str) else s.digest.hexdigest()
            for n, s in stacks.items()
            if not _lacks(s)
        }
        for stacks in ranks
    ]


def _lacks(stack: str | Stack) -> bool:
    return isinstance(stack, Stack) and not stack.complete


def differences(sent: Sequence[Checksums], held: Sequence[Checksums]) -> Sequence[str]:
    """Lists what is wrong with the weights that a server's ranks hold, a line each; empty: they
    hold the ones sent."""
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
    lines += [
        f"{name} has other values"
        for name in sorted(sent.keys() & held.keys())
        if sent[name] != held[name]
    ]
    return lines
