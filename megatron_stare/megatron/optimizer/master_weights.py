"""The float32 masters of 16-bit parameters, wherever an optimizer keeps them: read as float32 and written back.

Megatron's distributed optimizer updates masters of its own. Told to be precision-aware it updates the parameters, and
the masters are the inner optimizer's: Transformer Engine's FusedAdam keeps of a bfloat16 parameter's the 16 bits that
the parameter lacks, and others in float32; HybridDeviceOptimizer shows those that it updates on the host. Both call
them "master_param" in their state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MASTER = "master_param"
_LOW = 0xFFFF  # the bits of a float32 number that bfloat16 lacks


def read_master(updated: Tensor, state: Mapping[str, Any]) -> Tensor:
    """float32 [n]: what is kept itself, or its value put together anew where a part of it lies in the parameter.

    Args:
        updated: [n] what the optimizer updates.
        state: that the optimizer has for it.
    """
    kept = state.get(MASTER)
    if kept is None:
        return updated.detach()
    return joined(updated.detach(), kept) if kept.dtype == torch.int16 else kept.detach()


@torch.no_grad()
def write_master(updated: Tensor, state: Mapping[str, Any], values: Tensor | None) -> None:
    """Makes these the master, where writing to what `read_master` gave has not done so.

    Args:
        values: float32 [n]; None: a float32 parameter is its own master, of which there may be a copy.
    """
    kept = state.get(MASTER)
    if kept is None:
        return
    if values is None:
        kept.copy_(updated)
    elif kept.dtype == torch.int16:
        rounded, low = parted(values, updated)
        updated.copy_(rounded)
        kept.copy_(low)
    elif kept.data_ptr() != values.data_ptr():
        kept.copy_(values)


def joined(rounded: Tensor, low: Tensor) -> Tensor:
    """The float32 numbers of which these are the parts, as Transformer Engine's kernel puts them together.

    Args:
        rounded: bfloat16 [n], rounded to the nearest, halves away from zero.
        low: int16 [n], the lower 16 bits; negative where the upper ones were rounded up.
    """
    high = rounded.view(torch.int16) - (low < 0).to(torch.int16)
    return ((high.to(torch.int32) << 16) | (low.to(torch.int32) & _LOW)).view(torch.float32)


def parted(values: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
    """The parts of float32 numbers [n], for `joined`: bfloat16 and int16.

    Args:
        near: bfloat16 [n], the numbers rounded by whatever rule. All data ranks hold them, so they stay: of a half that
            another rule has rounded towards zero, the last of 32 bits is lost instead.
    """
    bits = values.contiguous().view(torch.int32)
    low = ((bits & _LOW) ^ 0x8000) - 0x8000  # as a signed number of 16 bits
    high = bits >> 16
    towards_zero = (low == -0x8000) & (near.view(torch.int16).to(torch.int32) == high)
    low = torch.where(towards_zero, 0x7FFF, low)
    return (high + (low < 0)).to(torch.int16).view(torch.bfloat16), low.to(torch.int16)
