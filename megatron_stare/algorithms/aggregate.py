"""From token losses to one number: the coefficient every token's loss is multiplied by before summing.

Coefficients come from counts over the whole optimizer-step batch, so the sum over ranks and micro-batches is the same
in every layout.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_stare.batch import TokenBatch

Aggregation = Literal["token_mean", "sequence_mean"]


def coefficients(batch: TokenBatch, aggregation: Aggregation, tokens: Tensor) -> Tensor:
    """[N] float32; 0 outside batch.mask.

    Args:
        aggregation: 'token_mean' 1 / N (DAPO, STARE); 'sequence_mean' 1 / (B n_i), the mean over responses of their
            token means (GRPO).
        tokens: N, loss positions of the whole batch, 0-dim.
    """
    if aggregation == "token_mean":
        each = 1.0 / tokens.clamp_min(1).to(torch.float32).expand(batch.mask.shape)
    else:
        if batch.sequence_lengths is None:
            raise ValueError("sequence_mean needs sequence_lengths")
        lengths = batch.sequence_lengths[batch.sequence].clamp_min(1)
        each = 1.0 / (max(batch.num_sequences, 1) * lengths.to(torch.float32))
    return torch.where(batch.mask, each, 0.0)
