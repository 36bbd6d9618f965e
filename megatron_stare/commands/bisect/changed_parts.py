"""Stand-ins for parts of a run that is bisected: its method with one thing held still, an engine one update behind.

A method is changed in its gate, its draws or its importance correction. What is changed is the method itself, after
preflight, so that everything else of the run is its own. Methods travel to the ranks, so a changed one is pickled as
the original and what to change. The engine says that it has the newest weights, and samples with those before them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_stare.algorithms.clip_cov import ClipCov
from megatron_stare.algorithms.draw import uniform
from megatron_stare.algorithms.method import Method, State
from megatron_stare.algorithms.policy import PolicyGradient
from megatron_stare.algorithms.stare import Stare
from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Statistics
from megatron_stare.rollout.engines.engine import GenerateResult
from megatron_stare.rollout.engines.local import LocalEngine


@dataclass(frozen=True)
class ChangedRun(ResolvedRun):
    """A run whose method is not quite the one that its configuration describes."""

    changed: Method | None = None

    @property
    def method(self) -> Method:
        return self.changed if self.changed is not None else super().method


class _HeldGate:
    """A gate that does not move, whatever the entropy."""

    held: float

    def control(self: Any, state: State, statistics: Statistics) -> State:
        moved = super().control(state, statistics)  # type: ignore[misc]
        return {**moved, "gate": torch.full_like(moved["gate"], self.held)}

    def gates(self, batch: TokenBatch, statistics: Statistics, state: State) -> Tensor:
        return torch.tensor(self.held, dtype=torch.float64, device=batch.entropy.device)


class _OpenGate(_HeldGate):
    held = 1.0


class _ClosedGate(_HeldGate):
    held = 0.0


class _DrawsByPlace:
    """Draws that belong to a token's place among those that a rank has at hand, and so change with the layout."""

    def tickets(self: Any, batch: TokenBatch) -> Tensor:
        return uniform(self.seed, batch.step, torch.arange(len(batch.index), device=batch.index.device))


def _derived(mixin: type) -> Callable[[Method], Method]:
    def change(method: Method) -> Method:
        return _rebuilt(mixin, method)

    return change


def _rebuilt(mixin: type, method: Method) -> Method:
    kind = type(f"{type(method).__name__}{mixin.__name__}", (mixin, type(method)), {"__reduce__": _reduced})
    changed: Any = object.__new__(kind)
    changed.__dict__.update(method.__dict__, _original=(mixin, method))
    return changed


def _reduced(changed: Any) -> tuple[Any, ...]:
    return _rebuilt, changed._original


open_gate = _derived(_OpenGate)
closed_gate = _derived(_ClosedGate)
draws_by_place = _derived(_DrawsByPlace)


def without_correction(method: Method) -> Method:
    """The method whose loss nothing corrects for the engine's policy."""
    assert isinstance(method, PolicyGradient)
    return replace(method, correction=None)


def has_gate(method: Method) -> bool:
    """Whether an entropy opens and closes a gate of it."""
    return isinstance(method, Stare) and method.entropy_target is not None


def has_correction(method: Method) -> bool:
    return isinstance(method, PolicyGradient) and method.correction is not None


def draws(method: Method) -> bool:
    """Whether a seeded draw decides about its tokens."""
    return isinstance(method, ClipCov)


class LateEngine(LocalEngine):
    """Proves and reports what it was given, as the engine in process does; see LocalEngine."""

    _before: dict[str, torch.Tensor] | None = None  # the weights that the newest ones took the place of

    def begin_weight_update(self, version: int, prove: bool = True) -> None:
        if self._version is not None:
            self._before = {name: parameter.clone() for name, parameter in self._parameters.items()}
        super().begin_weight_update(version, prove)

    def collect(self, wait_s: float) -> list[GenerateResult]:
        if self._before is None:  # the first weights have none before them
            return super().collect(wait_s)
        newest = {name: parameter.clone() for name, parameter in self._parameters.items()}
        self._put(self._before)
        try:
            return super().collect(wait_s)
        finally:
            self._put(newest)

    def _put(self, weights: dict[str, torch.Tensor]) -> None:
        for name, values in weights.items():
            self._parameters[name].copy_(values)
