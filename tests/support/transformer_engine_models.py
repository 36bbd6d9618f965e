"""Models of Transformer Engine's layer spec over the stub, in a process of their own: megatron-core
decides as it is imported whether there is a Transformer Engine.

    python -m support.transformer_engine_stub support.transformer_engine_models FOLDER OUT

FOLDER holds a Hugging Face folder and, beside it with "-megatron" and "-run" after its name,
checkpoints of it, for every family. What the models hold is pickled to OUT.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from torch import nn

from megatron_stare.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_stare.megatron.backend.cpu_backend import has_transformer_engine, substituted
from megatron_stare.megatron.backend.layout import Layout, join, leave
from megatron_stare.megatron.checkpoint import checkpoint
from megatron_stare.megatron.dry.planned_layout import faults, plan_layout
from megatron_stare.megatron.export.export import export_hf
from megatron_stare.megatron.model import model as models
from megatron_stare.megatron.model.model import build_policy, load_hf, named_parameters
from megatron_stare.megatron.optimizer.optimizer import build_optimizer
from megatron_stare.models import read_shape
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.files.hf_folder import HfFolder

CUT = {False: {"pipeline": 2}, True: {"pipeline": 2, "expert": 2, "data": 2}}


def held_by_ranks(path: Path, shape: ModelShape) -> dict[str, Any]:
    """Plans a layout on the meta device, where has_transformer_engine decides by itself, as on a
    machine with CUDA."""
    parallel = ParallelConfig(tensor=2, sequence=True, **CUT[shape.experts > 0])
    with substituted(torch.cuda, "is_available", lambda: True):
        assert has_transformer_engine()
        plans = plan_layout(
            shape, ModelConfig(path=str(path)), parallel, OptimizerConfig(distributed=True)
        )
    parts = [part for plan in plans for part in plan.state]
    return {
        "names": {held.piece.parameter for plan in plans for held in plan.held},
        "faults": faults(plans, shape, parallel, 2**20),
        "tensors": {part.key: (part.whole, part.dtype) for part in parts if part.dtype},
        "objects": {part.key for part in parts if not part.dtype},
    }


def with_data(path: Path, shape: ModelShape) -> dict[str, Any]:
    """Exports one rank with values, after it loaded the folder, a converted checkpoint and a
    run's."""
    model = [
        *build(path, shape, layout := join(ParallelConfig(), 0, f"file://{path}-ranks", 1, 60))
    ]
    assert any(isinstance(module, TEDotProductAttention) for module in model[0].modules())
    load_hf(model, HfFolder(path), shape, layout)
    optimizer, scheduler = build_optimizer(model, OptimizerConfig(), "float32", 1)
    result = {"loaded": export_hf(model, shape, layout)}
    saved = Path(f"{path}-saved")
    saved.mkdir()
    checkpoint.save(str(saved), model, optimizer, scheduler, layout)
    zero(model)
    checkpoint.load_weights(f"{path}-megatron", model)
    result["converted"] = export_hf(model, shape, layout)
    zero(model)
    checkpoint.load_weights(f"{path}-run", model)
    result["run"] = export_hf(model, shape, layout)
    leave()
    return result


def build(path: Path, shape: ModelShape, layout: Layout) -> list[nn.Module]:
    with substituted(models, "has_transformer_engine", lambda: True):
        return build_policy(shape, ModelConfig(path=str(path)), ParallelConfig(), layout, False)


@torch.no_grad()
def zero(model: list[nn.Module]) -> None:
    for _, parameter in named_parameters(model):
        parameter.zero_()


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for config in sorted(Path(sys.argv[1]).glob("*/config.json")):
        path, shape = config.parent, read_shape(config.parent)
        if not path.name.endswith(("-megatron", "-run")):
            found[path.name] = held_by_ranks(path, shape) | with_data(path, shape)
    Path(sys.argv[2]).write_bytes(pickle.dumps(found))
