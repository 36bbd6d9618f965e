"""The reference policy that a KL term is measured against, frozen but for refreshes; loaded only when that term
counts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_stare.config.schema import Config
from megatron_stare.megatron.backend.cpu_backend import device
from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.batching.microbatch import RankBatch
from megatron_stare.megatron.checkpoint.checkpoint import load_start
from megatron_stare.megatron.model.head import Head
from megatron_stare.megatron.model.model import build_model, unwrap
from megatron_stare.megatron.step.passes import compute_log_probs
from megatron_stare.models.shape import ModelShape


class Reference:
    """The policy of model.reference_path, in the trainer's layout, without gradients.

    Args:
        shape: of the trained policy, which the reference shares.
    """

    def __init__(self, config: Config, shape: ModelShape, layout: Layout) -> None:
        self._offload = config.model.reference_offload
        self.model = build_model(shape, config.model, config.parallel, layout, moe=config.moe)
        for chunk in self.model:
            chunk.eval().requires_grad_(False)
        load_start(self.model, config.model.reference_path or config.model.path, shape, layout)
        self._move("cpu" if self._offload else str(device()))

    def compute_log_probs(self, batch: RankBatch, head: Head) -> Tensor:
        """Log-probs [N] of this rank's response positions, over the same micro-batches as the policy's."""
        self._move(str(device()))
        log_prob, _ = compute_log_probs(self.model, batch, head)
        if self._offload:
            self._move("cpu")
        return log_prob

    @torch.no_grad()
    def refresh(self, policy: list[nn.Module]) -> None:
        """Takes over the weights of the policy, chunk by chunk, wherever the reference lies."""
        for mine, other in zip(self.model, policy, strict=True):
            for weight, current in zip(unwrap(mine).parameters(), unwrap(other).parameters(), strict=True):
                weight.copy_(current)

    def _move(self, where: str) -> None:
        for chunk in self.model:
            chunk.to(where)
