"""Megatron's DistributedOptimizer over torch's AdamW, which serves where Transformer Engine and Apex are absent.

Torch keeps a step count for every parameter, Megatron's code for checkpoints expects one for all. Three of its ways
with it are mended here, each by overriding the method around it; training itself is Megatron's own.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn


class ResumableDistributedOptimizer(DistributedOptimizer):
    """Saves and loads exactly, at any data-parallel size."""

    def state_dict(self) -> dict[str, Any]:
        """As Megatron's, which fails before the first step, when no parameter has a state: there is one at step 0."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As Megatron's, which lets all parameters share one step tensor: every parameter's update would count."""
        super().load_state_dict(state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self, model_param: nn.Parameter, tensors: dict[str, Tensor]) -> None:
        """As Megatron's, which would look for a step among the loaded tensors, and is not run without gradients."""
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        super()._set_main_param_and_optimizer_states(model_param, {**tensors, "step": state["step"]})
