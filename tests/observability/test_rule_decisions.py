"""Decisions of the rules over runs of random figures, held to those of the engines that they
replaced."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from random import Random

from megatron_stare.config.fault_sections import GuardsConfig
from megatron_stare.driver.guards import Guards
from megatron_stare.observability.metrics.conditions import Window
from megatron_stare.observability.metrics.rules import Watch

RUNS, STEPS, WINDOW = 60, 60, 5
Row = dict[str, float]

# Of every rule: how often an alert began or a guard fired, and the sum of the steps at which it
# did. Counted by the engines of ba78035; a rule that is meant to change changes its line. Since
# alerts stay active over a resume, six begin 14 times less: at a resume, not anew.
RECORDED = {
    "agreement": (94, 3343),
    "engine and trainer differ": (94, 2854),
    "engine and trainer drift apart": (34, 982),
    "entropy": (1093, 46689),
    "entropy collapse": (26, 1010),
    "entropy off target": (29, 1098),
    "entropy out of bounds": (67, 2016),
    "grad_norm": (75, 2647),
    "gradient spike": (37, 1311),
    "groups without signal": (57, 1845),
    "growth": (1311, 50972),
    "loss": (410, 14074),
    "no finite gradient": (66, 2110),
    "responses cut off": (183, 5933),
    "reward failures": (82, 2877),
    "spike of engine against trainer": (65, 2308),
    "spike of the gradient norm": (65, 2193),
    "spike of the loss": (182, 6207),
}


def course(draw: Random, start: float, steady: float, odd: float) -> Iterator[float]:
    """A figure that wanders, with odd steps far above it or below. Products alone: the same on
    every machine."""
    value = start
    while True:
        value *= 1 + steady * (draw.random() - 0.5)
        yield value * (draw.choice((0.1, 9.9, 10.1, 1000.0)) if draw.random() < odd else 1.0)


def run(draw: Random) -> Iterator[Row]:
    """The metrics of a run's steps: some missing, some no numbers."""
    norm, loss = course(draw, 1.0, 0.3, 0.03), course(draw, 0.02, 0.5, 0.03)
    entropy, mean = course(draw, draw.choice((0.11, 0.3)), 0.2, 0.02), course(draw, 2e-3, 0.3, 0.03)
    fall, drift = draw.choice((1.0, 0.96, 0.98)), draw.choice((1.0, 1.05))
    target, several, lost = draw.random() < 0.5, draw.random() < 0.5, 0.04 * draw.random()
    left = grown = 1.0
    for _ in range(STEPS):
        left, grown = left * fall, grown * drift
        row = {
            "optimizer/grad_norm": next(norm),
            "loss/policy": next(loss) * draw.choice((1, 1, -1)),
            "entropy/mean": next(entropy) * left,
            "agreement/mean": next(mean) * grown,
            "response/truncated": 0.22 * draw.random(),
            "group/degenerate": 0.92 * draw.random(),
            "rollout/logprob_diff_max": 1.05e-3 * draw.random(),
            "reward/crashes": float(draw.random() < 0.03),
            "update/finite": float(draw.random() > 0.03),
        }
        row |= {"optimizer/grad_norm_max": 1.5 * row["optimizer/grad_norm"]} if several else {}
        row |= {"entropy/target": 0.1} if target else {}
        kept = {name: value for name, value in row.items() if draw.random() >= lost}
        yield {
            name: math.nan if draw.random() < lost / 4 else value for name, value in kept.items()
        }


def decided(rows: list[Row], resumed_after: int) -> Iterator[tuple[str, int]]:
    """Rules by name, and the steps at which their alerts begin, their guards fire or the drift
    reaches 1.5."""
    band = {"low": 0.05, "high": 0.4, "action": "stop"}
    spikes = {name: {"spreads": 6.0} for name in ("loss", "grad_norm", "agreement")}
    settings = {"window": 10, "known": 5, "entropy": band, **spikes}
    guards, watch = Guards(GuardsConfig.model_validate(settings), "float32"), Watch()
    means = Window(WINDOW, first=WINDOW)
    guards.restore(rows[:resumed_after])
    watch.restore(rows[:resumed_after])
    for row in rows[:resumed_after]:
        means.add(row.get("agreement/mean", math.nan))
    for step, row in enumerate(rows[resumed_after:], resumed_after + 1):
        means.add(row.get("agreement/mean", math.nan))
        if (growth := means.growth()) is not None:
            row = {**row, "agreement/trend": growth}
            yield from [("growth", step)] if growth > 1.5 else []
        row = row | guards.judge(step, row, [step])
        yield from ((fired.guard, step) for fired in guards.fired)
        yield from ((alert.name, step) for alert in watch.add(step, row) if not alert.over)


def test_what_is_decided_is_what_was_recorded() -> None:
    count, steps = Counter[str](), Counter[str]()
    for seed in range(RUNS):
        draw = Random(seed)
        rows = [{**row, "step": float(step)} for step, row in enumerate(run(draw), 1)]
        for name, step in decided(rows, draw.choice((0, 0, 12, 30))):
            count[name] += 1
            steps[name] += step
    assert {name: (count[name], steps[name]) for name in count} == RECORDED
