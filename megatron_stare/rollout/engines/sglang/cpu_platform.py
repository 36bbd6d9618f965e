"""Defines plug-ins that let SGLang run on a CPU when SGLang's kernel package is not installed.
SGLang loads the plug-ins through the entry-point groups `sglang.srt.platforms` and
`sglang.srt.plugins`. The trainer never imports this module."""

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
ATTENTION = "torch_native"  # the only attention backend without a kernel package


def activate() -> str | None:
    """Returns the name of this project's platform class if the machine has no CUDA. Returns None if
    the machine has CUDA, so that SGLang uses its own platforms."""
    if torch.cuda.is_available():
        return None
    from sglang.srt.arg_groups.choices import (
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )

    # SGLang honours sampling seeds only with deterministic inference, for which it has no CPU
    # backend. Every backend keys the noise on the request; this one does not guarantee the same
    # rounding in every batch.
    add_deterministic_attention_backend_choices([ATTENTION])
    add_radix_supported_deterministic_attention_backend_choices([ATTENTION])
    return "megatron_stare.rollout.engines.sglang.cpu_platform_class.CpuPlatform"


def register_hooks() -> None:
    """Uses SGLang's hook registry to replace the SGLang functions that do not suit this project's
    CPU servers.

    SGLang honours seeds only in deterministic inference. In deterministic inference, SGLang calls
    functions that need a GPU or a kernel package. The hooks replace the functions that need a GPU
    or a kernel package. SGLang's processes also report their load in a file in /dev/shm, and a
    killed server would leave this file behind. The hooks therefore place the file in the server's
    own folder, which is removed with the server.
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
        # for communication between groups with separate requests
        ("sglang.srt.layers.dp_attention.memcpy", copied_rows),
        (
            "sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather_into_tensor",
            _gathered,
        ),
        ("sglang.srt.distributed.parallel_state.GroupCoordinator.reduce_scatter_tensor", _reduced),
        ("torch.cuda.synchronize", _nothing_under_way),  # 0.5.22's checksums synchronize with a GPU
    ):
        HookRegistry.register(target, own, HookType.REPLACE)
    groups_meet = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch"
    HookRegistry.register(groups_meet, _padded_on_a_cpu, HookType.AROUND)


def _let_open_shared() -> None:
    """Allows the server's unpickler to open buckets of weights in this machine's shared memory.
    Servers on GPUs do not need this permission, because they open handles of GPU memory."""
    from sglang.srt.utils.common import SafeUnpickler

    allowed = getattr(SafeUnpickler, "ALLOWED_GLOBALS", None)
    if allowed is not None:
        allowed.add((open_shared.__module__, open_shared.__name__))


def _plain_kernels() -> None:
    """Does nothing. Takes the place of the SGLang function that would switch from torch's own
    kernels to batch-invariant kernels."""


def _not_pinned(buffer: object, granularity: object = None) -> None:
    """Does nothing. Replaces the SGLang function that pins host memory for copies to a GPU."""


def _gathered(ranks: Any, output: Tensor, of: Tensor) -> None:
    """Gathers tensors with SGLang's method `_all_gather_into_tensor`. SGLang's original function
    calls `_all_gather_into_tensor` only if the environment variable SGLANG_USE_CPU_ENGINE is 1. For
    any other value, the original function calls a CUDA operator. This project starts its CPU
    servers without SGLANG_USE_CPU_ENGINE, so the original function would call the CUDA operator."""
    ranks._all_gather_into_tensor(output, of)


def _reduced(ranks: Any, output: Tensor, of: Tensor) -> None:
    """Reduces and scatters tensors without a CUDA operator; see `_gathered`."""
    ranks._reduce_scatter_tensor(output, of)


def _padded_on_a_cpu(original: Callable[..., None], batch: object, runner: Any) -> None:
    """Makes SGLang use its CPU code to pad a batch. SGLang pads batches if the server uses
    attention data parallelism, in which each group of ranks serves its own requests. SGLang itself
    chooses the CPU code only if the environment variable SGLANG_USE_CPU_ENGINE is 1, and this
    project starts its CPU servers without this variable. Also defines the fill value for sequence
    lengths, because `torch_native`, the attention backend of this project's CPU servers, defines
    no such value."""
    sys.modules["sglang.srt.model_executor.forward_batch_info"]._is_cpu = True  # type: ignore[attr-defined]
    runner.attn_backend.get_cpu_graph_seq_len_fill_value = lambda: 1
    original(batch, runner)


def copied_rows(
    to: Tensor, of: Tensor, dim: int, offset: Tensor, rows: Tensor, offset_in_source: bool
) -> None:
    """Replaces SGLang's Triton kernel that copies rows between two tensors: a tensor with the
    tokens of one group of ranks, and a tensor with the tokens of all groups of ranks.

    Args:
        to, of: [n, ...], with equal numbers of columns.
        dim: 0.
        offset: first row to read in `of` if `offset_in_source`, else first row to write in `to`.
        rows: number of rows to copy, at most the lengths of `to` and `of`.
    """
    first, count = int(offset), min(int(rows), len(to), len(of))
    if offset_in_source:
        to[:count] = of[first : first + count]
    else:
        to[first : first + count] = of[:count]


def _nothing_under_way(device: object = None) -> None:
    """Does nothing, because a CPU server has no GPU to synchronize with."""


def _path_of_loads(instance: str) -> str:
    """Returns the path of the file in which a server's processes report their load to each
    other."""
    return os.path.join(tempfile.gettempdir(), f"loads-{instance}")


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """Computes the same hash as SGLang's kernel `murmur_hash32`. The hash is MurmurHash3 (32 bits,
    hash seed 0) of 16 bytes: 8 bytes of `seed`, 4 bytes of the position, and 4 bytes of the column
    index.

    SGLang derives the noise of seeded sampling from the hash that this function returns. The
    function uses plain torch, because SGLang's own implementations need Triton or a kernel package.

    Args:
        seed: [n] 64 bits per row.
        positions: [n] 32 bits per row.
        col_indices: [m] 32 bits per column.

    Returns:
        [n, m] uint32.
    """
    # int64 wraps around, which does not affect the low 32 bits of a product
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
