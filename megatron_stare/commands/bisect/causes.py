"""What may make a run's record other than its configuration says, one change of the run each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_stare.algorithms.method import Method
from megatron_stare.algorithms.stare import Stare
from megatron_stare.commands.bisect.changed_parts import (
    LateEngine,
    closed_gate,
    draws,
    draws_by_place,
    has_correction,
    has_gate,
    open_gate,
    without_correction,
)
from megatron_stare.config.engines_alone import OF_SERVERS
from megatron_stare.config.schema import Config
from megatron_stare.rollout.engines.engine import Engine
from megatron_stare.rollout.engines.local import LocalEngine
from megatron_stare.rollout.engines.replicas import resolve_engine

UNCHANGED = "unchanged"
CAUSES = ("gate", "correction", "staleness", "layout", "engine")


@dataclass(frozen=True)
class Change:
    """One way in which a cause may differ.

    name: of the change, and of the folder of its run.
    settings: by dotted key, that the re-run has in place of the run's.
    method: what becomes of the method, once the configuration is checked.
    harmless: the change may not move a sound run by more than rounding, in the first step that it is made in.
    """

    name: str
    cause: str
    says: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    method: Callable[[Method], Method] | None = None
    harmless: bool = False


@dataclass(frozen=True)
class LeftOut:
    """A cause that this run cannot have, and why."""

    cause: str
    why: str


def changes(config: Config, method: Method) -> tuple[list[Change], list[LeftOut]]:
    """Those that a run of this configuration and method allows, and the causes of which there is none."""
    kind = resolve_engine(config.rollout.engine)
    found = [*_gate(method), *_correction(method), *_staleness(config, kind), *_layout(config, method)]
    found += _engine(config, kind)
    why = {
        "gate": "the method has no gate",
        "correction": "the method corrects nothing (algorithm.correction)",
        "staleness": "only the engine in process can be held back, and nothing is sampled ahead (rollout.staleness)",
        "layout": "it has one data rank, micro-batches as small as they can be, and a method that draws nothing",
        "engine": "there is no other engine that this one can be held against",
    }
    named = {change.cause for change in found}
    return found, [LeftOut(cause, why[cause]) for cause in CAUSES if cause not in named]


def contradictions(config: Config, method: Method, record: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """What the record itself says against the configuration, by cause: a fault that is still there when the steps are
    made again is not seen by comparing them.

    Args:
        record: metrics by step.
    """
    read = isinstance(method, Stare) and method.gate == "batch" and method.gate_entropy == "response"
    if not (read and has_gate(method)) or config.skips_log_prob_pass:
        return {}
    for row in record:
        entropy, target, gate = (row.get(name, math.nan) for name in ("entropy/mean", "entropy/target", "stare/gate"))
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
    return [Change("correction-off", "correction", "nothing corrects the loss", method=without_correction)]


def _staleness(config: Config, kind: type) -> list[Change]:
    found = []
    if kind is LocalEngine:
        late = f"{LateEngine.__module__}.{LateEngine.__name__}"
        says = "the engine samples with weights one update older than it says"
        found.append(Change("weights-late", "staleness", says, {"rollout.engine": late}))
    if config.rollout.staleness:
        found.append(Change("weights-fresh", "staleness", "nothing is sampled ahead", {"rollout.staleness": 0}))
    return found


def _layout(config: Config, method: Method) -> list[Change]:
    found = []
    if draws(method):
        says = "a token's draw belongs to its place on a rank"
        found.append(Change("draws-by-place", "layout", says, method=draws_by_place))
    half = max(config.batch.micro_batch_tokens // 2, config.rollout.max_prompt_tokens + config.rollout.max_new_tokens)
    if half < config.batch.micro_batch_tokens:
        settings: dict[str, Any] = {"batch.micro_batch_tokens": half}
        found.append(Change("micro-batches", "layout", f"micro-batches of {half} tokens", settings, harmless=True))
    ranks = config.parallel.data
    if ranks > 1:
        fewer = max(n for n in range(1, ranks) if ranks % n == 0)
        settings = {"parallel.data": fewer}
        if config.parallel.world_size == ranks and fewer == 1:
            settings["runtime.runner"] = "inline"
        found.append(Change("data-ranks", "layout", f"{fewer} data ranks, not {ranks}", settings, harmless=True))
    return found


def _engine(config: Config, kind: type) -> list[Change]:
    if not issubclass(kind, Engine):
        settings = {"rollout.engine": "local", **dict.fromkeys(OF_SERVERS)}
        return [Change("engine-local", "engine", "the engine in process in the place of servers", settings)]
    if kind is not LocalEngine:
        settings = {"rollout.engine": "local"}
        return [Change("engine-local", "engine", "the engine in process in the place of your own", settings)]
    responses = config.batch.prompts * config.batch.samples_per_prompt
    fewer = min(config.rollout.max_batch, responses) // 2
    if not fewer:
        return []
    return [Change("engine-batch", "engine", f"it decodes {fewer} responses at a time", {"rollout.max_batch": fewer})]
