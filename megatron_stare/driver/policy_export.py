"""The policy as a Hugging Face folder: its files are laid out here, and filled by the ranks."""

from __future__ import annotations

from math import prod
from pathlib import Path

from megatron_stare.cluster.trainer_group import TrainerGroup
from megatron_stare.weights.files.hf_folder import copy_companions
from megatron_stare.weights.files.hf_shards import SHARD_BYTES, create_shards, dtype_name
from megatron_stare.weights.files.staging import staging


def export_policy(
    ranks: TrainerGroup, target: Path, companions_from: Path, step: int, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes the policy, with config and tokenizer of `companions_from`. Replaces what was there in the end.

    Raises:
        UserError: it cannot be written.
    """
    parts = [part for part in ranks.own_tensors() if part]
    (dtype,) = {dtype for part in parts for _, dtype in part.values()}
    shapes = [{name: shape for name, (shape, _) in part.items()} for part in parts]
    nbytes = sum(prod(shape) for part in shapes for shape in part.values()) * dtype.itemsize
    with staging(target.resolve(), nbytes, replace=True) as folder:
        ranks.write_tensors(create_shards(folder, shapes, dtype, shard_bytes, step))
        copy_companions(companions_from, folder, dtype_name(dtype))
