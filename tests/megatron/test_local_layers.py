"""Norm and activation of the local layer spec, against torch's own in float64 and by worked
numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.models import save_model
from support.ranks import RankPool
from torch import Tensor

from megatron_stare.config.schema import ModelConfig, ParallelConfig, PerformanceConfig
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.model.local_layers import RMSNorm, SwiGlu, swiglu
from megatron_stare.megatron.model.model import build_model
from megatron_stare.models import read_shape


def norm_of(hidden: int, eps: float, dtype: torch.dtype) -> RMSNorm:
    return RMSNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=False), hidden, eps)  # type: ignore[arg-type]


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def test_a_norm_by_worked_numbers() -> None:
    norm = norm_of(2, 0.5, torch.float64)
    norm.weight.data = torch.tensor([2.0, -1.0], dtype=torch.float64)
    x = torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    y = norm(x)  # mean squares 2.5 and 0.5, so the roots with eps are those of 3 and 1
    torch.testing.assert_close(
        y, torch.tensor([[2.0, -2.0], [0.0, -1.0]], dtype=torch.float64) / _roots()
    )
    y.sum().backward()
    # r (g w - n mean(g w n)): rows (2 - 0) / 3^0.5 ..., with mean(w n) of (2 - 2) / 2 = 0 and -1 /
    # 2
    expected = torch.tensor([[2.0, -1.0], [2.0, -0.5]], dtype=torch.float64) / _roots()
    torch.testing.assert_close(x.grad, expected)
    torch.testing.assert_close(
        norm.weight.grad, torch.tensor([3**-0.5, 2 * 3**-0.5 + 1], dtype=torch.float64)
    )


def _roots() -> Tensor:
    return torch.tensor([[3.0**0.5], [1.0]], dtype=torch.float64)


@pytest.mark.parametrize("shape", [(5, 8), (3, 2, 8), (3, 2, 4, 8)])  # packed, padded, of heads
def test_a_norm_and_its_gradients_are_torchs(shape: tuple[int, ...]) -> None:
    norm = norm_of(8, 1e-3, torch.float64)
    norm.weight.data = drawn(8, seed=1)
    found = []
    for own in (True, False):
        # as heads are: not side by side in memory
        x = drawn(*shape).transpose(0, -2).requires_grad_()
        norm.weight.grad = None
        y = norm(x) if own else torch.nn.functional.rms_norm(x, (8,), norm.weight, 1e-3)
        # the gradient too lies in memory as it comes: the rotation's is not side by side either
        y.backward(drawn(*y.transpose(0, -2).shape, seed=2).transpose(0, -2))
        found.append((y, x.grad, norm.weight.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_a_norm_of_half_precision_is_computed_in_single() -> None:
    norm = norm_of(64, 1e-6, torch.bfloat16)
    norm.weight.data = drawn(64, seed=1).to(torch.bfloat16)
    x, g = drawn(32, 64).to(torch.bfloat16), drawn(32, 64, seed=2).to(torch.bfloat16)
    x.requires_grad_()
    y = norm(x)
    y.backward(g)
    exact, weight = (
        x.detach().double().requires_grad_(),
        norm.weight.detach().double().requires_grad_(),
    )
    expected = torch.nn.functional.rms_norm(exact, (64,), weight, 1e-6)
    expected.backward(g.double())
    assert y.dtype == x.grad.dtype == norm.weight.grad.dtype == torch.bfloat16
    pairs = (y, expected), (x.grad, exact.grad), (norm.weight.grad, weight.grad)
    # rounded once, at the end: half a unit of the last of 8 bits, and more
    for ours, theirs in pairs:
        assert ((ours.double() - theirs).abs() <= theirs.abs() * 2**-8 + 1e-5).all()


def test_swiglu_is_bit_for_bit_what_autograd_makes_of_it() -> None:
    found = []
    for own in (True, False):
        x = drawn(7, 3, 10, dtype=torch.float32).requires_grad_()
        a, b = x.chunk(2, -1)
        # as Megatron-core writes it
        y = swiglu(x) if own else torch.nn.functional.silu(a) * (b + 0.0)
        y.backward(drawn(7, 3, 5, dtype=torch.float32, seed=1))
        found.append((y, x.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.autograd.gradcheck(swiglu, (drawn(2, 6).requires_grad_(),))


def own_activations(rank: int, init: str, path: str, fused: bool | None) -> list[bool]:
    """Tells for every feed-forward layer if its activation is ours."""
    parallel = ParallelConfig()
    layout = parallel_layout.join(parallel, rank, init, seed=1, timeout_s=60)
    performance = PerformanceConfig(swiglu_fusion=fused)
    (model,) = build_model(read_shape(path), ModelConfig(path=path), parallel, layout, performance)
    found = [
        isinstance(each.activation_func, SwiGlu)
        for each in model.modules()
        if hasattr(each, "activation_func")
    ]
    parallel_layout.leave()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "fused", "own"),
    [("qwen2", None, True), ("qwen2", True, False), ("qwen3_moe", None, False)],
)
def test_which_activation_a_model_is_built_with(
    ranks: RankPool, tmp_path: Path, family: str, fused: bool | None, own: bool
) -> None:
    """One that is compiled is Megatron's, and experts have no place for ours."""
    save_model(tmp_path, family)
    (found,) = ranks.run(own_activations, 1, str(tmp_path), fused)
    assert found and set(found) == {own}
