"""A checksum of one tensor, computed alike where weights leave and where they arrive, to prove that they are the same.

Compared by the weight sync: the trainer's side hashes what it sends, the engine's side what it holds afterwards.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def tensor_checksum(tensor: Tensor) -> str:
    """64-bit blake2b of the bytes, the dtype and the shape, as 16 hexadecimal digits.

    Order-sensitive and exact: any change of a bit, of dtype or of shape changes it. Two layouts (strides) of the same
    values agree. A contiguous CPU tensor is hashed in place, without a copy; about 1 GB/s on one core.
    """
    # blake2b releases the GIL; its header keeps [2, 3] float32 apart from [3, 2] and from int32 of the same bytes
    digest = hashlib.blake2b(f"{tensor.dtype}{list(tensor.shape)}".encode(), digest_size=8)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)  # bytes, as numpy has no bfloat16
    return digest.hexdigest()
