"""Computes the parameter hashes that SGLang servers report. A hash is computed incrementally from
parts of the parameter. Servers on CPUs and servers on GPUs report different kinds of hashes.

SGLang's endpoint `/weights_checker` hashes each tensor on the tensor's device. On a CPU the hash is
SHA-256. On a GPU, a kernel computes the hash with integer arithmetic. In the supported releases of
SGLang, the kernel is in the module `sglang.kernels.ops.memory.gpu_tensor_hash`. This module
expresses the kernel's formula in torch integer operations, so that any device can compute the hash.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import torch
from torch import Tensor

_TILE = 8192  # words in one partial sum
_BLOCK = 32  # tiles per block on a CPU: one megabyte, which fits a core's cache
# Tiles per block on a GPU, where a block costs about 40 kernel launches: 64 MB, plus six times that
# for temporaries.
_DEVICE_BLOCK = 2048
_SEEDS = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
# for each half of the value: factor and rotation in bits
_POSITIONS = ((0x27D4EB2D, 15), (0x165667B1, 13))
_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1


class Digest(Protocol):
    """Incremental hash of the concatenated bytes of several tensors."""

    def update(self, part: Tensor) -> None:
        """Appends the bytes of the tensor `part` to the hashed bytes, in the order of the tensor's
        elements. The tensor may have any dtype, shape and stride, and may change after the call."""

    def hexdigest(self) -> str:
        """Returns 16 hexadecimal digits. Nothing may be added afterwards."""


def digest_on(device: str) -> Digest:
    """Returns an empty Digest for the kind of hash that a server on `device` reports. `device` is
    the device type, such as cpu or cuda, that the server's endpoint /server_info returns. AMD GPUs
    also have the device type cuda."""
    return TiledDigest() if device == "cuda" else Sha256Digest()


class Sha256Digest:
    """First 64 bits of SHA-256, computed on the host."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, part: Tensor) -> None:
        if part.numel():
            self._digest.update(_bytes(part).cpu().numpy().data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()[:16]


class TiledDigest:
    """Computes the same hash as SGLang's GPU kernel. The computation runs on the device of the
    tensors that are hashed.

    Methods that add bytes do not wait for the device. Only `hexdigest` and pickling wait.

    Zero bytes pad the hashed bytes to a whole number n of 32-bit words. The operator ^ is XOR, and
    rotl(i, r) rotates the 32-bit number i to the left by r bits. The function fmix is the finalizer
    of MurmurHash3 (Appleby, 2011). Two functions, m1 and m2, mix the 32-bit word w at position i
    with this position:

        m1(w, i) = fmix(w ^ (i * A1 + s1) ^ rotl(i, r1))
        m2(w, i) = fmix(w ^ (i * A2 + s2) ^ rotl(i, r2))

    Sums and products in m1 and m2 are computed mod 2^32. `_SEEDS` is (s1, s2), and `_POSITIONS` is
    ((A1, r1), (A2, r2)). A tile consists of 8192 consecutive words. For each tile, S1 is the sum of
    m1(w, i) over the words of the tile, mod 2^32. For each tile, S2 is the sum of m2(w, i) over the
    words of the tile, mod 2^32. A tile's value has 64 bits. The upper 32 bits of the tile's value
    are fmix(S1 ^ 4n), and the lower 32 bits are fmix(S2 ^ 4n), where 4n is the number of bytes with
    padding. The values of all tiles are summed mod 2^64. The finalizer of splitmix64 (Steele, Lea
    and Flood, 2014) turns the sum of the tiles' values into the hash. The hash of an empty input is
    0.
    """

    def __init__(self) -> None:
        self._words = 0  # number of words up to the last one added
        self._rest: Tensor | None = None  # bytes that do not fill a word yet
        # first tile, and sums [tiles, 2] to add from that tile on
        self._sums: list[tuple[int, Tensor]] = []

    def update(self, part: Tensor) -> None:
        held = _bytes(part)
        if self._rest is not None:
            held = torch.cat([self._rest.to(held.device), held])
        whole = held.numel() // 4 * 4
        self._rest = held[whole:].clone() if whole < held.numel() else None
        words = held[:whole]
        if words.storage_offset() % 4 or words.data_ptr() % 4:
            words = words.clone()
        self._add(words.view(torch.int32), self._words)

    def update_at(self, start: int, part: Tensor) -> None:
        """Adds the bytes of the tensor `part` to the hashed bytes. In the sequence of all hashed
        bytes, the added bytes begin at byte offset `start`. The caller may add the parts of a
        parameter in any order. A caller can also add some parts to one digest and the other parts
        to other digests, and then merge these digests with `joined`. `start` and the part's size
        must be multiples of four bytes."""
        held = _bytes(part)
        if start % 4 or held.numel() % 4:
            raise ValueError(f"{held.numel()} bytes from byte {start} on are no whole words")
        if held.storage_offset() % 4 or held.data_ptr() % 4:
            held = held.clone()
        self._add(held.view(torch.int32), start // 4)

    def joined(self, other: TiledDigest) -> TiledDigest:
        """Merges this TiledDigest with the TiledDigest `other`. Returns a new TiledDigest, which
        contains the parts of this TiledDigest and the parts of `other`. All parts must have been
        added with `update_at`."""
        both = TiledDigest()
        both._words = max(self._words, other._words)
        both._sums = self._sums + other._sums
        return both

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickling. The returned dict contains one pair of sums per tile, in
        host memory. A digest is pickled so that another process can join the digest with other
        digests."""
        first, sums = self._tiles()
        return {
            "_words": self._words,
            "_rest": self._rest,
            "_sums": [(first, sums.cpu())] if len(sums) else [],
        }

    def _tiles(self) -> tuple[int, Tensor]:
        """Returns the index of the first tile with data, and the sums [tiles, 2] of this tile and
        all later tiles."""
        if not self._sums:
            return 0, torch.zeros(0, 2, dtype=torch.int64)
        first = min(at for at, _ in self._sums)
        last = max(at + len(sums) for at, sums in self._sums)
        totals = torch.zeros(last - first, 2, dtype=torch.int64, device=self._sums[-1][1].device)
        for at, sums in self._sums:
            totals[at - first : at - first + len(sums)] += sums.to(totals.device)
        return first, totals

    def _add(self, words: Tensor, position: int) -> None:
        """Adds 32-bit words to the hash. `words` [m] int32 are consecutive words of the hashed
        input, and `position` is the position of the first of these words. A tile consists of 8192
        consecutive words of the hashed input. The hash has two sums per tile, S1 and S2. `words`
        can begin and end in the middle of a tile."""
        while words.numel():
            filled = position % _TILE
            if filled or words.numel() < _TILE:
                piece = words[: _TILE - filled].view(1, -1)
            else:
                tiles = min(
                    words.numel() // _TILE, _BLOCK if words.device.type == "cpu" else _DEVICE_BLOCK
                )
                piece = words[: tiles * _TILE].view(tiles, _TILE)
            self._sums.append((position // _TILE, _summed(piece, position)))
            position += piece.numel()
            words = words[piece.numel() :]
        self._words = max(self._words, position)

    def hexdigest(self) -> str:
        if self._rest is not None:
            rest, self._rest = self._rest, None
            self._add(
                torch.cat([rest, rest.new_zeros(4 - rest.numel())]).view(torch.int32), self._words
            )
        if not self._words:
            return f"{0:016x}"
        _, totals = self._tiles()  # from tile 0 on, because the first tile always has data
        halves = _fmix(totals.to(torch.int32) ^ _wrapped(4 * self._words)).to(torch.int64) & _MASK32
        return f"{_splitmix64(int(((halves[:, 0] << 32) + halves[:, 1]).sum())):016x}"


def _bytes(part: Tensor) -> Tensor:
    return part.detach().contiguous().reshape(-1).view(torch.uint8)


def _summed(words: Tensor, first: int) -> Tensor:
    """Applies the functions m1 and m2 of TiledDigest to every word. Returns two sums for each tile:
    the sum of the results of m1, and the sum of the results of m2. The words are [tiles, words per
    tile] int32, and the sums are [tiles, 2] int64. Word number k, counted from 0, has the position
    `first` + k."""
    # int32 sums and products wrap around like the kernel's unsigned words
    at = (
        torch.arange(words.numel(), dtype=torch.int32, device=words.device)
        .add_(_wrapped(first))
        .view(words.shape)
    )
    sums = []
    for seed, (factor, by) in zip(_SEEDS, _POSITIONS, strict=True):
        key = (at * _wrapped(factor)).add_(_wrapped(seed))
        key ^= (at << by) | _shifted(at, 32 - by)
        sums.append(_fmix(key.bitwise_xor_(words)).sum(-1))  # torch sums int32 in int64
    return torch.stack(sums, -1)


def _fmix(words: Tensor) -> Tensor:
    """Applies the finalizer of MurmurHash3 to every 32-bit word, in place."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words ^= _shifted(words, shift)
        words *= _wrapped(factor)
    words ^= _shifted(words, 16)
    return words


def _shifted(words: Tensor, by: int) -> Tensor:
    """Shifts words to the right and fills the free bits with zeros. The operator >> would fill the
    free bits of an int32 tensor with the sign bit."""
    return (words >> by).bitwise_and_((1 << (32 - by)) - 1)


def _wrapped(value: int) -> int:
    """Returns the 32 low bits of `value` as a signed number."""
    return (value + 2**31 & _MASK32) - 2**31


def _splitmix64(value: int) -> int:
    value &= _MASK64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * factor & _MASK64
    return value ^ (value >> 31)
