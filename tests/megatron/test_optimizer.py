"""Megatron's optimizer as configured here: weight decay spares norms and biases, the schedule is
followed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models import save_model

from megatron_stare.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.backend.cpu_backend import backend
from megatron_stare.megatron.model.model import build_policy, load_hf, named_parameters
from megatron_stare.megatron.optimizer.optimizer import build_optimizer
from megatron_stare.models import read_shape
from megatron_stare.weights.files.hf_folder import HfFolder


def decay_of(rank: int, init: str, path: str) -> tuple[dict[str, bool], list[float], float]:
    """Steps with zero gradients: what moves is what is decayed. Also the rates of the steps, and
    the rate where the run is resumed with half as many steps again."""
    shape, parallel = read_shape(path), ParallelConfig()
    layout = parallel_layout.join(parallel, rank, init, seed=1, timeout_s=60)
    model = build_policy(
        shape, ModelConfig(path=path), parallel, layout, distributed_optimizer=False
    )
    load_hf(model, HfFolder(path), shape, layout)
    config = OptimizerConfig(lr=0.1, weight_decay=0.5, warmup_steps=4, schedule="linear")
    optimizer, scheduler = build_optimizer(model, config, "float32", steps=8)
    before = {name: p.detach().clone() for name, p in named_parameters(model)}
    rates = []
    for chunk in model:
        chunk.zero_grad_buffer()
    for _ in range(8):
        with backend():
            scheduler.step(1)
            optimizer.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    moved = {name: not torch.equal(before[name], p.detach()) for name, p in named_parameters(model)}
    longer_optimizer, longer = build_optimizer(model, config, "float32", steps=12)
    longer.load_state_dict(scheduler.state_dict())
    parallel_layout.leave()
    return moved, rates, float(longer_optimizer.param_groups[0]["lr"])


@pytest.mark.distributed
def test_decay_and_schedule(ranks, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    ((moved, rates, resumed),) = ranks.run(decay_of, 1, str(tmp_path))
    for name, was_moved in moved.items():
        assert was_moved == (not ("layernorm" in name or name.endswith("bias"))), name
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.075, 0.05, 0.025, 0.0])
    assert resumed == pytest.approx(0.05)  # step 8 of 12, of which 4 warm up
