"""A checksum of one tensor, computed alike where weights leave and where they arrive, to prove that they are the same.

Compared by the weight sync: the trainer's side hashes what it sends, the engine's side what it holds afterwards.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def tensor_checksum(tensor: Tensor) -> str:
    """First 64 bits of the SHA-256 of the dtype, the shape and the bytes, as 16 hexadecimal digits.

    Order-sensitive and exact: any change of a bit, of dtype or of shape changes it. Two layouts (strides) of the same
    values agree. A contiguous CPU tensor is hashed in place, without a copy; 1.2 to 1.5 GB/s on a core with
    instructions for SHA, more than twice as fast as BLAKE2.
    """
    # hashlib releases the GIL; the header keeps [2, 3] float32 apart from [3, 2] and from int32 of the same bytes
    digest = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)  # bytes, as numpy has no bfloat16
    return digest.hexdigest()[:16]
