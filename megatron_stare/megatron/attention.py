"""Core attention for the local layer spec, over torch's scaled_dot_product_attention.

The stock local one builds the score matrix and knows neither causal kernels nor grouped queries. Padding stands on the
right, so causality alone keeps it from real tokens and no mask is needed.
Shape legend: s positions, b sequences, n heads of this rank, g query groups of this rank, d head size.
"""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn


class SdpaCoreAttention(nn.Module):
    """Causal attention without dropout. Arguments are those megatron-core gives any core attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        if attn_mask_type != AttnMaskType.causal or attention_type != "self":
            raise ValueError("SdpaCoreAttention serves causal self-attention only")
        if config.attention_dropout:
            raise ValueError("SdpaCoreAttention has no dropout")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [s, b, n, d], key and value [s, b, g, d] -> [s, b, n d]."""
        if attention_mask is not None or attention_bias is not None or packed_seq_params is not None:
            raise ValueError("SdpaCoreAttention takes right-padded causal sequences only")
        s, b, n, d = query.shape
        out = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=key.shape[2] != n,
        )
        return out.permute(2, 0, 1, 3).reshape(s, b, n * d)
