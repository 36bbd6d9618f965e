"""Transformer Engine's layers against plain transformers. On a CPU, where there are none, the local
layers."""

from __future__ import annotations

from typing import Any

from clock import exact_products
from rig import Size, expected, gradient_error, model_folder, trained
from verdict import Bound

from megatron_stare.megatron.backend.cpu_backend import has_transformer_engine

GPU_ONLY = ("layers are Transformer Engine's",)
BOUNDS: dict[str, Bound] = {
    "layers are Transformer Engine's": (">=", 1.0),
    # against float32, relative to transformers' own bfloat16; fused attention has no float32
    "bfloat16 mean log-prob error over transformers' in bfloat16": ("<=", 1.5),
    "bfloat16 gradient's error over transformers' in bfloat16": ("<=", 2.0),
}


def run(cpu: bool) -> dict[str, Any]:
    exact_products()
    size = Size.of(cpu)
    with model_folder(size) as folder:
        log_prob, gradients = expected(folder, size)
        theirs, their_gradients = expected(folder, size, "bfloat16")
        ours = trained(folder, size, dtype="bfloat16")
    off, peer = (ours.log_prob - log_prob[ours.index]).abs(), (theirs - log_prob).abs()
    error = gradient_error(ours.gradients, gradients) / gradient_error(their_gradients, gradients)
    return {
        "figures": {
            "layers are Transformer Engine's": float(has_transformer_engine()),
            "bfloat16 mean log-prob error over transformers' in bfloat16": float(
                off.mean() / peer.mean()
            ),
            "bfloat16 gradient's error over transformers' in bfloat16": error,
        }
    }
