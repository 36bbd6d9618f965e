"""Builds the answers of a four-GPU server for the unit tests, with SGLang's own hash kernel
(gpu_hash.py).

The slices of its ranks are cut here by plain indexing, apart from what is tested.

    python tests/support/gpu_exchange.py  # after scripts/setup_sglang.sh

writes tests/rollout/sglang_gpu_exchange.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from support import sglang_servers as servers
from support.gpu_hash import kernel_hashes
from torch import Tensor

from megatron_stare.models.shape import ModelShape

OUT = Path(__file__).parents[1] / "rollout" / "sglang_gpu_exchange.json"
RANKS, HEAD = 4, 4
SHAPE = ModelShape(
    family="qwen2",
    layers=1,
    hidden=24,
    heads=8,
    kv_heads=2,  # fewer than ranks: two ranks hold the same head
    head_dim=HEAD,
    ffn=40,
    vocab_size=37,
    max_positions=64,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=False,
    qkv_bias=True,
    qk_norm=False,
)
DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
)
SIZES = (0, 1, 3, 7, 8193, 17_001)  # elements; a tile of the kernel is 8192 words of four bytes


def pattern(dtype: torch.dtype, size: int, start: int = 0) -> Tensor:
    """[size] of bytes that follow from their position, of any dtype."""
    position = torch.arange(start, start + size * dtype.itemsize)
    values = (position * position * 31 + position * 167 + 13) >> 3 & 255
    if dtype == torch.bool:
        values = values & 1
    return values.to(torch.uint8).view(dtype)


def hashed() -> dict[str, Tensor]:
    """Tensors of every dtype and of odd sizes, by name."""
    found = {
        f"{name} {size}": pattern(getattr(torch, name), size) for name in DTYPES for size in SIZES
    }
    found["transposed"] = pattern(torch.float32, 9000).view(90, 100).t()
    found["odd rows"] = pattern(torch.bfloat16, 9000).view(90, 100)[1::2, 3:]
    return found


def weights() -> dict[str, Tensor]:
    """A whole model of SHAPE in bfloat16, by Hugging Face name."""
    queries, keys = SHAPE.heads * HEAD, SHAPE.kv_heads * HEAD
    layer = "model.layers.0."
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (SHAPE.vocab_size, SHAPE.hidden),
        f"{layer}self_attn.q_proj.weight": (queries, SHAPE.hidden),
        f"{layer}self_attn.k_proj.weight": (keys, SHAPE.hidden),
        f"{layer}self_attn.v_proj.weight": (keys, SHAPE.hidden),
        f"{layer}self_attn.q_proj.bias": (queries,),
        f"{layer}self_attn.k_proj.bias": (keys,),
        f"{layer}self_attn.v_proj.bias": (keys,),
        f"{layer}self_attn.o_proj.weight": (SHAPE.hidden, queries),
        f"{layer}mlp.gate_proj.weight": (SHAPE.ffn, SHAPE.hidden),
        f"{layer}mlp.up_proj.weight": (SHAPE.ffn, SHAPE.hidden),
        f"{layer}mlp.down_proj.weight": (SHAPE.hidden, SHAPE.ffn),
        f"{layer}input_layernorm.weight": (SHAPE.hidden,),
        f"{layer}post_attention_layernorm.weight": (SHAPE.hidden,),
        "model.norm.weight": (SHAPE.hidden,),
        "lm_head.weight": (SHAPE.vocab_size, SHAPE.hidden),
    }
    return {
        name: pattern(torch.uint8, torch.Size(size).numel(), 1000 * i).to(torch.bfloat16).view(size)
        for i, (name, size) in enumerate(sizes.items())
    }


def held(rank: int) -> dict[str, Tensor]:
    """Tensors that a rank holds, by SGLang's name."""
    whole, layer = weights(), "model.layers.0."
    # rows of a rank: query heads, one key head, feed-forward, padded vocabulary
    q, kv, f, v = 2 * HEAD, HEAD, 10, 16
    head = rank // 2
    found = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padded = torch.zeros(64, SHAPE.hidden, dtype=torch.bfloat16)
        padded[: SHAPE.vocab_size] = whole[name]
        found[name] = padded[v * rank : v * (rank + 1)]
    for kind in ("weight", "bias"):
        attention = [whole[f"{layer}self_attn.{p}_proj.{kind}"] for p in "qkv"]
        found[f"{layer}self_attn.qkv_proj.{kind}"] = torch.cat(
            [
                attention[0][q * rank : q * (rank + 1)],
                *(a[kv * head : kv * (head + 1)] for a in attention[1:]),
            ]
        )
    found[f"{layer}self_attn.o_proj.weight"] = whole[f"{layer}self_attn.o_proj.weight"][
        :, q * rank : q * (rank + 1)
    ]
    gate, up = (
        whole[f"{layer}mlp.{p}_proj.weight"][f * rank : f * (rank + 1)] for p in ("gate", "up")
    )
    found[f"{layer}mlp.gate_up_proj.weight"] = torch.cat([gate, up])
    found[f"{layer}mlp.down_proj.weight"] = whole[f"{layer}mlp.down_proj.weight"][
        :, f * rank : f * (rank + 1)
    ]
    return found | {name: tensor for name, tensor in whole.items() if "norm" in name}


def main() -> None:
    ranks = [held(rank) for rank in range(RANKS)]
    tensors = [*hashed().values(), *(tensor for rank in ranks for tensor in rank.values())]
    hashes = iter(kernel_hashes(servers.PYTHON, [tensor.contiguous() for tensor in tensors]))
    recorded: dict[str, Any] = {"hashes": {name: next(hashes) for name in hashed()}}
    recorded["/server_info"] = {
        "version": "0.5.23",
        "device": "cuda",
        "tp_size": RANKS,
        "ep_size": 1,
    }
    recorded["/weights_checker"] = {
        "success": True,
        "ranks": [
            {
                "checksums": {name: next(hashes) for name in rank},
                "parallelism_info": [{"tp_rank": number}],
            }
            for number, rank in enumerate(ranks)
        ],
    }
    OUT.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
