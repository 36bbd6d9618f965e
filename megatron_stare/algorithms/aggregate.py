"""Coefficients by which the token losses are multiplied in the training loss.

A coefficient depends on how many tokens and responses the whole batch of an optimizer step has. The
loss, summed over ranks and micro-batches, is therefore the same in every parallel layout. Only the
aggregation 'micro_batch_mean' depends on the layout, because it reproduces code that averages per
micro-batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_stare.records.batch import TokenBatch

Aggregation = Literal[
    "token_mean", "sequence_mean", "sequence_sum", "dr_grpo", "dr_grpo_verl", "micro_batch_mean"
]
# aggregations that count the responses of the batch
PER_SEQUENCE = ("sequence_mean", "sequence_sum", "dr_grpo")
BY_CONSTANT = ("dr_grpo", "dr_grpo_verl")  # aggregations that divide by the setting length_norm


def coefficients(
    batch: TokenBatch,
    aggregation: Aggregation,
    tokens: Tensor,
    *,
    lengths: Tensor | None = None,
    length_norm: int | None = None,
) -> Tensor:
    """Returns the coefficient of each token, [N], in the dtype of batch.log_prob. Coefficients are
    0 outside batch.loss_mask.

    Args:
        batch: the tokens. `batch.loss_mask` marks the tokens that count.
        aggregation: the rule for the coefficient. B is the number of responses, n_i the number of
            counted tokens of response i, and N the number of all counted tokens:
            'token_mean': 1 / N (DAPO, STARE; with a mask, the mean over kept tokens).
            'sequence_mean': 1 / (B n_i), the mean over responses of their token means (GRPO).
            'sequence_sum': 1 / B.
            'dr_grpo': 1 / (B L_max) (Dr. GRPO, arXiv 2503.20783; verl's seq-mean-token-sum-norm
                from release 0.8).
            'dr_grpo_verl': 1 / L_max without B, as verl's seq-mean-token-sum-norm up to release
                0.7.
            'micro_batch_mean': (b / B) / n in a micro-batch of b responses and n counted tokens, as
                in verl's legacy actor.
        tokens: N of the whole batch, 0-dim.
        lengths: [B] n_i of the whole batch. If `lengths` is None, batch.sequence_lengths and
            batch.num_sequences are used instead.
        length_norm: L_max.
    """
    dtype = batch.log_prob.dtype
    each: Tensor | float
    if aggregation == "micro_batch_mean":
        share = _sequences_here(batch).to(dtype) / max(batch.num_sequences, 1)
        each = share / batch.loss_mask.sum().clamp_min(1)
    elif aggregation == "token_mean":
        each = 1.0 / tokens.clamp_min(1).to(dtype)
    elif aggregation == "dr_grpo_verl":
        each = 1.0 / _constant(length_norm)
    else:
        responses = _responses(batch, lengths)
        if aggregation == "sequence_mean":
            each = 1.0 / (
                responses * _lengths(batch, lengths)[batch.sequence].clamp_min(1).to(dtype)
            )
        elif aggregation == "sequence_sum":
            each = 1.0 / responses
        else:
            each = 1.0 / (responses * _constant(length_norm))
    return torch.where(
        batch.loss_mask, each, torch.zeros((), dtype=dtype, device=batch.loss_mask.device)
    )


def _lengths(batch: TokenBatch, lengths: Tensor | None) -> Tensor:
    found = batch.sequence_lengths if lengths is None else lengths
    if found is None:
        raise ValueError("sequence_mean needs sequence_lengths")
    return found


def _responses(batch: TokenBatch, lengths: Tensor | None) -> Tensor | float:
    """Returns B, the number of responses with at least one token that counts in the loss. The
    result is a float or a 0-dim tensor."""
    if lengths is None:
        return float(max(batch.num_sequences, 1))
    return (lengths > 0).sum().clamp_min(1).to(batch.log_prob.dtype)


def _sequences_here(batch: TokenBatch) -> Tensor:
    """Returns a 0-dim tensor: the number of responses that have at least one token in this
    micro-batch's loss mask."""
    if batch.sequence_lengths is None:
        raise ValueError("micro_batch_mean needs sequence_lengths")
    seen = torch.zeros_like(batch.sequence_lengths).index_add_(
        0, batch.sequence, batch.loss_mask.to(torch.int64)
    )
    return (seen > 0).sum()


def _constant(length_norm: int | None) -> int:
    if length_norm is None:
        raise ValueError("aggregation by a constant length needs length_norm")
    return length_norm
