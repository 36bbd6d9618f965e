"""Adams that keep the number of their steps in different places, with the same float32 arithmetic.

`Late` behaves as FusedAdam of Transformer Engine and Apex was read to: its groups get "step" inside step() alone, and
its state is nothing but floats. They prove where the number of steps goes and that a resumed run continues bit for bit;
of the CUDA kernels they prove nothing. torch.optim.AdamW, which keeps a tensor a parameter, is used as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer
from torch import Tensor

from megatron_stare.megatron.substitute import substituted


class InGroup(torch.optim.Optimizer):
    """The number of steps is in the group from the start."""

    def __init__(
        self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, *, adam_w_mode: bool = True
    ) -> None:
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.begin()

    def begin(self) -> None:
        for group in self.param_groups:
            group["step"] = 0

    def count(self, group: dict[str, Any], state: dict[str, Any], first: bool) -> int | None:
        """One more step, counted once a group or once a parameter; None: no bias correction."""
        group["step"] += int(first)
        return group["step"]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            first = True
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                if p.grad is None:
                    continue
                step = self.count(group, state, first)
                first = False
                self._move(p, state, group, step)

    def _move(self, p: Tensor, state: dict[str, Any], group: dict[str, Any], step: int | None) -> None:
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(p.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        first, second = (1.0, 1.0) if step is None else (1 - beta1**step, 1 - beta2**step)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(state["exp_avg"] / first, (state["exp_avg_sq"] / second).sqrt() + group["eps"], value=-group["lr"])


class Late(InGroup):
    """The number of steps is in the group from the first step on; the state is floats, and other entries an error."""

    def begin(self) -> None:
        pass

    def count(self, group: dict[str, Any], state: dict[str, Any], first: bool) -> int:
        group["step"] = group.get("step", 0) + int(first)
        return group["step"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name, value in state.items():
                state[name] = value.float()


class IntegerInState(InGroup):
    """A Python integer a parameter."""

    def begin(self) -> None:
        pass

    def count(self, group: dict[str, Any], state: dict[str, Any], first: bool) -> int:
        state["step"] = state.get("step", 0) + 1
        return state["step"]


class Absent(InGroup):
    """Without bias correction, and so without a number of steps."""

    def begin(self) -> None:
        pass

    def count(self, group: dict[str, Any], state: dict[str, Any], first: bool) -> None:
        return None


ADAMS: dict[str, type[torch.optim.Optimizer]] = {
    "in_group": InGroup,
    "late": Late,
    "tensor_in_state": torch.optim.AdamW,
    "integer_in_state": IntegerInState,
    "absent": Absent,
}


@contextlib.contextmanager
def installed(adam: type[torch.optim.Optimizer]) -> Iterator[None]:
    """While open, Megatron finds this Adam as it finds Transformer Engine's."""
    with contextlib.ExitStack() as stack:
        if adam is not torch.optim.AdamW:
            for owner, name, value in [
                (megatron_optimizer, "Adam", adam),
                (megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False),
                (distrib_optimizer, "Adam", adam),
                (distrib_optimizer, "HAVE_APEX_OR_TE", True),
                (distrib_optimizer, "USING_TE_OPTIMIZER", True),
            ]:
                stack.enter_context(substituted(owner, name, value))
        yield
