"""Defines the command `megatron-stare suggest`, which suggests STARE's entropy target and token
weights from the first steps of a run."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from megatron_stare.errors import UserError
from megatron_stare.planning.suggestion import Facts, Suggestion, suggest
from megatron_stare.run_dir.run_files import METRICS_FILE, read_metrics

STEPS, ENDS = 50, 5
PLAIN, ENTROPY, TOKENS = "forecast/plain_change", "entropy/mean", "loss/tokens"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `suggest`."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        metavar="N",
        help=f"read the first N steps; default {STEPS}",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run_suggest(args: argparse.Namespace) -> None:
    """Prints the suggestion. Raises UserError if the run has too few steps or no entropy
    forecast."""
    if args.steps < 2 * ENDS:
        raise UserError(
            f"{args.steps} steps are too few: give at least {2 * ENDS}", where="--steps"
        )
    file = args.run_dir / METRICS_FILE
    if not file.is_file():
        raise UserError("there is no such file, so this is not a run directory", where=str(file))
    rows = read_metrics(file)[: args.steps]
    facts = facts_of(rows, str(file))
    found = suggest(facts)
    if args.json:
        print(json.dumps({"steps": len(rows), "facts": vars(facts), "suggested": vars(found)}))
    else:
        print(as_text(facts, found, len(rows)))


def facts_of(rows: Sequence[Mapping[str, float]], where: str) -> Facts:
    """Computes, from the metrics of a run's steps, the mean values that the suggestion needs.

    In a run of STARE, L+ and L- are the sets of tokens that STARE selected. In a run of any method
    other than STARE, L+ contains the rare tokens with positive advantage, and L- contains the rare
    tokens with negative advantage. In these runs, a token is rare if its surprisal is above the
    critical surprisal.

    Raises:
        UserError: there are too few steps, or the steps have no forecast.
    """
    if len(rows) < 2 * ENDS:
        raise UserError(
            f"{len(rows)} steps are too few: at least {2 * ENDS} are needed", where=where
        )
    plain = _finite(rows, PLAIN)
    if not plain:
        raise UserError(
            f"the steps have no {PLAIN}",
            where=where,
            fix="set observability.entropy_forecast=true, and not statistics.gate=lagged",
        )
    entropy = _finite(rows, ENTROPY)
    return Facts(
        entropy=fmean(entropy[:ENDS]),
        entropy_now=fmean(entropy[-ENDS:]),
        plain=fmean(plain),
        plus=_gain(rows, "plus"),
        minus=_gain(rows, "minus"),
    )


def as_text(facts: Facts, found: Suggestion, steps: int) -> str:
    """Returns the suggestion as lines for the terminal, first the settings and then the reasons."""
    lines = [
        f"steps 1 to {steps}: entropy went from {facts.entropy:.3g} to {facts.entropy_now:.3g}"
        f" nats; forecast without reweighting {facts.plain:+.2g} nats a unit step",
        "",
        "algorithm:",
        "  name: stare",
        "  variant: C2",
        f"  entropy_target: {found.entropy_target:.3g}",
        f"  amplify: {found.amplify:.2f}",
        f"  attenuate: {found.attenuate:.2f}",
        "",
    ]
    return "\n".join([*lines, *(f"- {reason}" for reason in found.reasons)])


def _finite(rows: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]


def _gain(rows: Sequence[Mapping[str, float]], side: str) -> float:
    """Returns the mean of G+ over the training steps if `side` is "plus", and the mean of G- if
    `side` is "minus". G+ and G-, which planning/suggestion.py defines, are in nats per unit step in
    the logits."""
    selected = [
        -row[f"forecast/a_phi_{side}"] / row[TOKENS]
        for row in rows
        if math.isfinite(row.get(f"forecast/a_phi_{side}", math.nan)) and row.get(TOKENS, 0) > 0
    ]
    return fmean(selected or _finite(rows, f"forecast/mass_rare_{side}") or [0.0])
