"""RMSNorm for the local layer spec: as the stock one, but it also runs under sequence parallelism.

megatron-core's torch norm refuses sequence parallelism because its weight would miss the gradient all-reduce; the
attribute set here asks for that all-reduce.
"""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = weight * x / rms(x), over the last dimension, computed in at least float32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
