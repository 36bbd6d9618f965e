"""Defines GLM-4.5, which has leading dense layers, followed by layers with routed and shared
experts. The router chooses the routed experts of a token by each expert's sigmoid score plus a
bias.

The bias of an expert (`e_score_correction_bias`) affects which experts are chosen, but not the
weights of the chosen experts (Wang et al., arXiv 2408.15664). Training does not change the experts'
biases, so engines and checkpoints get the biases of the loaded model. A checkpoint can also contain
layers for multi-token prediction, whose numbers follow the number of the last transformer layer.
The trained model does not contain layers for multi-token prediction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from megatron_stare.errors import DataError
from megatron_stare.models.family import ModelFamily, Served, rope_parameters
from megatron_stare.models.qwen3_moe import Qwen3Moe
from megatron_stare.models.rules import DENSE, LAYER, MLP, Rule
from megatron_stare.models.shape import ModelShape

_SHARED = MLP + "shared_experts."
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_OF_DENSE = ("mlp.gate_proj.", "mlp.up_proj.", "mlp.down_proj.")


class Glm4Moe(Qwen3Moe):
    """GLM-4.5. In this family, the setting `attention_bias` means a bias on queries, keys and
    values."""

    model_type = "glm4_moe"
    served_by_groups = True
    quantized: ClassVar[frozenset[str]] = frozenset()
    rotates_parts = True
    rope_scalings: ClassVar[tuple[str, ...]] = ()
    unsupported: ClassVar[Mapping[str, str]] = {
        key: what for key, what in ModelFamily.unsupported.items() if key != "attention_bias"
    }
    rules = (
        *Qwen3Moe.rules,
        *(rule for rule in DENSE if ".mlp." in rule.megatron),
        Rule(
            LAYER + "mlp.router.expert_bias",
            (MLP + "gate.e_score_correction_bias",),
            "replicated",
            float32=True,
        ),
        Rule(
            LAYER + "mlp.shared_experts.linear_fc1.weight",
            (_SHARED + "gate_proj.weight", _SHARED + "up_proj.weight"),
            "gated",
        ),
        Rule(
            LAYER + "mlp.shared_experts.linear_fc2.weight", (_SHARED + "down_proj.weight",), "row"
        ),
    )

    def check(self, config: Mapping[str, Any], where: str) -> None:
        super().check(config, where)
        layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace", 1)
        if not 0 <= dense < layers:
            raise DataError(
                f"{dense} leading dense layers (first_k_dense_replace) of {layers} leave none with"
                " experts",
                where=where,
            )
        if not config.get("n_shared_experts"):
            raise DataError(
                "a model without an expert for every token (n_shared_experts) is not supported",
                where=where,
            )
        each, chosen = config["num_experts_per_tok"], config.get("norm_topk_prob", True)
        if each > 1 and not chosen:
            raise DataError(
                "sigmoid weights of experts that are not renormalised (norm_topk_prob: false) are"
                " not supported: Megatron always renormalises them",
                where=where,
            )
        groups, of_token = config.get("n_group") or 1, config.get("topk_group") or 1
        if groups > of_token and each // of_token != 2:
            raise DataError(
                f"{each} experts a token from {of_token} of {groups} groups (n_group, topk_group)"
                f" are not supported: Megatron ranks groups by their {each // of_token} best"
                " experts, this model by 2",
                where=where,
            )

    def shape(self, config: Mapping[str, Any]) -> ModelShape:
        groups, of_token = config.get("n_group") or 1, config.get("topk_group") or 1
        rotated = rope_parameters(config).get(
            "partial_rotary_factor", config.get("partial_rotary_factor")
        )
        return replace(
            super().shape({"num_experts": config["n_routed_experts"], **config}),
            qkv_bias=bool(config.get("attention_bias", False)),
            qk_norm=bool(config.get("use_qk_norm", False)),
            renormalise_experts=bool(config.get("norm_topk_prob", True)),
            dense_layers=config.get("first_k_dense_replace", 1),
            shared_ffn=config["n_shared_experts"] * config["moe_intermediate_size"],
            router_scale=float(config.get("routed_scaling_factor", 1.0)),
            # groups have no effect if a token may choose from all of them
            expert_groups=groups if groups > of_token else 1,
            groups_per_token=of_token if groups > of_token else 1,
            rotated=0.5 if rotated is None else float(rotated),  # transformers' default
            prediction_layers=config.get("num_nextn_predict_layers") or 0,
        )

    def has(self, name: str, shape: ModelShape) -> bool:
        in_layer = _IN_LAYER.fullmatch(name)
        if in_layer and in_layer[2].startswith("mlp."):
            return in_layer[2].startswith(_OF_DENSE) == (int(in_layer[1]) < shape.dense_layers)
        return super().has(name, shape)

    def leaves_out(self, name: str, shape: ModelShape) -> bool:
        """Returns True if a tensor belongs to the multi-token prediction layers. In a checkpoint,
        the layer numbers of the multi-token prediction layers follow the number of the model's last
        layer. The multi-token prediction layers also contain an embedding and an output head."""
        in_layer = _IN_LAYER.fullmatch(name)
        return (
            in_layer is not None and 0 <= int(in_layer[1]) - shape.layers < shape.prediction_layers
        )

    def size(self, name: str, shape: ModelShape) -> tuple[int, ...]:
        if name.endswith(".e_score_correction_bias"):
            return (shape.experts,)
        if ".mlp.experts." not in name:
            width = shape.shared_ffn if ".shared_experts." in name else shape.ffn
            shape = replace(shape, expert_ffn=width)
        return super().size(name, shape)

    def megatron_config(self, shape: ModelShape) -> dict[str, Any]:
        found = super().megatron_config(shape) | {
            "moe_router_pre_softmax": False,
            "moe_router_score_function": "sigmoid",
            "moe_router_topk_scaling_factor": shape.router_scale,
            "moe_router_enable_expert_bias": True,
            # 0: otherwise every step would move the bias to balance the experts
            "moe_router_bias_update_rate": 0.0,
            "moe_shared_expert_intermediate_size": shape.shared_ffn,
        }
        if shape.dense_layers:
            found["moe_layer_freq"] = [0] * shape.dense_layers + [1] * (
                shape.layers - shape.dense_layers
            )
        if shape.expert_groups > 1:
            found |= {
                "moe_router_num_groups": shape.expert_groups,
                "moe_router_group_topk": shape.groups_per_token,
            }
        return found

    def megatron_model(self, shape: ModelShape) -> dict[str, Any]:
        return super().megatron_model(shape) | {"rotary_percent": shape.rotated}

    def served(self, name: str, shape: ModelShape) -> Served:
        """Returns the location of a Hugging Face tensor among the parameters of an engine's server.
        The servers keep the router in float32."""
        place = super().served(name, shape)
        return replace(place, dtype=torch.float32) if ".mlp.gate." in name else place


FAMILY = Glm4Moe()
