"""Implements core attention for the local layer spec with torch's scaled_dot_product_attention. On
a CPU, short sequences in float32 use `short_attention` (local_layers.py) instead of
scaled_dot_product_attention.

Megatron's local core attention builds the whole s x s attention matrix and supports neither causal
kernels nor packed sequences. Padding is on the right, so the causal mask alone keeps real tokens
from attending to the padding. Under context parallelism a rank holds the queries of two chunks of
every sequence. The rank gathers the keys and values of all context-parallel ranks, and a mask hides
the keys after each query's position.

Shape legend: a batch has b sequences of s positions, or t packed tokens. This rank has n heads and
g query groups. The head size is d. There are C context-parallel ranks, and this rank holds m
positions of a sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_stare.config.performance import WHOLE_UP_TO
from megatron_stare.megatron.batching.packing import PackedSequences
from megatron_stare.megatron.batching.zigzag import Zigzag
from megatron_stare.megatron.model.local_layers import short_attention

# Largest number of mask entries built at once: 64 MB after torch converts the mask to float32.
MASK_ENTRIES = 2**24


class SdpaCoreAttention(nn.Module):
    """Causal self-attention without dropout. Takes the same arguments as megatron-core's own core
    attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        if attn_mask_type != AttnMaskType.causal or attention_type != "self":
            raise ValueError("SdpaCoreAttention serves causal self-attention only")
        if config.attention_dropout:
            raise ValueError("SdpaCoreAttention has no dropout")
        self.softmax_scale = softmax_scale
        self.context_group = (
            pg_collection.cp if config.context_parallel_size > 1 and pg_collection else None
        )

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
        """Returns the attention output [s, b, n d] for query [s, b, n, d], key [s, b, g, d] and
        value [s, b, g, d]. For packed sequences, returns the output [t, n d] for query [t, n, d],
        key [t, g, d] and value [t, g, d].

        Under context parallelism, s and t count only this rank's tokens.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError(
                "SdpaCoreAttention takes right-padded or packed causal sequences without mask and"
                " bias"
            )
        positions = None
        if packed_seq_params is None:
            if self.context_group is not None:
                place = Zigzag(self.context_group.rank(), self.context_group.size())
                length = query.shape[0] * place.ranks
                positions = place.positions(length).expand(query.shape[1], -1)
                order = place.order([length]).to(query.device)
                key, value = (x[order] for x in self._gathered(key, value))
            out = self._attend(
                query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), positions
            )
            return out.transpose(0, 1).flatten(2)
        packing = packed_seq_params
        if not isinstance(packing, PackedSequences):
            raise ValueError("packed sequences must be described by batching.packing.pack")
        if self.context_group is not None:
            key, value = self._gathered(key, value)
        queries, keys = packing.queries, packing.keys or packing.queries
        assert queries is not None and keys is not None
        parts = [
            self._attend(q, k, v, packing.positions[i] if packing.positions else None).flatten(0, 1)
            for i, (q, k, v) in enumerate(
                zip(
                    queries.spread(query, collected=True),
                    keys.spread(key),
                    keys.spread(value),
                    strict=True,
                )
            )
        ]
        return queries.collect(torch.cat(parts)).flatten(1)

    def _gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and the values of all context-parallel ranks, concatenated in rank
        order.

        In the backward pass, each rank receives the gradients of the keys and values that this rank
        computed. These gradients are sums over the queries of all context-parallel ranks.
        """
        both = gather_from_sequence_parallel_region(
            torch.cat([key, value], dim=-1), group=self.context_group
        )
        return tuple(both.split([key.shape[-1], value.shape[-1]], dim=-1))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        """Returns the attention output [b, m, n, d] for query [b, m, n, d], key [b, s, g, d] and
        value [b, s, g, d].

        Args:
            positions: [b, m] int64 on the host, each query's position among the s keys, or None if
                m = s.
        """
        if positions is None:
            short = (
                query.shape[1] <= WHOLE_UP_TO
                and query.device.type == "cpu"
                and query.dtype == torch.float32
            )
            if short:
                return short_attention(query, key, value, self.softmax_scale)
            return self._sdpa(query, key, value, None)
        step = max(1, MASK_ENTRIES // (key.shape[0] * key.shape[1]))
        if step >= query.shape[1]:
            return self._masked(query, key, value, positions)
        # Backward builds a block's mask again: keeping the masks of all blocks would take memory
        # quadratic in the length.
        parts = [
            checkpoint(
                self._masked, rows, key, value, where, use_reentrant=False, preserve_rng_state=False
            )
            for where, rows in zip(
                positions.split(step, dim=1), query.split(step, dim=1), strict=True
            )
        ]
        return torch.cat(parts, dim=1)

    def _masked(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
        """Computes attention for one block of queries, with a mask for this block."""
        seen = int(positions.max()) + 1
        mask = (torch.arange(seen) <= positions[..., None]).to(query.device)[:, None]
        return self._sdpa(query, key[:, :seen], value[:, :seen], mask)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Returns attention outputs [b, m, n, d] over the keys that `mask` [b, 1, m, s] allows. If
        `mask` is None, attention is causal."""
        return F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=key.shape[2] != query.shape[2],
        ).transpose(1, 2)
