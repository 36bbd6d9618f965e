"""The loss scale of float16, whose smallest numbers a gradient would else fall below.

The loss is multiplied by it before backward (passes.py), Megatron divides the float32 gradients by it
(`prepare_grads`), and it moves with what came of that (optimizer.py). In float32 and bfloat16 there is none.
"""

from __future__ import annotations

from typing import cast

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from torch import Tensor

from megatron_stare.config.schema import OptimizerConfig


class LossScale(DynamicGradScaler):
    """Megatron's dynamic scale, except that it moves when a step is decided, not while its gradient is prepared.

    Megatron moves it with every gradient it prepares: for a batch without a loss too, and, where experts have an
    optimizer of their own, for each optimizer by itself, so that their gradients would be divided by another scale than
    the loss was multiplied by.
    """

    def update(self, found_inf: bool) -> None:
        """Megatron's call, which changes nothing."""

    def settle(self, *, overflow: bool) -> None:
        """Moves the scale after a step that was taken, or left out because its gradient overflowed."""
        super().update(overflow)

    @property
    def exhausted(self) -> bool:
        """Whether the scale is at its floor, so that an overflow is no fault of it. Waits for the device."""
        return bool(self._scale <= self.min_scale)

    @property
    def factor(self) -> Tensor:
        """0-dim float32, what the loss is multiplied by. A step leaves it as it is: the next one has a tensor of its
        own."""
        return self._scale[0]


def install_loss_scale(optimizer: MegatronOptimizer, config: OptimizerConfig) -> None:
    """Gives all optimizers of a chain one scale, in the place of Megatron's own, one each."""
    scale = LossScale(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=config.growth_factor,
        backoff_factor=config.backoff_factor,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
    for part in _chain(optimizer):
        part.grad_scaler = scale


def loss_scale_of(optimizer: MegatronOptimizer) -> LossScale | None:
    """The scale that was installed; None where the loss is not scaled."""
    return cast("LossScale | None", getattr(_chain(optimizer)[0], "grad_scaler", None))


def _chain(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return getattr(optimizer, "chained_optimizers", [optimizer])
