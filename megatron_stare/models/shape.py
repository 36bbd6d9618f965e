"""Defines the sizes of a model, which the model's family reads from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention."""

    query_rank: int  # rank of the queries' latent
    rank: int  # rank of the latent of keys and values
    plain: int  # columns of a head that positions do not rotate
    rotated: int  # columns of a head that positions rotate
    value: int  # columns of a head's values


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model. `vocab_size` is config.vocab_size, without Megatron's
    padding."""

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
    # leading layers with a dense feed-forward layer, in a mixture of experts
    dense_layers: int = 0
    shared_ffn: int = 0  # columns of all shared experts together
    router_scale: float = 1.0  # factor on the chosen experts' weights
    expert_groups: int = 1  # groups that experts are divided into
    groups_per_token: int = 1  # groups that a token's experts may come from
    rotated: float = 1.0  # share of each head that positions rotate
    # multi-token prediction layers after the last layer, which are left out
    prediction_layers: int = 0
    latent: Latent | None = None
    # parameters of the RoPE scaling, as in config.json; None: no scaling
    rope_scaling: Mapping[str, Any] | None = None

    @property
    def feed_forward(self) -> int:
        """Intermediate size of the model's feed-forward layers, or of one expert in a mixture of
        experts."""
        return self.expert_ffn if self.experts else self.ffn

    @property
    def whole_widths(self) -> tuple[int, ...]:
        """Intermediate sizes of the feed-forward layers that process every token: dense layers and
        shared experts, but no routed experts."""
        if not self.experts:
            return (self.ffn,)
        return tuple(
            width for width in (self.ffn if self.dense_layers else 0, self.shared_ffn) if width
        )

    @property
    def value_dim(self) -> int:
        """Columns of a head's values."""
        return self.latent.value if self.latent else self.head_dim

    @property
    def rotated_dim(self) -> int:
        """Number of columns that rotary embeddings rotate in each head."""
        return self.latent.rotated if self.latent else int(self.head_dim * self.rotated)

    @property
    def cached(self) -> int:
        """Number of tensor elements that a server caches per token and layer. The cached elements
        are the keys and values of all heads, or the latent of the keys and values."""
        return (
            self.latent.rank + self.latent.rotated
            if self.latent
            else 2 * self.kv_heads * self.head_dim
        )

    def padded_vocab(self, tp: int) -> int:
        """Returns the number of vocabulary rows after Megatron's padding. After the padding, each
        of the `tp` ranks has the same number of rows, and this number is divisible by 128."""
        unit = 128 * tp
        return -(-self.vocab_size // unit) * unit
