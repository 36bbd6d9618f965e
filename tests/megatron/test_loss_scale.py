"""The dynamic loss scale by itself: when it moves, against a sequence worked by hand."""

from __future__ import annotations

import pytest
import torch

from megatron_stare.config.schema import OptimizerConfig
from megatron_stare.megatron.backend.cpu_backend import backend
from megatron_stare.megatron.optimizer.optimizer import LossScale, install_loss_scale, loss_scale_of


class Part:
    """Stand-in for an optimizer of a chain, as far as the loss scale is concerned."""

    grad_scaler = None


class Chain:
    def __init__(self) -> None:
        self.chained_optimizers = [Part(), Part()]


def installed(**settings: float) -> LossScale:
    chain = Chain()
    with backend():
        install_loss_scale(chain, OptimizerConfig(**settings))  # type: ignore[arg-type]
    first, second = chain.chained_optimizers
    assert first.grad_scaler is second.grad_scaler  # the loss was multiplied by one number
    scale = loss_scale_of(chain)  # type: ignore[arg-type]
    assert scale is first.grad_scaler and scale is not None
    return scale


def scales(scale: LossScale, overflows: str) -> list[float]:
    """After each step, one letter a step: o overflowed, . was taken."""
    found = []
    for letter in overflows:
        # what Megatron calls as it prepares the gradient: nothing has been decided
        scale.update(letter == "o")
        scale.settle(overflow=letter == "o")
        found.append(float(scale.factor))
    return found


def test_when_it_grows_and_falls() -> None:
    scale = installed(initial_loss_scale=8.0, loss_scale_window=3)
    # three in a row, counted anew after each
    assert scales(scale, "..o...o...") == [8, 8, 4, 4, 4, 8, 4, 4, 4, 8]


def test_hysteresis_lets_overflows_pass_until_it_has_grown() -> None:
    scale = installed(initial_loss_scale=8.0, loss_scale_window=2, hysteresis=2)
    # the first is let pass, the second and third lower it; it grows, and one is let pass again
    assert scales(scale, "o.oo..oo") == [8, 8, 4, 2, 2, 4, 4, 2]


def test_factors_and_floor() -> None:
    scale = installed(
        initial_loss_scale=9.0,
        min_loss_scale=2.0,
        loss_scale_window=1,
        growth_factor=4.0,
        backoff_factor=1 / 3,
    )
    assert scales(scale, "oo.") == pytest.approx([3, 2, 8])
    assert [float(scales(scale, "o")[0]), scale.exhausted] == pytest.approx([8 / 3, False])
    assert (scales(scale, "o"), scale.exhausted) == ([2], True)


def test_what_a_loss_was_multiplied_by_stays_what_it_was() -> None:
    scale = installed(initial_loss_scale=8.0)
    used = scale.factor
    scales(scale, "oo")
    assert (float(used), float(scale.factor), used.dtype, used.shape) == (
        8,
        2,
        torch.float32,
        torch.Size([]),
    )


def test_a_gradient_without_a_scale() -> None:
    assert loss_scale_of(Chain()) is None  # type: ignore[arg-type]
