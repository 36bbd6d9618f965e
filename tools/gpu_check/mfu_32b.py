"""Model FLOPs utilisation of a pipeline stage of Qwen2.5-32B: four of its 64 layers, forward and
backward over four micro-batches of 8,192 packed tokens, nothing computed again.

Room for Adam's float32 masters and moments is taken meanwhile, so that the stage has the memory
that it has in training. The optimizer's step, the exchange between stages and the pipeline's idle
time are not measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stage_32b import passed, peak
from verdict import Bound

from megatron_stare.megatron.backend.cpu_backend import has_transformer_engine
from megatron_stare.models import read_shape
from megatron_stare.planning.phase_times import body_flops
from megatron_stare.process.shipped import SHIPPED

GPU_ONLY = ("share of the peak", "memory at most, GB")
BOUNDS: dict[str, Bound] = {
    "gradients that are not finite": ("<=", 0.0),
    # planning assumes 0.4 (planning/gpus.py); Megatron-LM reports 0.41 to 0.48 of pretraining
    "share of the peak": (">=", 0.35),
    "memory at most, GB": ("<=", 76.0),  # an 80 GB card's, less what CUDA and NCCL take
}
LENGTHS = [4_096, 2_048, 1_024, 1_024]  # of the sequences of a micro-batch
ADAM = 12  # bytes a parameter: float32 master and two moments


def run(cpu: bool) -> dict[str, Any]:
    whole = read_shape(SHIPPED / "assets" / "architectures" / "qwen2.5-32b")
    stage = replace(whole, layers=4, vocab_size=1024)
    lengths = [[length // 64 for length in LENGTHS]] * 2 if cpu else [LENGTHS] * 4
    if cpu:
        stage = replace(stage, layers=2, hidden=64, heads=8, kv_heads=2, head_dim=8, ffn=96)
    found = passed(stage, lengths, recompute="none", cpu=cpu, held=ADAM)
    # as a plan counts an update
    work = 3 * sum(body_flops(stage, length, 0) for each in lengths for length in each)
    return {
        "figures": {
            "gradients that are not finite": float(found.not_finite),
            "share of the peak": work / found.seconds / peak(),
            "memory at most, GB": found.most / 1e9,
            "seconds": found.seconds,
        },
        "peak, operations a second": peak(),
        "operations": work,
        "tokens": sum(map(sum, lengths)),
        "layers are Transformer Engine's": has_transformer_engine(),
    }
