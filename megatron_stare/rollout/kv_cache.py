"""A key/value cache that is written in place; DynamicCache of transformers copies itself every token.

Made and used by decode.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def growing_cache(config: object) -> DynamicCache:
    """An empty cache for a model of this config; sliding-window and other special layers stay as they are."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class GrowingLayer(DynamicLayer):
    """Keys and values [B, heads, length, head_dim] as views of roomier buffers, which double when they are full."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._key_room: Tensor | None = None
        self._value_room: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._key_room, self.keys = _append(self._key_room, self.keys, key_states)
        self._value_room, self.values = _append(self._value_room, self.values, value_states)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._key_room = self._value_room = None  # keys and values are copies now, not views of the buffers


def _append(room: Tensor | None, held: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The buffer, moved to a larger one where need be, and the view of it that holds `held` then `new`."""
    length = held.shape[-2] if held.numel() else 0
    total = length + new.shape[-2]
    if room is None or room.shape[-2] < total:
        batch, heads, _, width = new.shape
        room = torch.empty(batch, heads, max(2 * length, total + 32), width, dtype=new.dtype, device=new.device)
        if length:
            room[:, :, :length] = held
    room[:, :, length:total] = new
    return room, room[:, :, :total]
