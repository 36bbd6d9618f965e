"""Activations computed again in backward: the same gradients, and as few bytes kept as was
predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from support.models import random_batch, save_model
from torch import Tensor

from megatron_stare.config.rules import check_recompute
from megatron_stare.config.schema import BatchConfig, Config, ModelConfig, ParallelConfig
from megatron_stare.errors import ConfigError
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.backend.cpu_backend import backend, device
from megatron_stare.megatron.batching.microbatch import RankBatch
from megatron_stare.megatron.batching.sequence_layout import sequence_layout
from megatron_stare.megatron.export.export import export_gradients
from megatron_stare.megatron.model.head import Head
from megatron_stare.megatron.model.model import build_policy, hidden_states, load_hf
from megatron_stare.megatron.step.passes import (
    accumulate_gradients,
    compute_log_probs,
    forget_routes,
)
from megatron_stare.models import cost_of, read_shape
from megatron_stare.ops.linear_head import Mode
from megatron_stare.ops.plan import PlanRules, plan_micro_batches
from megatron_stare.planning.memory import activation_memory
from megatron_stare.weights.files.hf_folder import HfFolder

MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": "full"},
    "full-two": {"recompute": "full", "recompute_layers": 2},
    "block": {"recompute": "full", "recompute_method": "block", "recompute_layers": 1},
    "selective": {"recompute": "selective"},
    "mlp": {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "experts": {"recompute": "selective", "recompute_modules": ["moe"]},
}


def config_of(path: str, mode: str, layout: dict[str, Any], packed: bool) -> Config:
    return Config(
        model=ModelConfig(path=path, **MODES[mode]),
        parallel=ParallelConfig(**layout),
        batch=BatchConfig(packed=packed),
    )


def gradients_of(
    rank: int, init: str, config: Config, modes: tuple[str, ...], head_mode: Mode = "recompute"
) -> dict[str, dict[str, Any]]:
    """Log-probs and gradients of a fixed batch by mode, of one process group; and how often a layer
    ran in them."""
    path = config.model.path
    shape = read_shape(path)
    layout = parallel_layout.join(config.parallel, rank, init, seed=1, timeout_s=60)
    batch = random_batch(3, 10)
    rules = PlanRules(
        data_parallel=layout.dp,
        budget=60,
        packed=config.batch.packed,
        multiple=config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1,
        cost=cost_of(shape),
    )
    plan = plan_micro_batches(batch.lengths.tolist(), rules)
    sequences = sequence_layout(config, layout)
    share = batch.share(plan.branches_of(layout.dp_rank))
    ranked = RankBatch(share, plan, layout.dp_rank, device(), sequences)
    head = Head(shape.vocab_size, 1.0, layout, entropy_gradient=True, mode=head_mode, chunk=5)
    found = {}
    for mode in modes:
        settings = ModelConfig(path=path, **MODES[mode])
        model = build_policy(shape, settings, config.parallel, layout, distributed_optimizer=False)
        load_hf(model, HfFolder(path), shape, layout)
        log_prob, _ = compute_log_probs(model, ranked, head)
        ran = 0

        def count(*_: Any) -> None:
            nonlocal ran
            ran += 1

        for name, module in model[0].named_modules():
            if name.endswith(("mlp", "core_attention", "mlp.experts")):
                module.register_forward_hook(count)
        logged = accumulate_gradients(
            model,
            ranked,
            head,
            lambda lp, ent, _: (lp.sum() + 0.3 * ent.sum(), {"lp": lp.detach()}),
        )
        found[mode] = {
            "log_prob": log_prob,
            "trained": logged.get("lp"),
            "gradients": export_gradients(model, shape, layout),
            "ran": ran / len(ranked.micro_batches),
        }
    parallel_layout.leave()
    return found


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "layout", "packed", "modes"),
    [
        ("qwen2_tied", {}, True, ("full", "full-two", "block", "selective", "mlp")),
        ("qwen3", {}, False, ("full", "block", "selective", "mlp")),
        ("qwen2", {"tensor": 2}, True, ("full", "selective", "mlp")),
        ("qwen2", {"tensor": 2, "sequence": True}, False, ("full", "selective")),
        ("qwen2_tied", {"pipeline": 2}, True, ("full", "full-two", "selective")),
        ("qwen2", {"pipeline": 2, "virtual_pipeline": 2}, False, ("full", "selective")),
        ("qwen3_moe", {"data": 2, "expert": 2}, True, ("full", "experts")),
        ("glm4_moe", {}, True, ("full", "experts", "mlp")),
        ("deepseek_v3", {}, True, ("full", "selective")),
    ],
    ids=[
        "packed",
        "padded",
        "tp2",
        "tp2-sp",
        "pp2",
        "vpp2",
        "experts",
        "dense-and-experts",
        "latents",
    ],
)
def test_gradients_are_those_without(
    ranks, tmp_path: Path, family: str, layout: dict[str, Any], packed: bool, modes: tuple[str, ...]
) -> None:
    save_model(tmp_path, family)
    config = config_of(str(tmp_path), "none", layout, packed)
    for rank in ranks.run(gradients_of, config.parallel.world_size, config, ("none", *modes)):
        plain = rank["none"]
        for mode in modes:
            again = rank[mode]
            assert again["ran"] > plain["ran"], mode  # parts of layers did run again
            if again["trained"] is not None:
                # on-policy ratios are exactly 1
                assert torch.equal(again["log_prob"], again["trained"])
                torch.testing.assert_close(again["log_prob"], plain["log_prob"], atol=0, rtol=1e-6)
            assert again["gradients"].keys() == plain["gradients"].keys()
            for name, gradient in plain["gradients"].items():
                difference = (again["gradients"][name] - gradient).abs().max()
                assert difference <= 1e-6 * gradient.abs().max(), (mode, name)


@pytest.mark.distributed
@pytest.mark.parametrize("head_mode", ["materialised", "gradient_in_forward"])
def test_with_every_head(ranks, tmp_path: Path, head_mode: Mode) -> None:
    save_model(tmp_path, "qwen2_tied")
    config = config_of(str(tmp_path), "none", {}, True)
    (found,) = ranks.run(gradients_of, 1, config, ("none", "full"), head_mode)
    for name, gradient in found["none"]["gradients"].items():
        assert (
            found["full"]["gradients"][name] - gradient
        ).abs().max() <= 1e-6 * gradient.abs().max(), name


def kept_bytes(
    rank: int, init: str, path: str, mode: str, layout: dict[str, Any], packed: bool
) -> int:
    """Bytes of all tensors that autograd saves in one forward over 4 sequences of 16 tokens. Each
    memory is counted once, and parameters are not counted."""
    config = config_of(path, mode, layout, packed)
    shape = read_shape(path)
    here = parallel_layout.join(config.parallel, rank, init, seed=1, timeout_s=60)
    model = build_policy(shape, config.model, config.parallel, here, distributed_optimizer=False)
    load_hf(model, HfFolder(path), shape, here)
    lengths = [torch.tensor([16] * 4)]
    sequences = sequence_layout(config, here)
    (grid,) = sequences.lay_out(lengths)
    parameters = {p.untyped_storage().data_ptr() for p in model[0].parameters()}
    saved: dict[int, Tensor] = {}  # the tensors too, so that no memory is given out twice

    def save(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    tokens = torch.zeros(grid.sample.shape, dtype=torch.int64)
    with backend(), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        output = hidden_states(
            model[0], tokens, grid.token.contiguous(), sequences.describe(grid, device())
        )
    del output
    parallel_layout.leave()
    total = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    # the hook that the graph keeps would keep the graph, by these tensors
    saved.clear()
    forget_routes(model)
    return total


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "layout", "packed"),
    [("qwen2", {}, True), ("qwen3", {}, False), ("qwen3", {"tensor": 2, "sequence": True}, True)],
    ids=["packed", "norms-of-heads-padded", "tp2-sp"],
)
def test_memory_is_as_predicted(
    ranks, tmp_path: Path, family: str, layout: dict[str, Any], packed: bool
) -> None:
    # wide enough for what is not counted, tokens and indices, to be small
    save_model(tmp_path, family, hidden_size=128, intermediate_size=192, head_dim=32)
    kept = {}
    for mode in MODES.keys() - {"experts"}:
        config = config_of(str(tmp_path), mode, layout, packed)
        predicted = activation_memory(
            config, read_shape(str(tmp_path)), 64, 16, rows=1 if packed else 4
        )
        for found in ranks.run(
            kept_bytes, config.parallel.world_size, str(tmp_path), mode, layout, packed
        ):
            assert found == pytest.approx(predicted.kept, rel=0.01), mode
        kept[mode] = predicted.kept
    assert kept["full-two"] < kept["full"] < kept["block"] < kept["none"]
    assert kept["mlp"] < kept["none"]


def drawn(rank: int, init: str) -> tuple[bool, bool]:
    """Checks that recomputed dropout draws as it drew, and that the draws after it are those
    without recomputation."""
    parallel_layout.join(ParallelConfig(), rank, init, seed=1, timeout_s=60)
    after = []
    for again in (False, True):
        torch.manual_seed(5)
        x = torch.ones(1000, requires_grad=True)

        def dropped(each: Tensor) -> Tensor:
            return torch.nn.functional.dropout(each, 0.5)

        with backend():
            y = tensor_parallel.checkpoint(dropped, False, x) if again else dropped(x)
            torch.rand(3)  # what else is drawn before backward
            y.sum().backward()
        same = torch.equal(y.detach(), x.grad)
        after.append(torch.rand(3))
    parallel_layout.leave()
    return same, torch.equal(*after)


@pytest.mark.distributed
def test_what_is_drawn_is_drawn_again(ranks) -> None:
    assert ranks.run(drawn, 1) == [(True, True)]


@pytest.mark.parametrize(
    ("family", "settings", "layout", "message"),
    [
        (
            "qwen2",
            {"recompute": "full", "recompute_layers": 3},
            {},
            "4 layers of a stage's chunk cannot be recomputed in groups of 3",
        ),
        (
            "qwen2",
            {"recompute": "full", "recompute_layers": 2},
            {"pipeline": 2, "virtual_pipeline": 2},
            "has only 1 layers",
        ),
        (
            "qwen2",
            {"recompute": "full", "recompute_layers": 2},
            {"pipeline": 2, "first_stage_layers": 1},
            "has only 1 layers",
        ),
        (
            "qwen2",
            {"recompute": "full", "recompute_method": "block", "recompute_layers": 5},
            {},
            "has only 4 layers",
        ),
        (
            "qwen2",
            {"recompute": "selective", "recompute_modules": ["moe"]},
            {},
            "the model has no experts",
        ),
        (
            "qwen3_moe",
            {"recompute": "selective", "recompute_modules": ["mlp"]},
            {},
            "nothing but experts",
        ),
        (
            "qwen2",
            {"recompute_layers": 2},
            {},
            "model.recompute_layers.*no effect with model.recompute=none",
        ),
        (
            "qwen2",
            {"recompute": "full", "recompute_modules": ["mlp"]},
            {},
            "model.recompute_modules.*no effect with model.recompute=full",
        ),
    ],
)
def test_what_cannot_be_computed_again_is_refused(
    tmp_path: Path, family: str, settings: dict[str, Any], layout: dict[str, Any], message: str
) -> None:
    save_model(tmp_path, family)
    with pytest.raises(ConfigError, match=message):
        check_recompute(
            ModelConfig(path="", **settings), ParallelConfig(**layout), read_shape(str(tmp_path))
        )
