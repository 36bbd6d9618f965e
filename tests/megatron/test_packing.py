"""Packed attention: groups and indices, and equality with one sequence at a time."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from megatron_stare.megatron.attention import SdpaCoreAttention
from megatron_stare.megatron.batching.packing import PADDING_LIMIT, pack

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_groups_hold_every_token_and_little_padding(lengths: list[int]) -> None:
    packing = pack(lengths, CPU)
    assert packing.inverse is not None
    gathered = torch.cat([group.flatten() for group in packing.groups])
    assert torch.equal(gathered[packing.inverse], torch.arange(sum(lengths)))
    assert gathered.numel() <= PADDING_LIMIT * sum(lengths)
    assert packing.cu_seqlens_q.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.sampled_from([(4, 2), (2, 2), (4, 1)]))
def test_packed_equals_one_at_a_time(lengths: list[int], heads: tuple[int, int]) -> None:
    n, g = heads
    config = TransformerConfig(num_layers=1, hidden_size=n * 8, num_attention_heads=n, attention_dropout=0.0)
    attention = SdpaCoreAttention(config, 1, AttnMaskType.causal, "self")
    generator = torch.Generator().manual_seed(sum(lengths))
    query = torch.randn(sum(lengths), n, 8, generator=generator)
    key, value = torch.randn(2, sum(lengths), g, 8, generator=generator)
    packed = attention(query, key, value, packed_seq_params=pack(lengths, CPU))
    parts = [
        attention(q[:, None], k[:, None], v[:, None]).squeeze(1)
        for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(parts), atol=1e-6, rtol=1e-5)
