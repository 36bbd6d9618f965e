"""A method with a fault of its own: its draws belong to a token's place among those that a rank has
at hand."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stare.algorithms.clip_cov import ClipCov
from megatron_stare.algorithms.draw import uniform
from megatron_stare.records.batch import TokenBatch


class PlacedDraws(ClipCov):
    """Clip-Cov but for that."""

    def tickets(self, batch: TokenBatch) -> Tensor:
        return uniform(self.seed, batch.step, torch.arange(len(batch.index)))
