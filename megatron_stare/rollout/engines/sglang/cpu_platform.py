"""SGLang's plug-ins for CPUs without kernel packages. Loaded by the server through the entry-point
groups `sglang.srt.platforms` and `sglang.srt.plugins`, in the environment SGLang is installed in;
the trainer never imports this.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_stare.weights.sync.device_rooms import open_shared

_MASK = 0xFFFFFFFF
ATTENTION = "torch_native"  # the one attention backend that needs no kernels


def activate() -> str | None:
    """The platform class's name on a machine without CUDA; None where SGLang's own platforms
    serve."""
    if torch.cuda.is_available():
        return None
    from sglang.srt.arg_groups.choices import (
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )

    # SGLang honours sampling seeds only with deterministic inference, and knows no CPU backend for
    # that. With any backend noise is keyed on the request; this one does not promise the same
    # rounding in every batch.
    add_deterministic_attention_backend_choices([ATTENTION])
    add_radix_supported_deterministic_attention_backend_choices([ATTENTION])
    return "megatron_stare.rollout.engines.sglang.cpu_platform_class.CpuPlatform"


def register_hooks() -> None:
    """Replaces, through SGLang's own registry, what a server that this project starts cannot use as
    it is.

    Seeds: what deterministic inference needs is written for GPUs alone, or lies in a kernel
    package. And a server that is killed leaves a file in /dev/shm; here that file lies in the
    server's own folder, which goes with it.
    """
    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _let_open_shared()
    for target, own in (
        ("sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", _plain_kernels),
        ("sglang.kernels.ops.sampling.murmur_hash.murmur_hash32", murmur_hash32),
        ("sglang.srt.managers.load_snapshot.shm_path_for", _path_of_loads),
        # for the table of routed experts
        ("sglang.srt.mem_cache.pool_host.common._cuda_host_register", _not_pinned),
        # between groups with requests of their own
        ("sglang.srt.layers.dp_attention.memcpy", copied_rows),
        (
            "sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather_into_tensor",
            _gathered,
        ),
        ("sglang.srt.distributed.parallel_state.GroupCoordinator.reduce_scatter_tensor", _reduced),
        ("torch.cuda.synchronize", _nothing_under_way),  # 0.5.22's checksums wait for a GPU
    ):
        HookRegistry.register(target, own, HookType.REPLACE)
    groups_meet = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch"
    HookRegistry.register(groups_meet, _padded_on_a_cpu, HookType.AROUND)


def _let_open_shared() -> None:
    """Lets what servers unpickle open a bucket of weights in this machine's shared memory, as a
    GPU's ranks open handles."""
    from sglang.srt.utils.common import SafeUnpickler

    allowed = getattr(SafeUnpickler, "ALLOWED_GLOBALS", None)
    if allowed is not None:
        allowed.add((open_shared.__module__, open_shared.__name__))


def _plain_kernels() -> None:
    """Stands in for the switch to batch-invariant kernels: torch's own stay."""


def _not_pinned(buffer: object, granularity: object = None) -> None:
    """Leaves host memory as it is: there is no GPU that would copy from it."""


def _gathered(ranks: Any, output: Tensor, of: Tensor) -> None:
    """Gathers as SGLang does where its CPU engine is; elsewhere SGLang asks for a CUDA operator."""
    ranks._all_gather_into_tensor(output, of)


def _reduced(ranks: Any, output: Tensor, of: Tensor) -> None:
    """See _gathered."""
    ranks._reduce_scatter_tensor(output, of)


def _padded_on_a_cpu(original: Callable[..., None], batch: object, runner: Any) -> None:
    """Pads the tokens of groups with requests of their own, by SGLang's own way for CPUs: it knows
    of one where its CPU engine is, whose attention backends say what lengths are padded with."""
    sys.modules["sglang.srt.model_executor.forward_batch_info"]._is_cpu = True  # type: ignore[attr-defined]
    runner.attn_backend.get_cpu_graph_seq_len_fill_value = lambda: 1
    original(batch, runner)


def copied_rows(
    to: Tensor, of: Tensor, dim: int, offset: Tensor, rows: Tensor, offset_in_source: bool
) -> None:
    """Copies rows between a group's tokens and those of all groups, as SGLang's Triton kernel does.

    Args:
        to, of: [n, ...], of as many columns.
        dim: 0.
        offset: of the first row, in `of` or else in `to`.
        rows: how many; those that one of the two lacks are left out.
    """
    first, count = int(offset), min(int(rows), len(to), len(of))
    if offset_in_source:
        to[:count] = of[first : first + count]
    else:
        to[first : first + count] = of[:count]


def _nothing_under_way(device: object = None) -> None:
    """Waits for nothing: there is no GPU."""


def _path_of_loads(instance: str) -> str:
    """The file in which a server's processes tell each other their load."""
    return os.path.join(tempfile.gettempdir(), f"loads-{instance}")


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3 (32 bits, seed 0) of the 16 bytes of seed, position and column, as SGLang's
    kernel computes it.

    Keys seeded sampling noise. In plain torch, because SGLang's own need Triton or a kernel
    package.

    Args:
        seed: [n] 64 bits a row.
        positions: [n] 32 bits a row.
        col_indices: [m] 32 bits a column.

    Returns:
        [n, m] uint32.
    """
    # int64 wraps around, and the low 32 bits of a product do not see the bits that are lost
    rows = seed.to(torch.int64)
    mixed = torch.zeros_like(rows)
    for block in (rows & _MASK, (rows >> 32) & _MASK, positions.to(torch.int64) & _MASK):
        mixed = _mix(mixed, block)
    mixed = _mix(mixed[:, None], col_indices.to(torch.int64) & _MASK) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _MASK
    return (mixed ^ (mixed >> 16)).to(torch.uint32)


def _mix(state: Tensor, block: Tensor) -> Tensor:
    block = (_rotated((block * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK
    return (_rotated(state ^ block, 13) * 5 + 0xE6546B64) & _MASK


def _rotated(bits: Tensor, by: int) -> Tensor:
    return ((bits << by) | (bits >> (32 - by))) & _MASK
