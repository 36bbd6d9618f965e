"""Computes two sums for each tensor of a run's state, over the part that this rank holds. The sums
show whether a checkpoint restored the whole state.

The log-probs of a canary batch verify the weights, but not the optimizer. If the optimizer state is
not restored, no error is raised, and the effect appears only in later steps. Each rank computes the
sums of its own part of the state. If the sums of all ranks are added, the totals are the same in
every parallel layout, up to rounding in float64.
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

Sums = dict[str, tuple[float, float]]  # by tensor: sum of absolute values, sum of squares


@dataclass(frozen=True)
class RankProof:
    """Contains one rank's log-probs, its sums over the tensors of the run's state, and its step
    counts. The driver uses these numbers to verify that a checkpoint restored the whole state.

    `log_probs`: for each policy, a pair of tensors [n]. The first tensor contains the canonical
        indices of this rank's n response positions. The second tensor contains the float32
        log-probs at the same response positions. Only ranks of the last pipeline stage have
        log-probs.
    `sums`, `counts`: see `state_sums`.
    """

    log_probs: dict[str, tuple[Tensor, Tensor]]
    sums: Sums
    counts: dict[str, float]


@torch.no_grad()
def state_sums(policy: Policy, reference: Sequence[nn.Module]) -> tuple[Sums, dict[str, float]]:
    """Computes two sums for each tensor of the run's state: the sum of the absolute values, and the
    sum of the squares. The tensors are the policy's weights, the weights of a refreshed reference
    policy, and the optimizer's tensors. A sum covers only the part of the tensor that this rank
    holds. Each element is summed on only one rank. If a tensor has one row per vocabulary entry,
    its sums leave out the padding rows. Also returns the step counts of Adam and of the
    schedule."""
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
    """Adds the two sums of each tensor part in `states` to `found`. `words` is the size of the
    vocabulary."""
    for state in states:
        for part in nested_values(state):
            if not isinstance(part, ShardedTensor | ShardedTensorFactory) or not is_main_replica(
                part.replica_id
            ):
                continue
            data = part.data
            # rows are vocabulary entries; their padding depends on the layout
            if getattr(part, "allow_shape_mismatch", False):
                data = data[: max(words - part.global_offset[0], 0)]
            for power in (1, 2):
                norm = torch.linalg.vector_norm(data, power, dtype=torch.float64)
                found[f"{what}: {part.key}"][power - 1] += float(norm) ** power
