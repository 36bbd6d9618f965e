"""The interface of megatron-core 0.19."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

# Names that megatron-core reads without defining them if Transformer Engine is absent.
UNDEFINED: tuple[tuple[ModuleType, str], ...] = ()


def mlp_submodules(layer: ModuleSpec) -> MLPSubmodules:
    """Returns the feed-forward submodules in the spec of one of Megatron's local layers (layers
    without Transformer Engine). The caller can replace the submodules in place."""
    return layer.submodules.mlp.keywords["submodules"]  # the layer is a partial of its class


def begin_save(
    state: dict[str, Any], folder: str, strategy: Any, *, validate: bool
) -> AsyncRequest:
    """Prepares to save a checkpoint, and returns the request that saves it in the background.

    Args:
        validate: whether Megatron checks that exactly one rank saves each part of a tensor.
    """
    return dist_checkpointing.save(
        state,
        folder,
        strategy,
        validate_access_integrity=validate,
        async_sharded_save=True,
        async_strategy="mcore",  # the default strategy needs nvidia-resiliency-ext
    )


def load_common(folder: str) -> dict[str, Any]:
    """Reads the non-tensor state of a checkpoint."""
    return dist_checkpointing.load_common_state_dict(folder)


def load(state: dict[str, Any], folder: str, strategy: Any = None) -> dict[str, Any]:
    """Reads those entries of a checkpoint that `state` names. The tensors are read by `strategy`,
    or by Megatron's default strategy if `strategy` is None."""
    return dist_checkpointing.load(state, folder, strategy)
