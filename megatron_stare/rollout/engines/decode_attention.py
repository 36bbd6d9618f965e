"""Attention of one new token a row over its cache, for the transformers model that the local engine runs on a CPU.

torch's kernel for CPUs starts a matrix product for every head of every row, which costs more than the product where
there is one query; here all rows are two batched products. Registered with transformers under NAME, as it provides
for; whatever is not one float32 token a row on a CPU goes the way of "sdpa".

Shape legend: b rows, n heads, g groups of heads that share keys and values, r heads of a group, L tokens in the cache,
d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "megatron_stare_decode"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [b, n, 1, d], key [b, g, L, d], value [b, g, L, v], mask [b, 1, 1, L] bool -> [b, 1, n, v] (v is d but in
    models with latent attention); the arguments are those that transformers gives any attention."""
    special = any(others.get(name) is not None for name in ("softcap", "position_bias", "cache", "s_aux"))
    ours = query.shape[2] == 1 and query.device.type == "cpu" and query.dtype == torch.float32
    if special or dropout or not ours:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    rows, heads, _, width = query.shape
    groups = key.shape[1]
    queries = query.reshape(rows, groups, heads // groups, width) * (width**-0.5 if scaling is None else scaling)
    scores = queries @ key.transpose(-1, -2)  # [b, g, r, L]
    if attention_mask is not None:
        scores.masked_fill_(~attention_mask, -torch.inf)
    return (scores.softmax(-1) @ value).reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
