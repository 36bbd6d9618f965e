"""Defines the causes that `megatron-stare bisect` considers if a run's recorded metrics seem to
contradict the run's configuration. Also defines changes to the settings or to the RL method of the
run. `bisect` repeats the steps of the run with one change at a time. Each change simulates one of
the causes.

A change can replace the gate, the random draws or the importance correction of an RL method. The
change is applied to the method object after preflight, so that the rest of the run stays the same.
A changed method is pickled as the original method and the change. A rank that unpickles the method
applies the change again. To simulate stale weights, LateEngine samples with the previous weights
but reports the newest weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_stare.algorithms.clip_cov import ClipCov
from megatron_stare.algorithms.draw import uniform
from megatron_stare.algorithms.method import Method, State
from megatron_stare.algorithms.policy import PolicyGradient
from megatron_stare.algorithms.stare import Stare
from megatron_stare.config.engines_alone import OF_SERVERS
from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.config.schema import Config
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Statistics
from megatron_stare.rollout.engines.engine import Engine, GenerateResult
from megatron_stare.rollout.engines.local import LocalEngine
from megatron_stare.rollout.engines.replicas import resolve_engine

CAUSES = ("gate", "correction", "staleness", "layout", "engine")


@dataclass(frozen=True)
class Change:
    """Change to a re-run. The change simulates one of the causes in CAUSES.

    `name`: the name of the change, and of the folder of its re-run.
    `says`: words for messages that describe the re-run with this change, such as "the gate is open
        in every step".
    `settings`: values that replace the run's settings in the re-run, by dotted key.
    `method`: a function that takes the RL method of the run and returns a changed RL method, or
        None. The function is called after the configuration is checked.
    `harmless`: true if the first step of a correct run stays the same under the change, except for
        rounding errors.
    """

    name: str
    cause: str
    says: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    method: Callable[[Method], Method] | None = None
    harmless: bool = False


@dataclass(frozen=True)
class LeftOut:
    """Cause that bisect cannot simulate in a re-run of this run. `why` is the reason in words, such
    as "the method has no gate"."""

    cause: str
    why: str


def changes(config: Config, method: Method) -> tuple[list[Change], list[LeftOut]]:
    """Returns two lists. The first list contains all changes that bisect can make to a run with the
    configuration `config` and the method `method`. The second list contains one LeftOut for each
    cause in CAUSES that no change in the first list simulates. The LeftOut contains the name of the
    cause, and the reason why bisect cannot simulate the cause in this run."""
    kind = resolve_engine(config.rollout.engine)
    found = [
        *_gate(method),
        *_correction(method),
        *_staleness(config, kind),
        *_layout(config, method),
    ]
    found += _engine(config, kind)
    why = {
        "gate": "the method has no gate",
        "correction": "the method has no correction (algorithm.correction)",
        "staleness": (
            "the run samples nothing ahead (rollout.staleness), and only the in-process engine can"
            " be made to lag"
        ),
        "layout": (
            "the run has one data rank and the smallest possible micro-batches, and its method"
            " draws nothing at random"
        ),
        "engine": "there is no other engine to compare with",
    }
    named = {change.cause for change in found}
    return found, [LeftOut(cause, why[cause]) for cause in CAUSES if cause not in named]


def contradictions(
    config: Config, method: Method, record: Sequence[Mapping[str, float]]
) -> dict[str, str]:
    """Returns a dict that describes a contradiction between the record and the configuration. The
    dict has at most one entry, for the cause 'gate'. The entry describes the first step in which
    the recorded gate is not in the state that the recorded entropy and the target require. The dict
    is empty if there is no contradiction.

    A re-run of the steps cannot reveal contradictions between the record and the configuration. If
    a fault in the code caused a contradiction, the re-run executes the same faulty code and
    reproduces the record.

    Args:
        record: metrics of each step.
    """
    read = (
        isinstance(method, Stare) and method.gate == "batch" and method.gate_entropy == "response"
    )
    if not (read and has_gate(method)) or config.skips_log_prob_pass:
        return {}
    for row in record:
        if row.get("predictive/active") == 1:
            continue  # predictive control opens the gate above the target, too
        entropy, target, gate = (
            row.get(name, math.nan) for name in ("entropy/mean", "entropy/target", "stare/gate")
        )
        if math.isfinite(entropy + target + gate) and (entropy < target) != (gate == 1):
            stands, side = ("open", "not below") if gate == 1 else ("closed", "below")
            where = f"entropy {entropy:.4g} {side} its target {target:g}"
            return {"gate": f"in step {row['step']:.0f} the gate is {stands}, and {where}"}
    return {}


def _gate(method: Method) -> list[Change]:
    if not has_gate(method):
        return []
    return [
        Change("gate-open", "gate", "the gate is open in every step", method=open_gate),
        Change("gate-closed", "gate", "the gate is closed in every step", method=closed_gate),
    ]


def _correction(method: Method) -> list[Change]:
    if not has_correction(method):
        return []
    return [
        Change(
            "correction-off", "correction", "nothing corrects the loss", method=without_correction
        )
    ]


def _staleness(config: Config, kind: type) -> list[Change]:
    found = []
    if kind is LocalEngine:
        late = f"{LateEngine.__module__}.{LateEngine.__name__}"
        says = "the engine samples with weights one update older than it says"
        found.append(Change("weights-late", "staleness", says, {"rollout.engine": late}))
    if config.rollout.staleness:
        found.append(
            Change(
                "weights-fresh", "staleness", "nothing is sampled ahead", {"rollout.staleness": 0}
            )
        )
    return found


def _layout(config: Config, method: Method) -> list[Change]:
    found = []
    if draws(method):
        says = "a token's draw belongs to its place on a rank"
        found.append(Change("draws-by-place", "layout", says, method=draws_by_place))
    half = max(
        config.batch.micro_batch_tokens // 2,
        config.rollout.max_prompt_tokens + config.rollout.max_new_tokens,
    )
    if half < config.batch.micro_batch_tokens:
        settings: dict[str, Any] = {"batch.micro_batch_tokens": half}
        found.append(
            Change(
                "micro-batches",
                "layout",
                f"micro-batches of {half} tokens",
                settings,
                harmless=True,
            )
        )
    ranks = config.parallel.data
    if ranks > 1:
        fewer = max(n for n in range(1, ranks) if ranks % n == 0)
        settings = {"parallel.data": fewer}
        if config.parallel.world_size == ranks and fewer == 1:
            settings["runtime.runner"] = "inline"
        found.append(
            Change(
                "data-ranks", "layout", f"{fewer} data ranks, not {ranks}", settings, harmless=True
            )
        )
    return found


def _engine(config: Config, kind: type) -> list[Change]:
    if not issubclass(kind, Engine):
        settings = {"rollout.engine": "local", **dict.fromkeys(OF_SERVERS)}
        return [
            Change("engine-local", "engine", "the in-process engine instead of servers", settings)
        ]
    if kind is not LocalEngine:
        settings = {"rollout.engine": "local"}
        return [
            Change("engine-local", "engine", "the in-process engine instead of your own", settings)
        ]
    responses = config.batch.prompts * config.batch.samples_per_prompt
    fewer = min(config.rollout.max_batch, responses) // 2
    if not fewer:
        return []
    return [
        Change(
            "engine-batch",
            "engine",
            f"the engine decodes {fewer} responses at a time",
            {"rollout.max_batch": fewer},
        )
    ]


@dataclass(frozen=True)
class ChangedRun(ResolvedRun):
    """Run in which a changed RL method can replace the RL method from the configuration.

    `changed`: the changed method, which the run uses instead of the configured method. If `changed`
        is None, the run uses the configured method.
    """

    changed: Method | None = None

    @property
    def method(self) -> Method:
        return self.changed if self.changed is not None else super().method


class _HeldGate:
    """Mixin that keeps the gate at the value `held`, whatever the entropy is."""

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
    """Mixin that simulates a fault: the random draws depend on the layout. The mixin computes the
    random number of a token from the token's position in the batch of one rank. The unchanged
    method computes the random number from the token's canonical index, which is the same in every
    layout."""

    def tickets(self: Any, batch: TokenBatch) -> Tensor:
        return uniform(
            self.seed, batch.step, torch.arange(len(batch.index), device=batch.index.device)
        )


def _derived(mixin: type) -> Callable[[Method], Method]:
    def change(method: Method) -> Method:
        return _rebuilt(mixin, method)

    return change


def _rebuilt(mixin: type, method: Method) -> Method:
    kind = type(
        f"{type(method).__name__}{mixin.__name__}", (mixin, type(method)), {"__reduce__": _reduced}
    )
    changed: Any = object.__new__(kind)
    changed.__dict__.update(method.__dict__, _original=(mixin, method))
    return changed


def _reduced(changed: Any) -> tuple[Any, ...]:
    return _rebuilt, changed._original


open_gate = _derived(_OpenGate)
closed_gate = _derived(_ClosedGate)
draws_by_place = _derived(_DrawsByPlace)


def without_correction(method: Method) -> Method:
    """Returns the method with the importance correction between engine and trainer switched off."""
    assert isinstance(method, PolicyGradient)
    return replace(method, correction=None)


def has_gate(method: Method) -> bool:
    """Tells whether the method has a gate that opens and closes depending on the entropy."""
    return isinstance(method, Stare) and method.entropy_target is not None


def has_correction(method: Method) -> bool:
    return isinstance(method, PolicyGradient) and method.correction is not None


def draws(method: Method) -> bool:
    """Tells whether the method selects tokens at random, with seeded random numbers (draw.py)."""
    return isinstance(method, ClipCov)


class LateEngine(LocalEngine):
    """Engine that samples with the weights from before the newest weight update. LateEngine still
    reports the version of the newest weights and returns checksums of the newest weights, as
    LocalEngine does."""

    # the previous weights
    _before: dict[str, torch.Tensor] | None = None

    def begin_weight_update(self, version: int, prove: bool = True) -> None:
        if self._version is not None:
            self._before = {name: parameter.clone() for name, parameter in self._parameters.items()}
        super().begin_weight_update(version, prove)

    def collect(self, wait_s: float) -> list[GenerateResult]:
        if self._before is None:  # there are no previous weights yet
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
