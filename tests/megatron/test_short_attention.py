"""Attention over short sequences: by worked numbers, against torch's kernel in float64, and where
it serves."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn import functional

from megatron_stare.config.performance import WHOLE_UP_TO
from megatron_stare.megatron.model.attention import SdpaCoreAttention
from megatron_stare.megatron.model.local_layers import short_attention


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_by_worked_numbers() -> None:
    """Two positions, one head of size 1: the first sees itself; the second both, its scores log 3
    and 0."""
    query = (
        torch.tensor([7.0, math.log(3.0)], dtype=torch.float64).view(1, 2, 1, 1).requires_grad_()
    )
    key = torch.tensor([2.0, 0.0], dtype=torch.float64).view(1, 2, 1, 1).requires_grad_()
    value = torch.tensor([4.0, 8.0], dtype=torch.float64).view(1, 2, 1, 1).requires_grad_()
    out = short_attention(query, key, value, 0.5)
    # 3/4 of 4, 1/4 of 8
    torch.testing.assert_close(out.flatten(), torch.tensor([4.0, 5.0], dtype=torch.float64))
    out[0, 1].backward()
    # d out / d score of the first key: p (v - out) = 3/4 (4 - 5); of the second 1/4 (8 - 5), the
    # opposite
    torch.testing.assert_close(
        value.grad.flatten(), torch.tensor([0.75, 0.25], dtype=torch.float64)
    )
    torch.testing.assert_close(
        query.grad.flatten(), torch.tensor([0.0, 0.5 * -0.75 * 2], dtype=torch.float64)
    )
    slope = 0.5 * 0.75 * math.log(3.0)
    torch.testing.assert_close(
        key.grad.flatten(), torch.tensor([-slope, slope], dtype=torch.float64)
    )


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_and_its_gradients_are_torchs(heads: int, groups: int, scale: float | None) -> None:
    """Arguments and gradient do not lie side by side in memory, as those of padded sequences do
    not."""
    given = [drawn(9, 3, each, 8, seed=i) for i, each in enumerate((heads, groups, groups))]
    push = drawn(9, 3, heads, 8, seed=4).transpose(0, 1)
    found = []
    for own in (True, False):
        leaves = [x.clone().requires_grad_() for x in given]
        query, key, value = (x.transpose(0, 1) for x in leaves)
        if own:
            out = short_attention(query, key, value, scale)
        else:
            out = functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (query, key, value)),
                is_causal=True,
                scale=scale,
                enable_gqa=True,
            ).transpose(1, 2)
        out.backward(push)
        found.append([out.detach(), *(x.grad for x in leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize(
    ("length", "dtype", "kernel"),
    [
        (WHOLE_UP_TO, torch.float32, False),
        (WHOLE_UP_TO + 1, torch.float32, True),
        (WHOLE_UP_TO, torch.bfloat16, True),
    ],
)
def test_where_it_serves(
    monkeypatch: pytest.MonkeyPatch, length: int, dtype: torch.dtype, kernel: bool
) -> None:
    """Long sequences' scores would take the square of the length, and bfloat16 ones be rounded: the
    kernel's."""
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, attention_dropout=0.0
    )
    attention = SdpaCoreAttention(config, 1, AttnMaskType.causal, "self")
    query, key, value = (drawn(length, 2, 2, 8, seed=i).to(dtype) for i in range(3))
    expected = functional.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (query, key, value)), is_causal=True
    )
    calls = []
    through = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda *a, **k: calls.append(1) or through(*a, **k),
    )
    out = attention(query, key, value)
    assert bool(calls) == kernel
    torch.testing.assert_close(out, expected.permute(2, 0, 1, 3).flatten(2), atol=1e-6, rtol=1e-5)
