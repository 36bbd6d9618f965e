"""Core attention for the local layer spec, over torch's scaled_dot_product_attention.

The stock local one builds the whole s x s matrix and knows neither causal kernels nor packed sequences. Padding stands
on the right, so causality alone keeps it from real tokens and no mask is needed.
Shape legend: s positions, b sequences, t packed tokens, n heads of this rank, g query groups of this rank, d head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from megatron_stare.megatron.batching.packing import PackedSequences


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
        """query [s, b, n, d], key and value [s, b, g, d] -> [s, b, n d]; packed [t, n, d], [t, g, d] -> [t, n d]."""
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("SdpaCoreAttention takes right-padded or packed causal sequences without mask and bias")
        if packed_seq_params is None:
            out = self._attend(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
            return out.transpose(0, 1).flatten(2)
        if not isinstance(packed_seq_params, PackedSequences):
            raise ValueError("packed sequences must be described by batching.packing.pack")
        parts = [self._attend(query[g], key[g], value[g]).flatten(0, 1) for g in packed_seq_params.groups]
        return torch.cat(parts)[packed_seq_params.inverse].flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [b, s, n, d], key and value [b, s, g, d] -> [b, s, n, d]."""
        return F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=key.shape[2] != query.shape[2],
        ).transpose(1, 2)
