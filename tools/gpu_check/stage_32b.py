"""A pipeline stage of Qwen2.5-32B in bfloat16 over 32,768 packed tokens: time, share of the peak
and memory.

Four of its 64 layers, that is the stage of a pipeline of sixteen, on one device without tensor
parallelism, all layers recomputed; embedding and output layer are small, so that only layers are
measured.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from clock import now
from verdict import Bound

from megatron_stare.config.schema import ModelConfig, ParallelConfig
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.backend.cpu_backend import backend, device, has_transformer_engine
from megatron_stare.megatron.batching.packing import pack
from megatron_stare.megatron.model.model import build_policy, hidden_states
from megatron_stare.models.shape import ModelShape

GPU_ONLY = ("share of the peak", "memory at most, GB")
BOUNDS: dict[str, Bound] = {
    "gradients that are not finite": ("<=", 0.0),
    "seconds": ("<=", 120.0),
    "share of the peak": (">=", 0.30),
    "memory at most, GB": ("<=", 130.0),
}
PEAK = 989e12  # dense bfloat16 of an H100 or H200, operations a second


def run(cpu: bool) -> dict[str, Any]:
    shape = ModelShape(
        family="qwen2",
        layers=2 if cpu else 4,
        hidden=64 if cpu else 5120,
        heads=8 if cpu else 40,
        kv_heads=2 if cpu else 8,
        head_dim=8 if cpu else 128,
        ffn=96 if cpu else 27_648,
        vocab_size=1024,
        max_positions=40_960,
        rope_theta=1e6,
        norm_eps=1e-6,
        tied=False,
        qkv_bias=True,
        qk_norm=False,
    )
    lengths = [40, 24] if cpu else [16_384, 8_192, 8_192]
    tokens = sum(lengths)
    settings = ModelConfig(path="", dtype="float32" if cpu else "bfloat16", recompute="full")
    with tempfile.TemporaryDirectory() as meeting:
        layout = parallel_layout.join(
            ParallelConfig(), 0, f"file://{meeting}/ranks", seed=1, timeout_s=120
        )
        try:
            (model,) = build_policy(
                shape, settings, ParallelConfig(), layout, distributed_optimizer=False
            )
            torch.manual_seed(0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
            words = torch.randint(0, 1024, (1, tokens), device=device())
            places = torch.cat([torch.arange(length) for length in lengths])[None].to(device())
            packing = pack(lengths, torch.device("cpu")).to(
                device(), bounds=has_transformer_engine()
            )
            seconds = []
            for _ in range(3):
                model.zero_grad_buffer()
                start = now()
                with backend():
                    hidden_states(model, words, places, packing).float().pow(2).mean().backward()
                seconds.append(now() - start)
            gradients = [parameter.main_grad for parameter in model.parameters()]
            bad = sum(int(not gradient.isfinite().all()) for gradient in gradients)
        finally:
            parallel_layout.leave()
    work = operations(shape, lengths)
    return {
        "figures": {
            "gradients that are not finite": float(bad),
            "seconds": min(seconds[1:]),
            "share of the peak": work / min(seconds[1:]) / PEAK,
            "memory at most, GB": torch.cuda.max_memory_allocated() / 1e9 if not cpu else 0.0,
        },
        "operations, without those computed again": work,
        "tokens": tokens,
    }


def operations(shape: ModelShape, lengths: list[int]) -> float:
    """Floating-point operations of a forward and backward.

    Six a parameter of the layers and token; causal attention's two products of n^2 / 2 pairs, twice
    as many in backward (Korthikanti et al. 2022, appendix A, with the causal half).
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    parameters = shape.hidden * (2 * queries + 2 * keys) + 3 * shape.hidden * shape.ffn
    attention = sum(2 * 2 * queries * length**2 / 2 for length in lengths)
    return shape.layers * (6 * parameters * sum(lengths) + 3 * attention)
