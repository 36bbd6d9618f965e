"""Adams that keep the number of their steps in different places, with the same float32 arithmetic.

`Late` behaves as FusedAdam of Transformer Engine and Apex was read to: its groups get "step" inside
step() alone, and its state is nothing but floats. They prove where the number of steps goes and
that a resumed run continues bit for bit; of the CUDA kernels they prove nothing. torch.optim.AdamW,
which keeps a tensor a parameter, is used as it is.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer, optimizer_config
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_stare.megatron.backend import cpu_backend
from megatron_stare.megatron.backend.cpu_backend import substituted


class InGroup(torch.optim.Optimizer):
    """The number of steps is in the group from the start."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: Any,
        eps: float,
        weight_decay: float,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode and not capturable
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
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

    def _move(
        self, p: Tensor, state: dict[str, Any], group: dict[str, Any], step: int | None
    ) -> None:
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(p.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        first, second = (1.0, 1.0) if step is None else (1 - beta1**step, 1 - beta2**step)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(
            state["exp_avg"] / first,
            (state["exp_avg_sq"] / second).sqrt() + group["eps"],
            value=-group["lr"],
        )


class Late(InGroup):
    """The number of steps is in the group from the first step on; the state is floats, and other
    entries an error."""

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


class PrecisionAware(Late):
    """Stand-in for Transformer Engine's FusedAdam as it was read to act when Megatron asks it to be
    precision-aware. Gradients are taken from `decoupled_grad`, and masters are kept in the
    optimizer's state. The master of a bfloat16 parameter is the 16 bits that the parameter lacks,
    which are negative where the parameter was rounded up; `initialize_state` wants to be told that
    masters are such."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: Any,
        eps: float,
        weight_decay: float,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, adam_w_mode=adam_w_mode, capturable=capturable
        )
        assert master_weights and use_decoupled_grad and store_param_remainders
        assert {master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype} == {torch.float32}

    def initialize_state(self, p: Tensor, store_param_remainders: bool) -> None:
        low = (
            torch.zeros_like(p, dtype=torch.int16)
            if store_param_remainders
            else p.detach().float().clone()
        )
        zeros = [torch.zeros_like(p, dtype=torch.float32) for _ in range(2)]
        self.state[p] = {"exp_avg": zeros[0], "exp_avg_sq": zeros[1], "master_param": low}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if not self.state[p]:
                    self.initialize_state(p, p.dtype == torch.bfloat16)
                if (gradient := getattr(p, "decoupled_grad", None)) is not None:
                    self._update(p, gradient, group)

    def _update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        kept, words = (
            state["master_param"],
            p.view(torch.int16) if p.dtype == torch.bfloat16 else None,
        )
        if words is not None:
            whole = torch.empty(p.numel(), 2, dtype=torch.int16)  # lower word first
            whole[:, 0], whole[:, 1] = kept, words - (kept < 0).short()
            master = whole.view(torch.float32).squeeze(1)
        else:
            master = p if p.dtype == torch.float32 else kept
        master.grad = gradient
        self._move(master, state, group, group["step"])
        if words is not None:
            whole = master.detach().unsqueeze(1).view(torch.int16)
            kept.copy_(whole[:, 0])
            words.copy_(whole[:, 1] + (kept < 0).short())
        elif p.dtype == torch.float16:
            p.copy_(master)


@contextlib.contextmanager
def precision_aware() -> Iterator[None]:
    """While open, Megatron finds a Transformer Engine whose Adam is `PrecisionAware`, and that is
    new enough."""
    names = [
        ".".join(("transformer_engine", "pytorch", "optimizers")[:count]) for count in (1, 2, 3)
    ]
    before = {name: sys.modules.get(name) for name in names}
    found = {name: ModuleType(name) for name in names}
    found[names[-1]].FusedAdam = PrecisionAware  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        stack.enter_context(installed(PrecisionAware))
        for owner in (megatron_optimizer, optimizer_config):
            stack.enter_context(substituted(owner, "is_te_min_version", lambda *_, **__: True))
        sys.modules.update(found)
        try:
            yield
        finally:
            for name, module in before.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module


class _OnDevice(TorchFunctionMode):
    """Tensors say that they are on a CUDA device, until they are copied to the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_cuda.__get__:  # made anew by every look
            return not getattr(args[0], "on_the_host", False)
        if func is Tensor.pin_memory:
            return args[0]
        made = args[0].clone() if func is Tensor.cpu else func(*args, **(kwargs or {}))
        of_the_host = func is Tensor.cpu or (args and getattr(args[0], "on_the_host", False))
        if of_the_host and isinstance(made, Tensor):
            made.on_the_host = True
        return made


class _Stream:
    """A stream, or an event of one, on which everything is done at once."""

    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _Stream:
        return self


@contextlib.contextmanager
def offloading() -> Iterator[None]:
    """While open, megatron-core's HybridDeviceOptimizer makes the copies that it makes of
    parameters on a device, and steps them on the host, with torch's AdamW: its own code, without a
    device. Of Transformer Engine it asks for the version alone."""
    split = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def as_on_a_device(self: HybridDeviceOptimizer, fraction: float) -> Any:
        with _OnDevice():
            return split(self, fraction)

    with (
        substituted(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", as_on_a_device),
        substituted(cpu_backend, "_InertStream", _Stream),
        substituted(optimizer_config, "is_te_min_version", lambda *_, **__: True),
    ):
        yield
