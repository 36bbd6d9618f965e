"""Computes, from the sent weights, the checksums that the ranks of an SGLang server must report.
Pure.

SGLang stacks some Hugging Face tensors into one parameter, and shards each parameter over the
server's ranks. Each rank reports a hash of its shard of every parameter. This module therefore
hashes the shards of the sent tensors in SGLang's stacking order. The engine compares the hashes
that each rank reports with the hashes that this module computes for the rank. The parameter names
are compared too, because a server reports success even if an update contains an unknown name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_stare.models import family_of
from megatron_stare.models.shape import ModelShape
from megatron_stare.rollout.engines.sglang.fp8_weights import rounded, rounds
from megatron_stare.rollout.engines.sglang.served_hash import Digest, TiledDigest, digest_on
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout

Checksums = Mapping[str, str]  # of one rank, by SGLang's parameter name


@dataclass
class Stack:
    """Hash of one parameter on one rank, while the hash is being computed. The method `take` adds
    one part of the parameter to the hash. The experts of a layer may come from several senders, and
    each sender hashes its own experts. For servers on GPUs, the hash is computed from sums over the
    parameter's 32-bit words, so the sums of several senders can be merged."""

    count: int | None
    digest: Digest
    hashed: int = 0
    # parts that arrived out of order
    early: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    # indices of experts' matrices that arrived, on a GPU
    placed: set[int] = field(default_factory=set)

    def take(self, index: int, parts: Sequence[Tensor]) -> None:
        nbytes = sum(part.nbytes for part in parts)
        if (
            self.count is None
            and isinstance(self.digest, TiledDigest)
            and all(part.nbytes % 4 == 0 for part in parts)
        ):
            start = index * nbytes  # all experts have the same size
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
        if index in self.early:  # the bucket's memory will be reused
            self.early[index] = [part.clone() for part in parts]

    @property
    def complete(self) -> bool:
        if self.placed:
            return self.placed == set(range(len(self.placed)))
        return not self.early and self.count in (None, self.hashed)

    def joined(self, other: Stack) -> Stack:
        """Merges this Stack with another sender's Stack of the same parameter, and returns the
        merged Stack. A matrix of an expert must have been added to only one of the two Stacks.
        Works only with TiledDigest, which is the hash for servers on GPUs."""
        assert isinstance(self.digest, TiledDigest) and isinstance(other.digest, TiledDigest)
        return Stack(
            self.count, self.digest.joined(other.digest), placed=self.placed | other.placed
        )


class Fingerprint:
    """Computes the checksums that a server must report after a weight update. The method `add`
    takes the tensors of the update one by one. The checksums are valid for all servers that have
    the same ServerLayout.

    Args:
        shape: shape of the model. The model's family defines how tensors are stacked and sharded.
        dtype: compute dtype of the server. The server casts weights to this dtype.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, layout: ServerLayout) -> None:
        self._family = family_of(shape)
        self._shape = shape
        self._dtype = dtype
        self._layout = layout
        # per rank, by SGLang's name
        self._ranks: list[dict[str, Stack]] = [{} for _ in range(layout.tensor)]

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds one tensor under its Hugging Face name. Computes the hash on the tensor's device.
        The tensor may change afterwards."""
        place = self._family.served(name, self._shape)
        if self._layout.eight_bits and rounds(name, self._shape):
            held = rounded(tensor)
        else:
            held = tensor.detach().to(place.dtype or self._dtype)
        for rank, stacks in enumerate(self._ranks):
            if not (parts := self._layout.parts(name, held, self._shape, rank)):
                continue
            index = place.index
            if place.count is None:  # experts are numbered from the rank's first one
                index -= self._layout.first_expert(self._shape, rank) * place.an_expert
            stacks.setdefault(place.name, Stack(place.count, digest_on(self._layout.device))).take(
                index, parts
            )

    def checksums(self) -> list[dict[str, str]]:
        """Returns one dict per rank, which maps SGLang's parameter names to the checksums that the
        rank must report. Leaves out every parameter that was not sent completely. Call this method
        only once, after all tensors were added."""
        return checksums_of(self._ranks)

    def hashes(self) -> list[dict[str, str | Stack]]:
        """Returns this sender's contribution to the checksums. For servers on GPUs, the entry of a
        parameter that contains experts is a Stack, which is later merged with other senders'
        Stacks. All entries that are not a Stack are finished hashes."""
        return [
            {
                n: s if s.placed else s.digest.hexdigest()
                for n, s in stacks.items()
                if s.placed or s.complete
            }
            for stacks in self._ranks
        ]


def checksums_of(ranks: Sequence[Mapping[str, str | Stack]]) -> list[dict[str, str]]:
    """Returns one dict per rank, which maps parameter names to checksums. Leaves out every
    parameter that was not sent completely."""
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
    """Compares two lists of checksums: the checksums of the sent weights, and the checksums that a
    server's ranks report. Returns one line per difference."""
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
