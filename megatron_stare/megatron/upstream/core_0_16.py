"""The interface of megatron-core 0.16."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import (
    COMMON_STATE_FNAME,
    TorchCommonLoadStrategy,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec

# Names that megatron-core reads without defining them if Transformer Engine is absent, and names
# that tell whether Transformer Engine is installed.
UNDEFINED = ((moe_utils, "te_general_gemm"), (multi_latent_attention, "HAVE_TE"))
_COMMON = "common_state/shard_0_1"  # the object that 0.19 saves instead of a file


def mlp_submodules(layer: ModuleSpec) -> MLPSubmodules:
    """Returns the feed-forward submodules in the spec of one of Megatron's local layers (layers
    without Transformer Engine). The caller can replace the submodules in place."""
    return layer.submodules.mlp.submodules


def begin_save(
    state: dict[str, Any], folder: str, strategy: Any, *, validate: bool
) -> AsyncRequest:
    """Prepares to save a checkpoint, and returns the request that saves it in the background.

    Args:
        validate: whether Megatron checks that exactly one rank saves each part of a tensor.
    """
    return dist_checkpointing.save(
        state, folder, strategy, validate_access_integrity=validate, async_sharded_save=True
    )


class _LoadCommon(TorchCommonLoadStrategy):
    """Reads the non-tensor state of a checkpoint. Release 0.16 of megatron-core saves the
    non-tensor state in a file. Release 0.19 saves the non-tensor state as one more entry of the
    torch.distributed.checkpoint that contains the tensors."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        if (Path(checkpoint_dir) / COMMON_STATE_FNAME).exists():
            return super().load_common(Path(checkpoint_dir))
        read: dict[str, Any] = {_COMMON: io.BytesIO()}
        reader = torch.distributed.checkpoint.FileSystemReader(checkpoint_dir)
        torch.distributed.checkpoint.load(read, storage_reader=reader, no_dist=True)
        found = read[_COMMON]
        return (torch.load(found) if isinstance(found, io.BytesIO) else found)[0]


def load_common(folder: str) -> dict[str, Any]:
    """Reads the non-tensor state of a checkpoint."""
    return _LoadCommon().load_common(folder)


def load(state: dict[str, Any], folder: str, strategy: Any = None) -> dict[str, Any]:
    """Reads those entries of a checkpoint that `state` names. The tensors are read by `strategy`,
    or by Megatron's default strategy if `strategy` is None."""
    return dist_checkpointing.load(state, folder, strategy, _LoadCommon())
