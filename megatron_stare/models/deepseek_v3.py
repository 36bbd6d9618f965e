"""Defines DeepSeek V3, which combines GLM-4.5's experts with multi-head latent attention (arXiv
2412.19437, section 2.1).

Queries are computed from one normed low-rank latent. Keys and values are computed from a second
low-rank latent. The key vector of an attention head has a part with rotary embeddings and a part
without rotary embeddings. The part without rotary embeddings differs between heads, and is computed
from the latent of keys and values. The part with rotary embeddings is the same in the key vectors
of all heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from megatron_stare.errors import DataError
from megatron_stare.models.family import ModelFamily, Served, rope_parameters
from megatron_stare.models.glm4_moe import Glm4Moe
from megatron_stare.models.rules import ATTENTION, LAYER, Rule
from megatron_stare.models.shape import Latent, ModelShape

_MINE = LAYER + "self_attention."
_INTO_LATENTS = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
_NORM_EPS = 1e-6  # of the latents' norms in transformers, which ignores config.json here


class DeepseekV3(Glm4Moe):
    model_type = "deepseek_v3"
    served_by_groups = False
    rotates_parts = False
    rope_scalings: ClassVar[tuple[str, ...]] = ("yarn",)
    unsupported: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**ModelFamily.unsupported, "attention_bias": "biases in the attention's projections"}
    )
    rules = (
        *(
            rule
            for rule in Glm4Moe.rules
            if "self_attention.linear_qkv." not in rule.megatron
            and "k_layernorm" not in rule.megatron
            if "q_layernorm" not in rule.megatron
        ),
        Rule(_MINE + "linear_q_down_proj.weight", (ATTENTION + "q_a_proj.weight",), "column"),
        Rule(_MINE + "q_layernorm.weight", (ATTENTION + "q_a_layernorm.weight",), "replicated"),
        Rule(
            _MINE + "linear_q_up_proj.layer_norm_weight",
            (ATTENTION + "q_a_layernorm.weight",),
            "replicated",
        ),
        Rule(_MINE + "linear_q_up_proj.weight", (ATTENTION + "q_b_proj.weight",), "column"),
        Rule(
            _MINE + "linear_kv_down_proj.weight",
            (ATTENTION + "kv_a_proj_with_mqa.weight",),
            "column",
        ),
        Rule(_MINE + "kv_layernorm.weight", (ATTENTION + "kv_a_layernorm.weight",), "replicated"),
        Rule(
            _MINE + "linear_kv_up_proj.layer_norm_weight",
            (ATTENTION + "kv_a_layernorm.weight",),
            "replicated",
        ),
        Rule(_MINE + "linear_kv_up_proj.weight", (ATTENTION + "kv_b_proj.weight",), "column"),
    )

    def check(self, config: Mapping[str, Any], where: str) -> None:
        super().check(config, where)
        if config["q_lora_rank"] is None:
            raise DataError(
                "queries without a latent (q_lora_rank: null) are not supported: megatron-core"
                " 0.19 would normalise their input twice",
                where=where,
            )
        if (every := config.get("moe_layer_freq", 1)) != 1:
            raise DataError(
                f"experts in one layer of {every} (moe_layer_freq) are not supported", where=where
            )
        if not config.get("rope_interleave", True):
            raise DataError(
                "rotating halves of a head (rope_interleave: false) is not supported", where=where
            )
        if config["rms_norm_eps"] != _NORM_EPS:
            raise DataError(
                f"an rms_norm_eps of {config['rms_norm_eps']} is not supported: transformers norms"
                f" the latents with {_NORM_EPS} all the same, servers do not",
                where=where,
            )
        for key, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            if config.get(key, known) != known:
                raise DataError(
                    f"experts chosen by {config[key]} ({key}) are not supported", where=where
                )
        rope = rope_parameters(config)
        scales = rope.get("mscale"), rope.get("mscale_all_dim")
        factor = rope.get("attention_factor")
        if rope["rope_type"] == "yarn" and (
            not scales[0] or scales[0] != scales[1] or factor not in (None, 1)
        ):
            raise DataError(
                f"YaRN that scales the rotated part of a head alone (mscale {scales[0]},"
                f" mscale_all_dim {scales[1]}, attention_factor {factor}) is not supported",
                where=where,
            )

    def shape(self, config: Mapping[str, Any]) -> ModelShape:
        latent = Latent(
            query_rank=config["q_lora_rank"],
            rank=config["kv_lora_rank"],
            plain=config["qk_nope_head_dim"],
            rotated=config["qk_rope_head_dim"],
            value=config["v_head_dim"],
        )
        # Every head has its own keys. Some configurations give the size of the rotated part as
        # `head_dim`.
        heads = {"num_key_value_heads": None, "head_dim": latent.plain + latent.rotated}
        return replace(super().shape({**config, **heads}), rotated=1.0, latent=latent)

    def matrices(self, shape: ModelShape) -> dict[str, tuple[int, int | None]]:
        latent = shape.latent
        assert latent is not None
        return super().matrices(shape) | {
            "q_a_proj": (latent.query_rank, shape.hidden),
            "q_a_layernorm": (latent.query_rank, None),
            "q_b_proj": (shape.heads * shape.head_dim, latent.query_rank),
            "kv_a_proj_with_mqa": (latent.rank + latent.rotated, shape.hidden),
            "kv_a_layernorm": (latent.rank, None),
            "kv_b_proj": (shape.heads * (latent.plain + latent.value), latent.rank),
            "o_proj": (shape.hidden, shape.heads * latent.value),
        }

    def megatron_config(self, shape: ModelShape) -> dict[str, Any]:
        latent, scaling = shape.latent, shape.rope_scaling or {}
        assert latent is not None
        return super().megatron_config(shape) | {
            "qk_layernorm": True,
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.rank,
            "qk_head_dim": latent.plain,
            "qk_pos_emb_head_dim": latent.rotated,
            "v_head_dim": latent.value,
            # Frequencies are passed in; YaRN's scale of the scores follows from these two settings.
            "rope_type": "rope",
            "rotary_base": shape.rope_theta,
            "rotary_scaling_factor": scaling.get("factor", 1.0),
            "mscale_all_dim": scaling.get("mscale_all_dim", 0.0),
        }

    def served(self, name: str, shape: ModelShape) -> Served:
        """Returns the location of a Hugging Face tensor among the parameters of an engine's server.
        In the servers, one parameter fuses the two projections that compute the latents. The
        servers keep the router's weights in the compute dtype, but the router's bias in float32."""
        layer, _, module = name.rpartition(".self_attn.")
        if module in _INTO_LATENTS:
            joined = f"{layer}.self_attn.fused_qkv_a_proj_with_mqa.weight"
            return Served(joined, _INTO_LATENTS.index(module), 2, whole=True, at_once=True)
        place = super().served(name, shape)
        return replace(place, dtype=None) if name.endswith(".mlp.gate.weight") else place


FAMILY = DeepseekV3()
