"""The hashes that servers report, against SGLang's own kernel: recorded (support/gpu_exchange.py),
and live."""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest
import torch
from support import sglang_servers as servers
from support.gpu_exchange import DTYPES, OUT, RANKS, SHAPE, hashed, weights
from support.gpu_hash import kernel_hashes
from support.sglang_fake import FakeServer
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_stare.rollout.engines.engine import WeightUpdateError
from megatron_stare.rollout.engines.sglang import served_hash
from megatron_stare.rollout.engines.sglang.served_hash import TiledDigest, digest_on
from megatron_stare.rollout.engines.sglang.tensor_sync import TensorSync
from megatron_stare.rollout.engines.sglang.update import WeightUpdate

RECORDED = json.loads(OUT.read_text())


def digest_of(device, *parts):
    digest = digest_on(device)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


@pytest.mark.parametrize("name", RECORDED["hashes"])
def test_a_gpu_servers_hash_is_that_of_its_kernel(name):
    assert digest_of("cuda", hashed()[name]) == RECORDED["hashes"][name]


def test_a_cpu_servers_hash_is_sha_256():
    for tensor in hashed().values():
        whole = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert digest_of("cpu", tensor) == hashlib.sha256(whole).hexdigest()[:16]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_parts_are_hashed_as_if_they_were_one(device):
    """Parts of bytes that fill no word, that end within a tile, and that span the blocks it is
    computed in."""
    whole = torch.randint(
        0, 256, (40 * 8192 * 4 + 11,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    wanted = digest_of(device, whole)
    for sizes in ([1, 2, 5, 32_768 * 33], [3, 0, 32_768 - 3, 32_768], [7, 100_001, 6]):
        parts = whole.split([*sizes, len(whole) - sum(sizes)])
        assert digest_of(device, *parts) == wanted, sizes
    assert digest_of(device, whole.flip(0)) != wanted
    assert digest_of(device, whole[:-1]) != wanted


def test_a_part_may_change_once_it_was_added():
    part, digest = torch.arange(5, dtype=torch.uint8), TiledDigest()
    digest.update(part)
    part.zero_()
    assert digest.hexdigest() == digest_of("cuda", torch.arange(5, dtype=torch.uint8))


def test_blocks_of_any_size_give_one_hash(monkeypatch):
    """Blocks of a device are larger than what a CPU's cache holds."""
    noise = torch.randint(
        0, 256, (3 * 2**20 + 5,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    parts = (noise[:1_000_003], noise[1_000_003:])
    small = digest_of("cuda", *parts)
    for tiles in (1, 7, served_hash._DEVICE_BLOCK):
        monkeypatch.setattr(served_hash, "_BLOCK", tiles)
        assert digest_of("cuda", *parts) == small


class Launched(TorchDispatchMode):
    """Counts operations, each of which a GPU launches a kernel for."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_gigabyte_on_a_device_takes_some_hundred_launches():
    """On the meta device, which runs what a GPU would be told to; a block for a CPU's cache would
    take 43,000."""
    bucket = torch.empty(2**29, dtype=torch.bfloat16, device="meta")
    with Launched() as launched:
        TiledDigest().update(bucket)
    assert 100 < launched.count < 1200


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING))
def test_the_kernel_itself_gives_these_values():
    """Random bytes, read at odd offsets and through strides."""
    generator = torch.Generator().manual_seed(2)
    noise = torch.randint(0, 256, (80_008,), dtype=torch.uint8, generator=generator)
    tensors = [noise.clamp(max=1).to(torch.bool)[5:9000]]
    for dtype in DTYPES[:-1]:
        values = noise.clone().view(getattr(torch, dtype))
        tensors += [values[1:8200], values[:9000].view(90, 100).t()]
    assert [digest_of("cuda", tensor) for tensor in tensors] == kernel_hashes(
        servers.PYTHON, tensors
    )


class GPUServer(FakeServer):
    """Answers what was recorded of a server of four GPUs, whatever it is sent."""

    def _info(self, _):
        return RECORDED["/server_info"]

    def _checker(self, _):
        return RECORDED["/weights_checker"]

    def _load(self, body):
        assert len(body["serialized_named_tensors"]) == RANKS
        return {"success": True}


def sent(tensors):
    client = GPUServer("gpus").client()
    update = WeightUpdate([client], TensorSync([client]), 1, SHAPE, torch.bfloat16)

    async def whole():
        await update.begin()
        for pair in tensors.items():
            await update.send([pair])
        return await update.end()

    return asyncio.run(whole())


def test_what_a_server_of_four_gpus_reports_is_accepted():
    assert sent(weights()).keys() == weights().keys()
    # in another order, too: stacks are put together as SGLang does it
    sent(dict(reversed(weights().items())))


@pytest.mark.parametrize(
    ("name", "element", "parameter", "ranks"),
    [
        ("model.layers.0.self_attn.v_proj.weight", (5, 3), "self_attn.qkv_proj.weight", (2, 3)),
        ("model.layers.0.self_attn.q_proj.bias", (31,), "self_attn.qkv_proj.bias", (3,)),
        ("model.layers.0.mlp.down_proj.weight", (23, 19), "mlp.down_proj.weight", (1,)),
        ("model.layers.0.mlp.up_proj.weight", (39, 23), "mlp.gate_up_proj.weight", (3,)),
        ("model.embed_tokens.weight", (36, 0), "model.embed_tokens.weight", (2,)),
        ("model.norm.weight", (7,), "model.norm.weight", (0, 1, 2, 3)),
    ],
)
def test_one_bit_changed_is_named_on_the_ranks_that_hold_it(name, element, parameter, ranks):
    tensors = weights()
    tensors[name].view(torch.int16)[element] ^= 1
    with pytest.raises(WeightUpdateError) as error:
        sent(tensors)
    found = str(error.value)
    assert "http://gpus" in found
    for rank in range(RANKS):
        assert (f"{parameter} has other values on rank {rank}" in found) == (rank in ranks[:3])
    assert ("and 1 more" in found) == (len(ranks) > 3)
