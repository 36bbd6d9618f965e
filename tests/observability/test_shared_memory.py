"""Memory that a fork shares is told from memory that it copies on write."""

from __future__ import annotations

import mmap

import pytest
import torch

from megatron_stare.process.memory import SharedMappings

PAGE = mmap.PAGESIZE


def overlap(tensor: torch.Tensor) -> bool:
    return SharedMappings().overlap(tensor.data_ptr(), tensor.untyped_storage().nbytes())


@pytest.mark.parametrize("size", [16, 10**6])
def test_a_tensor_in_shared_memory(size: int) -> None:
    tensor = torch.zeros(size)
    assert not overlap(tensor)
    tensor.share_memory_()
    assert overlap(tensor)
    # whatever torch knows
    assert overlap(torch.from_dlpack(tensor)) and not torch.from_dlpack(tensor).is_shared()


@pytest.mark.parametrize(("flags", "shared"), [(mmap.MAP_SHARED, True), (mmap.MAP_PRIVATE, False)])
def test_a_mapping_of_no_file(flags: int, shared: bool) -> None:
    with mmap.mmap(-1, 4 * PAGE, flags=flags | mmap.MAP_ANONYMOUS) as mapped:
        tensor = torch.frombuffer(mapped, dtype=torch.uint8)
        assert overlap(tensor) == shared
        del tensor


def test_the_first_and_the_last_byte_count_and_those_beside_do_not() -> None:
    with mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as mapped:
        tensor = torch.frombuffer(mapped, dtype=torch.uint8)
        mappings, first = SharedMappings(), tensor.data_ptr()
        (bounds,) = (each for each in mappings._bounds if each[0] <= first < each[1])
        mappings._bounds = [bounds]
        assert mappings.overlap(bounds[0] - 1, 2) and mappings.overlap(bounds[1] - 1, 1)
        assert not mappings.overlap(bounds[0] - 1, 1) and not mappings.overlap(bounds[1], 1)
        assert not mappings.overlap(0, 0)  # a tensor of nothing
        del tensor
