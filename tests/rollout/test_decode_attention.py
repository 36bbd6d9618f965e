"""Attention of one new token a row, against the formula in float64; and what goes to torch's
kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import save_model
from torch import Tensor, nn

from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.decode import attend, decode_batch
from megatron_stare.rollout.engines.engine import GenerateRequest
from megatron_stare.rollout.engines.local import LocalEngine


class Layer(nn.Module):
    """Module with what transformers' own attention asks of the one that it serves."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, True


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_the_formula(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """A row and a head at a time, [b, 1, n, v] float64."""
    rows, heads = query.shape[:2]
    shared = heads // key.shape[1]
    out = torch.zeros(rows, 1, heads, value.shape[-1], dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            seen = slice(None) if mask is None else mask[row, 0, 0]
            keys, values = (x[row, head // shared].double()[seen] for x in (key, value))
            chances = (scale * keys @ query[row, head, 0].double()).softmax(-1)
            out[row, 0, head] = chances @ values
    return out


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("scaling", [None, 0.4])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_the_formula(heads: int, groups: int, scaling: float | None, masked: bool) -> None:
    query = drawn(5, 1, heads, 8, seed=1).transpose(1, 2)
    # views of roomier buffers
    key, value = (drawn(5, groups, 32, 8, seed=seed)[:, :, :11] for seed in (2, 3))
    mask = (
        (torch.arange(11) >= torch.tensor([0, 3, 10, 1, 0])[:, None])[:, None, None]
        if masked
        else None
    )
    out, _ = attend(Layer(heads // groups), query, key, value, mask, scaling=scaling)
    torch.testing.assert_close(
        out.double(),
        by_the_formula(query, key, value, mask, scaling or 8**-0.5),
        atol=1e-6,
        rtol=1e-5,
    )


def test_values_may_be_of_another_width_than_keys() -> None:
    """Keys and values differ in width in models with latent attention."""
    query = drawn(3, 1, 4, 8, seed=1).transpose(1, 2)
    key, value = drawn(3, 2, 7, 8, seed=2), drawn(3, 2, 7, 6, seed=3)
    out, _ = attend(Layer(2), query, key, value, None)
    torch.testing.assert_close(
        out.double(), by_the_formula(query, key, value, None, 8**-0.5), atol=1e-6, rtol=1e-5
    )


def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Queries of each call of torch's kernel from here on."""
    calls: list[int] = []
    kernel = nn.functional.scaled_dot_product_attention

    def counted(query: Tensor, *args: Any, **settings: Any) -> Tensor:
        calls.append(query.shape[2])
        return kernel(query, *args, **settings)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", counted)
    return calls


@pytest.mark.parametrize("case", ["two tokens", "bfloat16"])
def test_other_calls_go_to_the_kernel(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    calls, tokens = kernel_calls(monkeypatch), 2 if case == "two tokens" else 1
    dtype = torch.bfloat16 if case == "bfloat16" else torch.float32
    query = drawn(2, 2, tokens, 8, seed=1).to(dtype)
    key, value = (drawn(2, 2, 2, 8, seed=seed).to(dtype) for seed in (2, 3))
    attend(Layer(1), query, key, value, None)
    assert calls == [tokens]


def test_what_it_does_not_know_is_not_left_out() -> None:
    """A model with capped scores is refused by transformers' own error."""
    query, key, value = (drawn(2, 2, 1, 8, seed=seed) for seed in (1, 2, 3))
    with pytest.raises(ValueError, match="softcap"):
        attend(Layer(1), query, key, value, None, softcap=30.0)


def test_the_engine_decodes_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """The kernel sees prompts alone, padded ones too."""
    save_model(tmp_path, "qwen2")
    engine, calls = LocalEngine(str(tmp_path), max_batch=8), kernel_calls(monkeypatch)
    requests = [GenerateRequest(str(i), (3,) * (4 + i), i, 0) for i in range(3)]
    with torch.inference_mode():
        decoded = decode_batch(
            engine._model, requests, SamplingParams(1.0, 5, seed=1, step=1, stop_token_ids=())
        )
    assert [len(each.ids) for each in decoded] == [5, 5, 5]
    assert set(calls) == {6}
