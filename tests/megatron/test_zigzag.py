"""Which positions of a sequence a context-parallel rank holds: on numbers, and as Megatron rotates
them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.models.common.embeddings import rope_utils

from megatron_stare.megatron.backend.cpu_backend import backend
from megatron_stare.megatron.batching.zigzag import WHOLE, Zigzag


class Group:
    """Process group as far as Megatron's rotary embeddings ask for it: a rank and a size."""

    def __init__(self, place: Zigzag) -> None:
        self._place = place

    def rank(self) -> int:
        return self._place.rank

    def size(self) -> int:
        return self._place.ranks


def test_a_rank_holds_a_chunk_from_either_end() -> None:
    assert Zigzag(0, 2).positions(8).tolist() == [0, 1, 6, 7]
    assert Zigzag(1, 2).positions(8).tolist() == [2, 3, 4, 5]
    assert [Zigzag(rank, 3).positions(6).tolist() for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert WHOLE.positions(5).tolist() == [0, 1, 2, 3, 4]


def test_sequences_end_to_end_are_cut_each_by_itself() -> None:
    assert Zigzag(0, 2).columns([4, 8]).tolist() == [0, 3, 4, 5, 10, 11]
    assert Zigzag(1, 2).columns([4, 8]).tolist() == [1, 2, 6, 7, 8, 9]
    assert Zigzag(1, 2).order([4, 8]).tolist() == [0, 6, 7, 1, 2, 3, 8, 9, 10, 11, 4, 5]


@given(ranks=st.integers(1, 4), chunks=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_every_position_lies_on_one_rank_and_order_finds_it(ranks: int, chunks: list[int]) -> None:
    lengths = [2 * ranks * chunk for chunk in chunks]
    parts = [Zigzag(rank, ranks).columns(lengths) for rank in range(ranks)]
    assert {len(part) for part in parts} == {sum(lengths) // ranks}
    assert torch.equal(
        torch.cat(parts)[WHOLE.order(lengths) if ranks == 1 else Zigzag(0, ranks).order(lengths)],
        torch.arange(sum(lengths)),
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_megatron_rotates_these_positions(ranks: int) -> None:
    """Each position's rotation is its number: the same order, padded and packed."""
    for rank in range(ranks):
        place = Zigzag(rank, ranks)
        with backend():
            padded = rope_utils.get_pos_emb_on_this_cp_rank(
                torch.arange(16.0)[:, None, None, None], 0, Group(place)
            )
        assert padded.flatten().tolist() == place.positions(16).tolist()
        held = torch.zeros(16 // ranks, 1)
        packed = rope_utils._get_thd_freqs_on_this_cp_rank(rank, ranks, held, torch.arange(40))
        assert packed.tolist() == place.positions(16).tolist()


def test_a_length_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="6 positions cannot be cut into 4 equal chunks"):
        Zigzag(0, 2).positions(6)
