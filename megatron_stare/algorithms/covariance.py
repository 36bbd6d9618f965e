"""The covariance of advantage and log-prob that Clip-Cov and KL-Cov use (arXiv 2505.22617).

    cov_{i,t} = (A - mean A) (ln p - mean ln p)

The means of advantage and log-prob are taken over the tokens of the whole batch. The released code
instead computes the mean advantage and the mean log-prob of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Count, Mean, Request, Statistics, scalar


def mean_requests(batch: TokenBatch) -> Mapping[str, Request]:
    return {
        "cov/tokens": Count(batch.loss_mask),
        "cov/advantage": Mean(batch.advantage, batch.loss_mask),
        "cov/log_prob": Mean(batch.selected_by, batch.loss_mask),
    }


def covariance(batch: TokenBatch, statistics: Statistics) -> Tensor:
    """Returns the detached covariance of each token, [N] float64. The covariance is 0 outside
    batch.loss_mask."""
    centred = batch.advantage.detach().to(torch.float64) - scalar(statistics, "cov/advantage")
    spread = batch.selected_by.to(torch.float64) - scalar(statistics, "cov/log_prob")
    return torch.where(batch.loss_mask, centred * spread, 0.0)


def budget(statistics: Statistics, share: float) -> Tensor:
    """Returns the number of tokens to select, as a 0-dim tensor. The number of tokens to select is
    `share` times the number of tokens in the loss mask, rounded down, but at least 1. Unlike this
    function, the methods STARE and 20-Entropy round the number of selected tokens up."""
    return (scalar(statistics, "cov/tokens").to(torch.float64) * share).floor().clamp_min(1)
