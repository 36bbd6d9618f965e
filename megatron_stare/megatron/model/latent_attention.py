"""Extends the multi-head latent attention in Megatron's local layer spec. With the extension,
gradients are also correct if there are several tensor-parallel ranks. The extension also computes
rotary angles for packed sequences without boundaries, for which `cu_seqlens_q` is None.

Shape legend: this rank holds s positions of b sequences, or t packed tokens. Rotary embeddings
rotate d columns. The projection into the key-value latent has K output columns. These K columns
include the d key columns that rotary embeddings rotate.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megatron_stare.megatron.batching.packing import PackedSequences


class LatentAttention(MLASelfAttention):
    """Latent attention that sums the gradient of the rotated key columns over tensor-parallel
    ranks.

    Megatron splits the columns of the query latent and of the key-value latent across the
    tensor-parallel ranks, and later gathers the columns on every rank. All heads share the rotated
    key columns. In Megatron, each rank gets the gradient of the rotated key columns from its own
    heads only, and no operation sums this gradient over the ranks. Under sequence parallelism, a
    hook runs as soon as a linear layer has computed the key-value latent. The hook gathers the
    columns of the latent from all tensor-parallel ranks, and keeps only the sequence positions of
    this rank. Megatron later gathers the positions of all ranks, and the backward pass of this
    gather sums the gradients over the ranks.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.rotary_pos_emb = TokenRotary(
            config.qk_pos_emb_head_dim,
            rotary_percent=1.0,
            rotary_base=config.rotary_base,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=self.pg_collection.cp,
        )
        if config.sequence_parallel:
            self.linear_kv_down_proj.register_forward_hook(_cut_by_positions)


def _cut_by_positions(_module: Any, _inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Gathers the columns and keeps this rank's positions: [s, b, K of this rank] -> [s of this
    rank, b, K]."""
    columns, bias = output
    return scatter_to_sequence_parallel_region(
        gather_from_tensor_model_parallel_region(columns)
    ), bias


class TokenRotary(RotaryEmbedding):
    """Computes rotary angles. If the sequences are packed and `PackedSequences.cu_seqlens_q` is
    None, TokenRotary computes the angles from the positions in `PackedSequences.tokens`. If the
    sequences are not packed, or if `cu_seqlens_q` is given, the base class RotaryEmbedding of
    Megatron computes the angles."""

    def get_rotary_seq_len(self, *args: Any) -> Any:
        """Returns the value that Megatron passes to `forward` as the first argument. If the
        sequences are packed and `PackedSequences.cu_seqlens_q` is None, the value is a tensor [t]
        with the position of each token. Otherwise, the value is the sequence length that Megatron
        computes."""
        packing = args[-1]
        if isinstance(packing, PackedSequences) and packing.cu_seqlens_q is None:
            return packing.tokens
        return super().get_rotary_seq_len(*args)

    def forward(self, places: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Returns angles in radians: [t, 1, d] for packed tokens, else [s, 1, 1, d]."""
        if not isinstance(places, Tensor):
            return super().forward(places, *args, **kwargs)
        angles = torch.outer(places.to(self.inv_freq.dtype), self.inv_freq)
        return torch.cat([angles, angles], dim=-1)[:, None]
