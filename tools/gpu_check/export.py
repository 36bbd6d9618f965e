"""The policy under Hugging Face names, bit for bit what was loaded, in float32 and bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from rig import Size, model_folder, trained
from verdict import Bound

from megatron_stare.weights.files.hf_folder import HfFolder

GPU_ONLY: tuple[str, ...] = ()
BOUNDS: dict[str, Bound] = {
    "float32 tensors that differ": ("<=", 0.0),
    "bfloat16 tensors that differ": ("<=", 0.0),
    "tensors": (">=", 10.0),
}


def run(cpu: bool) -> dict[str, Any]:
    size, figures = Size.of(cpu), {}
    with model_folder(size) as path:
        folder = HfFolder(path)
        for dtype in ("float32", "bfloat16"):
            weights = trained(path, size, dtype=dtype).weights
            as_loaded = {
                name: folder.slice(name)[:].to(getattr(torch, dtype)) for name in folder.names()
            }
            same = sum(
                torch.equal(weights[name], each)
                for name, each in as_loaded.items()
                if name in weights
            )
            figures[f"{dtype} tensors that differ"] = float(
                len(as_loaded.keys() | weights.keys()) - same
            )
            figures["tensors"] = float(len(weights))
    return {"figures": figures}
