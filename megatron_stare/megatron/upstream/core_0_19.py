"""megatron-core 0.19, as this package uses it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

# Names that are read without being defined where Transformer Engine is absent.
UNDEFINED: tuple[tuple[ModuleType, str], ...] = ()


def mlp_submodules(layer: ModuleSpec) -> MLPSubmodules:
    """Finds the parts of a local layer's feed-forward network, to be replaced where they are."""
    return layer.submodules.mlp.keywords["submodules"]  # of a partial of its class


def begin_save(
    state: dict[str, Any], folder: str, strategy: Any, *, validate: bool
) -> AsyncRequest:
    """Plans a checkpoint that is written in the background.

    Args:
        validate: whether every part of a tensor is checked to be saved by just one rank.
    """
    return dist_checkpointing.save(
        state,
        folder,
        strategy,
        validate_access_integrity=validate,
        async_sharded_save=True,
        async_strategy="mcore",  # the default one is of nvidia-resiliency-ext
    )


def load_common(folder: str) -> dict[str, Any]:
    """Reads what is no tensor of a checkpoint."""
    return dist_checkpointing.load_common_state_dict(folder)


def load(state: dict[str, Any], folder: str, strategy: Any = None) -> dict[str, Any]:
    """Reads what `state` asks for; `strategy` says how tensors are read, None: as Megatron does by
    itself."""
    return dist_checkpointing.load(state, folder, strategy)
