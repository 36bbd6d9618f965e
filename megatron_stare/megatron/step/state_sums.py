"""Sums over a rank's part of a run's state, two numbers a tensor, which show whether a checkpoint
restored all of it.

The log-probs of a canary show that the weights are right, and nothing of the optimizer, whose loss
shows only later, and not as an error. A norm is the same in any layout but for rounding in float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from torch import Tensor, nn

from megatron_stare.megatron.backend.cpu_backend import backend
from megatron_stare.megatron.model.model import unwrap
from megatron_stare.megatron.optimizer.optimizer_state import sharded_state
from megatron_stare.megatron.step.step import Policy

Sums = dict[str, tuple[float, float]]  # by tensor: sum of absolute values, and of squares


@dataclass(frozen=True)
class RankProof:
    """Numbers that one rank contributes to a proof of the loaded state.

    log_probs: by policy, canonical numbers [n] of the positions here and their log-probs [n]
        float32; of the last stage alone.
    sums, counts: see `state_sums`.
    """

    log_probs: dict[str, tuple[Tensor, Tensor]]
    sums: Sums
    counts: dict[str, float]


@torch.no_grad()
def state_sums(policy: Policy, reference: Sequence[nn.Module]) -> tuple[Sums, dict[str, float]]:
    """This rank's part of weights, of a reference that moves, and of the optimizer's tensors; each
    element is one rank's, and rows that pad the vocabulary nobody's. And what is counted: Adam's
    steps and the schedule's.
    """
    with backend():
        return _state_sums(policy, reference)


def _state_sums(policy: Policy, reference: Sequence[nn.Module]) -> tuple[Sums, dict[str, float]]:
    parameters = {
        f"model{i}": unwrap(chunk).sharded_state_dict() for i, chunk in enumerate(policy.model)
    }
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    words = policy.shape.vocab_size
    _add(found, "policy", words, parameters.values())
    _add(
        found,
        "reference policy",
        words,
        (unwrap(chunk).sharded_state_dict() for chunk in reference),
    )
    state, steps = sharded_state(policy.optimizer, parameters, loading=False)
    _add(found, "optimizer", words, state)
    counts = {"updates of the schedule": float(policy.scheduler.num_steps)}
    if steps is not None:
        counts["steps of Adam"] = float(steps)
    return {name: (one, two) for name, (one, two) in found.items()}, counts


def _add(found: dict[str, list[float]], what: str, words: int, states: Iterable[Any]) -> None:
    """Adds parts of whole tensors. Args: words: of the vocabulary."""
    for state in states:
        for part in nested_values(state):
            if not isinstance(part, ShardedTensor | ShardedTensorFactory) or not is_main_replica(
                part.replica_id
            ):
                continue
            data = part.data
            # the rows are words; their padding depends on the layout
            if getattr(part, "allow_shape_mismatch", False):
                data = data[: max(words - part.global_offset[0], 0)]
            for power in (1, 2):
                norm = torch.linalg.vector_norm(data, power, dtype=torch.float64)
                found[f"{what}: {part.key}"][power - 1] += float(norm) ** power
