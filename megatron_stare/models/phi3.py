"""Defines Phi-3 and Phi-4, which have Llama's layers. A checkpoint of Phi-3 or Phi-4 stores the
projections q, k and v as one matrix `qkv_proj`, and stores the projections `gate` and `up` as one
matrix `gate_up_proj`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_stare.models.family import ModelFamily
from megatron_stare.models.rules import ATTENTION, DENSE, MLP
from megatron_stare.models.shape import ModelShape

_FUSED = {"qkv": (ATTENTION + "qkv_proj.weight",), "gated": (MLP + "gate_up_proj.weight",)}


class Phi3(ModelFamily):
    """Phi-3. Servers keep the fused matrices. LongRoPE for long contexts is not supported, because
    LongRoPE's frequencies depend on the length of the current sequence. YaRN is not supported
    either, because transformers computes LongRoPE for this family even if config.json sets YaRN."""

    model_type = "phi3"
    rules = tuple(
        replace(rule, hf=_FUSED.get(rule.layout, rule.hf))
        for rule in DENSE
        if not rule.megatron.endswith(".bias")
    )
    rope_scalings = ()

    def window(self, config: Mapping[str, Any]) -> int | None:
        return config.get("sliding_window")

    def matrices(self, shape: ModelShape) -> dict[str, tuple[int, int | None]]:
        return super().matrices(shape) | {
            "qkv_proj": ((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden),
            "gate_up_proj": (2 * shape.ffn, shape.hidden),
        }


FAMILY = Phi3()
