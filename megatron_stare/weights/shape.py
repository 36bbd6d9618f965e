"""What a Hugging Face config.json says of a model, as far as Megatron needs to know it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stare.errors import DataError

FAMILIES = ("qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model. `vocab_size` is config.vocab_size: the columns the policy really has."""

    family: str
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

    def padded_vocab(self, tp: int, multiple: int = 128) -> int:
        """Vocabulary rows that Megatron holds over `tp` ranks: a multiple of `multiple` a rank."""
        unit = multiple * tp
        return -(-self.vocab_size // unit) * unit


def read_shape(path: str | Path) -> ModelShape:
    """The shape of the model in a Hugging Face folder.

    Raises:
        DataError: no folder, no config.json, an unknown family, or a missing field.
    """
    file = Path(path) / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except OSError as error:
        raise DataError(
            f"cannot read the model's config.json ({error.strerror})",
            where=str(file),
            fix="model.path must be a Hugging Face model folder on this machine",
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(f"not valid JSON: {error}", where=str(file)) from error
    family = config.get("model_type")
    if family not in FAMILIES:
        raise DataError(f"model family {family!r} is unknown", where=str(file), fix=f"known: {', '.join(FAMILIES)}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise DataError(f"RoPE scaling {rope} is not supported for this family", where=str(file))
    if config.get("use_sliding_window"):
        raise DataError("sliding-window attention is not supported", where=str(file))
    try:
        heads = config["num_attention_heads"]
        return ModelShape(
            family=family,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            max_positions=config["max_position_embeddings"],
            rope_theta=float(rope.get("rope_theta") or config["rope_theta"]),
            norm_eps=config["rms_norm_eps"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=True if family == "qwen2" else bool(config.get("attention_bias", False)),
            qk_norm=family != "qwen2",
            **(_experts(config) if family == "qwen3_moe" else {}),
        )
    except KeyError as error:
        raise DataError(f"the field {error} is missing", where=str(file)) from error


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise DataError("mixtures of dense and expert layers are not supported", where="config.json")
    return {
        "experts": config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "expert_ffn": config["moe_intermediate_size"],
        "renormalise_experts": bool(config.get("norm_topk_prob", False)),
    }
