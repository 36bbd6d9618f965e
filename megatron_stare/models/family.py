"""Defines the interface through which the rest of the package uses a model architecture.

The base class `ModelFamily` describes the dense decoder of most open models. The dense decoder has
RMSNorm before attention and before the feed-forward layer, rotary positions, grouped-query
attention and a gated SiLU. Each family has a file in this folder, which overrides the parts that
differ from the dense decoder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_stare.errors import DataError
from megatron_stare.models.rope import yarn_factors
from megatron_stare.models.rules import DENSE, Rule, numbered
from megatron_stare.models.shape import ModelShape

# known keys of rotary parameters by type, besides those of every type; a key that transformers
# ignores may still change what a server computes
_ROPE_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
        "yarn": (
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "attn_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    }
)


# of attention and feed-forward layers
PROJECTIONS = frozenset(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))


@dataclass(frozen=True)
class Served:
    """Location of a Hugging Face tensor among the parameters of an engine's server. The server's
    parameter `name` is a stack of tensors, in which the Hugging Face tensor has the position
    `index`.

    `count`: number of tensors in the stack, or None if the stack contains the tensors of all
        experts.
    `an_expert`: number of tensors per expert in the stack, used only if `count` is None.
    `dtype`: dtype of the server's parameter, or None for the server's compute dtype.
    `whole`: true if every rank of a server holds a complete copy of the server's parameter. The
        trainer can split the Hugging Face tensor over the trainer's ranks, independently of
        `whole`.
    `at_once`: whether all stacked tensors must be passed to the server in one call.
    """

    name: str
    index: int = 0
    count: int | None = 1
    an_expert: int = 1
    dtype: torch.dtype | None = None
    whole: bool = False
    at_once: bool = False


class ModelFamily:
    """An architecture. Arguments named `config` contain the contents of a config.json."""

    model_type: ClassVar[str]
    rules: ClassVar[tuple[Rule, ...]] = DENSE
    # supported RoPE scalings for contexts longer than in pretraining; none depends on the current
    # sequence
    rope_scalings: ClassVar[tuple[str, ...]] = ("linear", "llama3", "yarn")
    # base of the rotary frequencies if config.json has none; None: the field is required
    rope_theta: ClassVar[float | None] = None
    rotates_parts: ClassVar[bool] = False  # whether positions may rotate only a part of each head
    qkv_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False
    # unsupported settings, which would silently change the model if ignored
    unsupported: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "use_sliding_window": "sliding-window attention",
            "attention_bias": "a bias on the attention's output projection",
            "mlp_bias": "a bias in the feed-forward layers",
        }
    )
    # projections that servers stack into one parameter: name of the parameter, index of the
    # projection in it, and number of projections
    stacked: ClassVar[Mapping[str, tuple[str, int, int]]] = MappingProxyType(
        {
            "q_proj": ("qkv_proj", 0, 3),
            "k_proj": ("qkv_proj", 1, 3),
            "v_proj": ("qkv_proj", 2, 3),
            "gate_proj": ("gate_up_proj", 0, 2),
            "up_proj": ("gate_up_proj", 1, 2),
        }
    )

    # kinds of matrices that servers can store in 8 bits (sglang.quantization); empty if this was
    # never compared with SGLang's classes for the family
    quantized: ClassVar[frozenset[str]] = frozenset()

    # True if servers support data-parallel attention for the family, as their source shows:
    # attention sharded within groups of ranks, each group with its own requests. Other families are
    # sharded over all ranks of a server, whose groups would then see each other's requests.
    served_by_groups: ClassVar[bool] = False

    def check(self, config: Mapping[str, Any], where: str) -> None:
        """Raises DataError if config.json has a setting that is not supported for this family.

        Args:
            where: path of the config.json, for the error message.
        """
        if config.get("quantization_config"):
            raise DataError(
                "quantised weights (quantization_config) are not supported",
                where=where,
                fix=(
                    "use the checkpoint that was not quantised; if its weights were dequantised,"
                    " remove quantization_config from config.json"
                ),
            )
        _refuse_two_ropes(config, where)
        rope = rope_parameters(config)
        scaling = rope["rope_type"]
        if scaling not in ("default", *self.rope_scalings):
            known = ", ".join(self.rope_scalings) or "none"
            raise DataError(
                f"RoPE scaling {scaling!r} is not supported", where=where, fix=f"known: {known}"
            )
        _refuse_unknown_rope_keys(rope, where)
        _refuse_two_yarns(rope, where)
        found = [f"{what} ({key})" for key, what in self.unsupported.items() if config.get(key)]
        rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if rotated not in (None, 1) and not self.rotates_parts:
            found.append(f"rotating a part of each head (partial_rotary_factor {rotated})")
        if other := set(config.get("layer_types") or ()) - {"full_attention"}:
            found.append(f"{', '.join(sorted(other))} (layer_types)")
        if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
            found.append(f"the activation {activation} (hidden_act)")
        if found:
            raise DataError(f"{found[0]} is not supported", where=where)
        if chunks := config.get("dual_chunk_attention_config"):
            near = chunks["chunk_size"] - chunks["local_size"]
            raise DataError(
                "attention in chunks (dual_chunk_attention_config) is not supported",
                where=where,
                fix=(
                    f"it changes nothing up to {near} tokens: in a copy, remove it and set"
                    f" max_position_embeddings to {near}"
                ),
            )
        window, positions = self.window(config), config["max_position_embeddings"]
        if window is not None and window < positions:
            raise DataError(
                f"attention to the last {window} of {positions} positions (sliding_window) is not"
                " supported",
                where=where,
                fix=(
                    f"for sequences of up to {window} tokens, set max_position_embeddings to"
                    f" {window} in a copy"
                ),
            )

    def window(self, config: Mapping[str, Any]) -> int | None:
        """Returns the size of the attention window in positions, or None if attention covers all
        earlier positions."""
        return None

    def shape(self, config: Mapping[str, Any]) -> ModelShape:
        """Reads the shape from config.json. Raises KeyError if a field is missing in config.json,
        or if rope_theta is null."""
        rope = rope_parameters(config)
        theta = rope.get("rope_theta", config.get("rope_theta", self.rope_theta))
        if theta is None:
            raise KeyError("rope_theta")
        heads = config["num_attention_heads"]
        return ModelShape(
            family=self.model_type,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            max_positions=config["max_position_embeddings"],
            rope_theta=float(theta),
            norm_eps=config["rms_norm_eps"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            rope_scaling=rope if rope["rope_type"] != "default" else None,
        )

    def has(self, name: str, shape: ModelShape) -> bool:
        """Returns True if a model of this shape has the Hugging Face tensor of this name. The
        argument `name` must be one of the tensor names in the family's rules."""
        if name == "lm_head.weight":
            return not shape.tied
        if name.endswith("_proj.bias"):
            return shape.qkv_bias
        return shape.qk_norm or not re.search(r"\.[qk]_norm\.", name)

    def leaves_out(self, name: str, shape: ModelShape) -> bool:
        """Returns True if Hugging Face checkpoints of this family can contain this tensor even
        though the trained model does not use it."""
        return False

    def size(self, name: str, shape: ModelShape) -> tuple[int, ...]:
        """Returns the size of a Hugging Face tensor: [out, in] for a matrix, [out] for a bias,
        [width] for a norm."""
        module, kind = name.split(".")[-2:]
        out, into = self.matrices(shape).get(module, (shape.hidden, None))
        return (out,) if into is None or kind == "bias" else (out, into)

    def matrices(self, shape: ModelShape) -> dict[str, tuple[int, int | None]]:
        """Returns a dict that maps module names to sizes. The size of a matrix is (out, in), and
        the size of a norm is (width, None). The dict contains every kind of matrix. The dict
        contains a norm only if the width of the norm is not the hidden size."""
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        return {
            "embed_tokens": (shape.vocab_size, shape.hidden),
            "lm_head": (shape.vocab_size, shape.hidden),
            "q_proj": (queries, shape.hidden),
            "k_proj": (keys, shape.hidden),
            "v_proj": (keys, shape.hidden),
            "o_proj": (shape.hidden, queries),
            "gate_proj": (shape.feed_forward, shape.hidden),
            "up_proj": (shape.feed_forward, shape.hidden),
            "down_proj": (shape.hidden, shape.feed_forward),
            "q_norm": (shape.head_dim, None),
            "k_norm": (shape.head_dim, None),
        }

    def megatron_config(self, shape: ModelShape) -> dict[str, Any]:
        """Returns the settings of Megatron's TransformerConfig that define the computation. The
        parallelism settings are not included, because they come from the run's configuration."""
        return {
            "num_layers": shape.layers,
            "hidden_size": shape.hidden,
            "num_attention_heads": shape.heads,
            "num_query_groups": shape.kv_heads,
            "kv_channels": shape.head_dim,
            "ffn_hidden_size": shape.ffn,
            "normalization": "RMSNorm",
            "layernorm_epsilon": shape.norm_eps,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "add_qkv_bias": shape.qkv_bias,
            "qk_layernorm": shape.qk_norm,
        }

    def megatron_model(self, shape: ModelShape) -> dict[str, Any]:
        """Returns the settings of Megatron's GPTModel that define the computation outside the
        transformer layers."""
        return {
            "max_sequence_length": shape.max_positions,
            "share_embeddings_and_output_weights": shape.tied,
            "position_embedding_type": "rope",
            "rotary_base": shape.rope_theta,
        }

    def checkpoint_views(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Returns a dict of named checkpoint tensors, which together make up one parameter of a
        model in the library transformers. The tensors are views of the parameter where possible."""
        return {name: parameter}

    def served(self, name: str, shape: ModelShape) -> Served:
        """Returns the location of a Hugging Face tensor in an engine's server: the server's
        parameter, and the position in this parameter."""
        module, _, kind = name.rpartition(".")
        layer, _, projection = module.rpartition(".")
        if projection in self.stacked:
            stacked, index, count = self.stacked[projection]
            return Served(f"{layer}.{stacked}.{kind}", index, count)
        return Served(name)

    def float32(self, name: str) -> bool:
        """Returns True if a Hugging Face tensor is float32 regardless of the model's dtype."""
        pattern = numbered(name)[1]
        return any(pattern in rule.hf for rule in self.rules if rule.float32)

    def cost(self, shape: ModelShape, length: int) -> float:
        """Returns the computing cost of one sequence of `length` tokens. A cost of 1 is the number
        of operations that the model's linear layers take for one token. The operations of linear
        layers grow with the sequence's length, and the operations of attention grow with the square
        of the length.

        For hidden size H, the linear layers of one transformer layer take 24 H^2 operations per
        token. The number 24 H^2 assumes that the matrices of Q, K, V and output have shape [H, H],
        and that the gated MLP has width 8/3 H. For sequences of N tokens and hidden size H, causal
        attention takes 2 H N operations per token in each transformer layer. For N tokens per
        sequence and hidden size H, the operations of attention are therefore N / (12 H) times the
        operations of the linear layers.
        """
        return length * (1 + length / (12 * shape.hidden))


def _refuse_two_ropes(config: Mapping[str, Any], where: str) -> None:
    """Raises DataError if the keys rope_scaling and rope_parameters of config.json describe two
    different rotary embeddings. If config.json contains both keys, transformers and servers use the
    older key rope_scaling, and ignore the base (rope_theta) in rope_parameters."""
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    if not newer or not older:
        return
    one = rope_parameters({"rope_parameters": newer})
    other = rope_parameters({"rope_scaling": older})
    base = one.pop("rope_theta", config.get("rope_theta"))
    other_base = other.pop("rope_theta", config.get("rope_theta"))
    if (one, base) == (other, other_base):
        return
    raise DataError(
        "rope_parameters and rope_scaling describe two different rotary embeddings",
        where=where,
        fix=(
            "keep one of them: put a model card's rope_scaling (YaRN, say) into rope_parameters,"
            " beside its rope_theta"
        ),
    )


def _refuse_unknown_rope_keys(rope: Mapping[str, Any], where: str) -> None:
    """Raises DataError if rotary parameters of a type in _ROPE_KEYS have an unknown key."""
    scaling = rope["rope_type"]
    known = ("rope_type", "rope_theta", "partial_rotary_factor", *_ROPE_KEYS.get(scaling, rope))
    if unknown := [key for key in rope if key not in known]:
        raise DataError(
            f"{unknown[0]} in rotary parameters of type {scaling!r} is not supported",
            where=where,
            fix=f"known: {', '.join(known)}",
        )


def _refuse_two_yarns(rope: Mapping[str, Any], where: str) -> None:
    """Raises DataError if servers and transformers scale YaRN's cosines and sines by different
    factors. YaRN has a default scale factor for cosines and sines. The formula of the default scale
    factor uses neither `attn_factor` nor `attention_factor`. Servers multiply the default scale
    factor by `attn_factor`, and ignore `attention_factor`. In transformers, `attention_factor`
    replaces the default scale factor, and `attn_factor` is ignored."""
    if rope["rope_type"] != "yarn" or not {"attn_factor", "attention_factor"} & rope.keys():
        return
    trained, default = yarn_factors(rope)
    served = rope.get("attn_factor", 1.0) * default
    if math.isclose(served, trained, rel_tol=1e-6):
        return
    raise DataError(
        "servers scale YaRN by attn_factor, and transformers by attention_factor: here the two"
        " differ",
        where=where,
        fix=(
            f"in a copy, write attention_factor {round(served, 9)} beside attn_factor; deleting"
            " attn_factor makes another model"
            if "attn_factor" in rope
            else f"in a copy, write attn_factor {round(trained / default, 9)} beside"
            " attention_factor; deleting attention_factor makes another model"
        ),
    )


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary embedding's parameters, including `rope_type`. Since transformers 5,
    config.json stores rotary parameters under the key `rope_parameters`. Older config.json files
    store the same parameters under `rope_scaling`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    scaling = rope.pop("type", None)
    rope.setdefault("rope_type", scaling or "default")
    return rope
