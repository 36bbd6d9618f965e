"""A pipeline stage of Qwen2.5-32B in bfloat16 over 32,768 packed tokens: time, share of the peak
and memory.

Four of its 64 layers, that is the stage of a pipeline of sixteen, on one device without tensor
parallelism, all layers recomputed; embedding and output layer are small, so that only layers are
measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from clock import now
from verdict import Bound

from megatron_stare.config.schema import ModelConfig, ParallelConfig
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.backend.cpu_backend import backend, device, has_transformer_engine
from megatron_stare.megatron.batching.packing import pack
from megatron_stare.megatron.model.model import build_policy, hidden_states
from megatron_stare.models.shape import ModelShape
from megatron_stare.planning.gpus import CPU, named

GPU_ONLY = ("share of the peak", "memory at most, GB")
BOUNDS: dict[str, Bound] = {
    "gradients that are not finite": ("<=", 0.0),
    "seconds": ("<=", 120.0),
    "share of the peak": (">=", 0.30),
    "memory at most, GB": ("<=", 130.0),
}


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
    found = passed(shape, [lengths], recompute="full", cpu=cpu)
    work = operations(shape, lengths)
    return {
        "figures": {
            "gradients that are not finite": float(found.not_finite),
            "seconds": found.seconds,
            "share of the peak": work / found.seconds / peak(),
            "memory at most, GB": found.most / 1e9,
        },
        "operations, without those computed again": work,
        "tokens": sum(lengths),
    }


def peak() -> float:
    """Dense bfloat16 operations a second of this machine's GPU, in planning/gpus.py; there a CPU
    has a nominal one. Raises ConfigError for a GPU that is not in the table."""
    return (named(torch.cuda.get_device_name()) if torch.cuda.is_available() else CPU).flops


@dataclass(frozen=True)
class Passed:
    """Result of forward and backward over micro-batches.

    seconds: of the quickest of three, without the first.
    not_finite: gradients of parameters that are not finite.
    most: bytes of device memory at most, 0 on a CPU.
    """

    seconds: float
    not_finite: int
    most: int


def passed(
    shape: ModelShape,
    micro_batches: Sequence[list[int]],
    *,
    recompute: Literal["none", "full"],
    cpu: bool,
    held: int = 0,
) -> Passed:
    """Passes through a stage's layers, in bfloat16 on a GPU.

    Args:
        micro_batches: lengths of the packed sequences of each.
        held: bytes a parameter that are taken beside weights, gradients and activations.
    """
    settings = ModelConfig(path="", dtype="float32" if cpu else "bfloat16", recompute=recompute)
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
            parameters = sum(parameter.numel() for parameter in model.parameters())
            room = torch.empty(held * parameters, dtype=torch.uint8, device=device())
            inputs = [_inputs(lengths) for lengths in micro_batches]
            if not cpu:
                torch.cuda.reset_peak_memory_stats()
            seconds = []
            for _ in range(3):
                model.zero_grad_buffer()
                start = now()
                with backend():
                    for words, places, packing in inputs:
                        states = hidden_states(model, words, places, packing)
                        (states.float().pow(2).mean() / len(inputs)).backward()
                seconds.append(now() - start)
            gradients = [parameter.main_grad for parameter in model.parameters()]
            bad = sum(int(not gradient.isfinite().all()) for gradient in gradients)
            most = 0 if cpu else torch.cuda.max_memory_allocated()
            del room
        finally:
            parallel_layout.leave()
    return Passed(min(seconds[1:]), bad, most)


def _inputs(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Token ids and positions [1, tokens] of a micro-batch on the device, and its packing."""
    words = torch.randint(0, 1024, (1, sum(lengths)), device=device())
    places = torch.cat([torch.arange(length) for length in lengths])[None].to(device())
    packing = pack(lengths, torch.device("cpu")).to(device(), bounds=has_transformer_engine())
    return words, places, packing


def operations(shape: ModelShape, lengths: list[int]) -> float:
    """Floating-point operations of a forward and backward.

    Six a parameter of the layers and token; causal attention's two products of n^2 / 2 pairs, twice
    as many in backward (Korthikanti et al. 2022, appendix A, with the causal half).
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    parameters = shape.hidden * (2 * queries + 2 * keys) + 3 * shape.hidden * shape.ffn
    attention = sum(2 * 2 * queries * length**2 / 2 for length in lengths)
    return shape.layers * (6 * parameters * sum(lengths) + 3 * attention)
