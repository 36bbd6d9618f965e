"""What is broadcast of a bucket."""

from __future__ import annotations

import torch

from megatron_stare.rollout.sglang.broadcast import flat_bytes


def test_a_bucket_is_sent_as_it_lies() -> None:
    flat = torch.arange(20, dtype=torch.float32)
    lying = [flat[3:9].view(2, 3), flat[9:10], flat[10:18].view(4, 2)]
    found = flat_bytes(lying)
    assert found.data_ptr() == flat[3:].data_ptr()
    assert torch.equal(found.view(torch.float32), flat[3:18])


def test_what_lies_otherwise_is_copied_in_order() -> None:
    flat = torch.arange(24, dtype=torch.bfloat16)
    for tensors in (
        [flat[:4], flat[8:12]],  # a gap
        [flat[4:8], flat[:4]],  # another order
        [flat[:6].view(2, 3).t(), flat[6:8]],  # not contiguous
        [flat[:4], flat[4:8].clone()],
    ):
        wanted = torch.cat([tensor.reshape(-1) for tensor in tensors])
        assert torch.equal(flat_bytes(tensors).view(torch.bfloat16), wanted)
