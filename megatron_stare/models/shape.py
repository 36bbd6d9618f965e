"""What a Hugging Face config.json says of a model, as far as Megatron needs to know it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stare.errors import DataError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
# how positions beyond those of pretraining are reached, as far as it does not depend on the sequence at hand
ROPE_SCALINGS = ("linear", "llama3", "yarn")


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
    rope_scaling: Mapping[str, Any] | None = None  # parameters of one of ROPE_SCALINGS, as config.json gives them

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
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    scaling = rope.pop("type", None)
    scaling = rope.setdefault("rope_type", scaling or "default")
    if scaling not in ("default", *ROPE_SCALINGS):
        raise DataError(
            f"RoPE scaling {scaling!r} is not supported", where=str(file), fix=f"known: {', '.join(ROPE_SCALINGS)}"
        )
    for key, what in _UNSUPPORTED.items():
        if config.get(key) and (family, key) != ("qwen2", "attention_bias"):  # says what Qwen2 does anyway
            raise DataError(f"{what} ({key}) is not supported", where=str(file))
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
            qkv_bias=family == "qwen2",
            qk_norm=family.startswith("qwen3"),
            rope_scaling=rope if scaling != "default" else None,
            **(_experts(config) if family == "qwen3_moe" else {}),
        )
    except KeyError as error:
        raise DataError(f"the field {error} is missing", where=str(file)) from error


# settings that would change the model silently if they were overlooked
_UNSUPPORTED = {
    "use_sliding_window": "sliding-window attention",
    "attention_bias": "a bias on the attention's output projection",
    "mlp_bias": "a bias in the feed-forward layers",
}


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise DataError("mixtures of dense and expert layers are not supported", where="config.json")
    return {
        "experts": config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "expert_ffn": config["moe_intermediate_size"],
        "renormalise_experts": bool(config.get("norm_topk_prob", False)),
    }
