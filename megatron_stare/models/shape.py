"""The sizes of a model, as its family reads them from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model. `vocab_size` is config.vocab_size: the columns the policy really has."""

    family: str  # its model_type
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    experts: int = 0  # 0: dense
    experts_per_token: int = 0
    expert_ffn: int = 0
    renormalise_experts: bool = True  # whether the chosen experts' weights sum to 1
    rope_scaling: Mapping[str, Any] | None = None  # parameters of one of the family's scalings, as config.json has them

    @property
    def feed_forward(self) -> int:
        """Columns of the feed-forward matrices that the model holds: of an expert's, where there are experts."""
        return self.expert_ffn if self.experts else self.ffn

    def padded_vocab(self, tp: int, multiple: int = 128) -> int:
        """Vocabulary rows that Megatron holds over `tp` ranks: a multiple of `multiple` a rank."""
        unit = multiple * tp
        return -(-self.vocab_size // unit) * unit
