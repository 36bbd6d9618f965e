"""Packed attention: groups and indices, and equality with one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_stare.megatron.batching.packing import PADDING_LIMIT, pack
from megatron_stare.megatron.batching.zigzag import Zigzag
from megatron_stare.megatron.model import attention as core_attention
from megatron_stare.megatron.model.attention import SdpaCoreAttention

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_groups_hold_every_token_and_little_padding(lengths: list[int]) -> None:
    packing = pack(lengths, CPU)
    assert packing.queries is not None
    groups = packing.queries.spread(torch.arange(sum(lengths)))
    assert torch.equal(
        packing.queries.collect(torch.cat([group.flatten() for group in groups])),
        torch.arange(sum(lengths)),
    )
    assert sum(group.numel() for group in groups) <= PADDING_LIMIT * sum(lengths)
    assert packing.cu_seqlens_q.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8), st.sampled_from([(4, 2), (2, 2), (4, 1)])
)
def test_packed_equals_one_at_a_time(lengths: list[int], heads: tuple[int, int]) -> None:
    n, g = heads
    config = TransformerConfig(
        num_layers=1, hidden_size=n * 8, num_attention_heads=n, attention_dropout=0.0
    )
    attention = SdpaCoreAttention(config, 1, AttnMaskType.causal, "self")
    generator = torch.Generator().manual_seed(sum(lengths))
    query = torch.randn(sum(lengths), n, 8, generator=generator)
    key, value = torch.randn(2, sum(lengths), g, 8, generator=generator)
    push = torch.randn(sum(lengths), n * 8, generator=generator)
    given = [x.requires_grad_() for x in (query, key, value)]
    packed = attention(query, key, value, packed_seq_params=pack(lengths, CPU))
    gradients = torch.autograd.grad((packed * push).sum(), given)
    parts = [
        attention(q[:, None], k[:, None], v[:, None]).squeeze(1)
        for q, k, v in zip(
            query.split(lengths), key.split(lengths), value.split(lengths), strict=True
        )
    ]
    torch.testing.assert_close(packed, torch.cat(parts), atol=1e-6, rtol=1e-5)
    want = torch.autograd.grad((torch.cat(parts) * push).sum(), given)
    torch.testing.assert_close(gradients, want, atol=1e-5, rtol=1e-5)


def test_only_causal_attention_to_oneself_is_served() -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, attention_dropout=0.0
    )
    for kind, whose in ((AttnMaskType.causal, "cross"), (AttnMaskType.padding, "self")):
        with pytest.raises(ValueError, match="causal self-attention only"):
            SdpaCoreAttention(config, 1, kind, whose)
    config.attention_dropout = 0.1
    with pytest.raises(ValueError, match="no dropout"):
        SdpaCoreAttention(config, 1, AttnMaskType.causal, "self")


class Alone(SdpaCoreAttention):
    """One context-parallel rank without the others: what they would send is given beforehand."""

    def given(self, place: Zigzag, key: Tensor, value: Tensor) -> Alone:
        self.everyone = key, value
        self.context_group = type(
            "Group", (), {"rank": lambda _: place.rank, "size": lambda _: place.ranks}
        )()
        return self

    def _gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.everyone


@settings(max_examples=30, deadline=None)
@given(
    chunks=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    ranks=st.sampled_from([2, 3, 4]),
    heads=st.sampled_from([(4, 2), (2, 2)]),
    entries=st.sampled_from([2**24, 40]),
    packed=st.booleans(),
)
def test_a_context_rank_attends_as_if_it_held_all(
    chunks: list[int], ranks: int, heads: tuple[int, int], entries: int, packed: bool
) -> None:
    """Output and gradients, with masks whole and in blocks of a few queries."""
    n, g = heads
    lengths = [2 * ranks * c for c in chunks] if packed else [2 * ranks * chunks[0]]
    t, rows = sum(lengths), 1 if packed else 3
    config = TransformerConfig(
        num_layers=1, hidden_size=n * 8, num_attention_heads=n, attention_dropout=0.0
    )
    generator = torch.Generator().manual_seed(t)
    shape = (t,) if packed else (t, rows)
    query = torch.randn(*shape, n, 8, generator=generator)
    key, value = torch.randn(2, *shape, g, 8, generator=generator)
    push = torch.randn(*shape, n * 8, generator=generator)
    whole = [x.clone().requires_grad_() for x in (query, key, value)]
    attention = SdpaCoreAttention(config, 1, AttnMaskType.causal, "self")
    want = attention(*whole, packed_seq_params=pack(lengths, CPU) if packed else None)
    (want * push).sum().backward()
    places = [Zigzag(rank, ranks) for rank in range(ranks)]
    order = torch.cat([place.columns(lengths) for place in places])
    parts = [x.clone().requires_grad_() for x in (query, key, value)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_attention, "MASK_ENTRIES", entries)
        for place in places:
            mine = place.columns(lengths)
            alone = Alone(config, 1, AttnMaskType.causal, "self").given(
                place, parts[1][order], parts[2][order]
            )
            packing = pack(lengths, CPU, place) if packed else None
            got = alone(parts[0][mine], parts[1][mine], parts[2][mine], packed_seq_params=packing)
            torch.testing.assert_close(got, want[mine], atol=1e-6, rtol=1e-5)
            (got * push[mine]).sum().backward()
    for part, one in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad, one.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("entries", "queries"), [(256, [8]), (100, [3, 3, 2]), (31, [1] * 8)])
def test_masks_are_no_larger_than_is_allowed(
    monkeypatch: pytest.MonkeyPatch, entries: int, queries: list[int]
) -> None:
    """Two rows of 8 of 16 positions: a query's mask has 2 x 16 entries, and there is one of a query
    at least."""
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, attention_dropout=0.0
    )
    query, key, value = torch.randn(3, 16, 2, 2, 8, generator=torch.Generator().manual_seed(0))
    seen: list[int] = []

    class Watched(Alone):
        def _masked(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
            seen.append(query.shape[1])
            return super()._masked(query, key, value, positions)

    monkeypatch.setattr(core_attention, "MASK_ENTRIES", entries)
    place = Zigzag(1, 2)
    attention = Watched(config, 1, AttnMaskType.causal, "self").given(place, key, value)
    attention(*(each[place.positions(16)] for each in (query, key, value)))
    assert seen == queries
