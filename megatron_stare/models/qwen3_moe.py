"""Defines Qwen3-MoE, which has experts in place of every feed-forward layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron_stare.errors import DataError
from megatron_stare.models.family import Served
from megatron_stare.models.qwen3 import Qwen3
from megatron_stare.models.rules import DENSE, LAYER, MLP, Rule
from megatron_stare.models.shape import ModelShape

_EXPERT, _GROUPED = LAYER + "mlp.experts.local_experts.{}.", LAYER + "mlp.experts."
_GATE_UP = (MLP + "experts.{}.gate_proj.weight", MLP + "experts.{}.up_proj.weight")
_DOWN = (MLP + "experts.{}.down_proj.weight",)
_SERVED_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class Qwen3Moe(Qwen3):
    """Qwen3-MoE. A checkpoint has separate matrices for every expert. In transformers and in
    servers, the matrices of a layer's experts are stacked."""

    model_type = "qwen3_moe"
    rules = (
        *(rule for rule in DENSE if ".mlp." not in rule.megatron),
        Rule(LAYER + "mlp.router.weight", (MLP + "gate.weight",), "replicated"),
        Rule(_EXPERT + "linear_fc1.weight", _GATE_UP, "gated"),
        Rule(_EXPERT + "linear_fc2.weight", _DOWN, "row"),
        Rule(_GROUPED + "linear_fc1.weight{}", _GATE_UP, "gated"),
        Rule(_GROUPED + "linear_fc2.weight{}", _DOWN, "row"),
    )

    def check(self, config: Mapping[str, Any], where: str) -> None:
        super().check(config, where)
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise DataError("mixtures of dense and expert layers are not supported", where=where)
        if config["num_experts_per_tok"] == 1 and config.get("norm_topk_prob", False):
            raise DataError(
                "one expert a token whose weight is renormalised (norm_topk_prob) is not supported:"
                " the weight is always 1, so its router learns nothing, and Megatron refuses it",
                where=where,
                fix="a model with two experts a token or more, or with norm_topk_prob false",
            )

    def shape(self, config: Mapping[str, Any]) -> ModelShape:
        return replace(
            super().shape(config),
            experts=(
                config["num_experts"] if "num_experts" in config else config["num_local_experts"]
            ),
            experts_per_token=config["num_experts_per_tok"],
            expert_ffn=config["moe_intermediate_size"],
            renormalise_experts=bool(config.get("norm_topk_prob", False)),
        )

    def matrices(self, shape: ModelShape) -> dict[str, tuple[int, int | None]]:
        return super().matrices(shape) | {"gate": (shape.experts, shape.hidden)}

    def megatron_config(self, shape: ModelShape) -> dict[str, Any]:
        return super().megatron_config(shape) | {
            "num_moe_experts": shape.experts,
            "moe_ffn_hidden_size": shape.expert_ffn,
            "moe_router_topk": shape.experts_per_token,
            # softmax over the chosen experts is softmax over all, renormalised
            "moe_router_pre_softmax": not shape.renormalise_experts,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        }

    def checkpoint_views(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Splits a parameter of the transformers model into the checkpoint's tensors. The parameter
        stacks all experts of a layer. In the stacked parameter `gate_up_proj`, the rows of an
        expert's matrix `gate_proj` come before the rows of the expert's matrix `up_proj`."""
        layer, _, last = name.rpartition(".")
        views: dict[str, Tensor] = {}
        if not layer.endswith(".experts"):
            return {name: parameter}
        for number, expert in enumerate(parameter.unbind()):
            if last == "down_proj":
                views[f"{layer}.{number}.down_proj.weight"] = expert
            else:
                gate, up = expert.chunk(2)
                views |= {
                    f"{layer}.{number}.gate_proj.weight": gate,
                    f"{layer}.{number}.up_proj.weight": up,
                }
        return views

    def served(self, name: str, shape: ModelShape) -> Served:
        expert = _SERVED_EXPERT.fullmatch(name)
        if not expert:
            return super().served(name, shape)
        layer, number, part = expert[1], int(expert[2]), expert[3]
        if part == "down":
            return Served(f"{layer}.w2_weight", number, None)
        return Served(f"{layer}.w13_weight", 2 * number + (part == "up"), None, an_expert=2)


FAMILY = Qwen3Moe()
