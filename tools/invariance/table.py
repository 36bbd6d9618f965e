"""Every method in every layout, and the largest errors of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rank_processes import rank_processes

from invariance.case import Case
from invariance.compare import RELATIVE, Difference, compare
from invariance.step import NEAR, take
from megatron_stare.algorithms import METHODS

# settings with which a method does something to a batch of two hundred tokens whose mean entropy is
# near 2 nats
SETTINGS: dict[str, dict[str, Any]] = {
    "clip_b": {"mu": 0.5},
    "clip_cov": {"share": 0.05, "cov_low": 0.1, "cov_high": 2.0},
    "clip_v": {"mu": 0.5, "max_share": 0.05},
    "dapo": {"overlong": {"max_length": 24, "cache": 12}},
    "dr_grpo": {"length_norm": 24},
    "entropic": {"probable_above": 0.2},
    "kl_cov": {"share": 0.1},
    "repo_r": {"zeta": 0.2, "zeta_max": 0.4, "entropy_target": 5.0},
    "stapo": {"tau_p": 0.05},
    "stapo_stare": {"variant": "C2", "entropy_target": 5.0, "spurious": {"tau_p": 0.05}},
    "stare": {"variant": "C2", "entropy_target": 5.0, "adaptive": True},
    "stare_predictive": {"entropy_target": 5.0, "amplify": 2.0, "attenuate": 0.5},
}
BESIDES = {
    "stare, gate closed": {"name": "stare", "entropy_target": 0.1},
    **{
        f"stare {variant}": {"name": "stare", "variant": variant, "entropy_target": 5.0}
        for variant in ("O2", "O3", "O4", "C1", "C3", "C4")
    },
    "stare C3, common at the bottom": {
        "name": "stare",
        "variant": "C3",
        "common": "bottom",
        "entropy_target": 5.0,
    },
    "stare C4, rare below a bound": {
        "name": "stare",
        "variant": "C4",
        "rare_below": 0.1,
        "entropy_target": 5.0,
    },
    "stare C2, gate by sample": {
        "name": "stare",
        "variant": "C2",
        "gate": "sample",
        "entropy_target": 2.0,
    },
    "stare C1, gate by token": {
        "name": "stare",
        "variant": "C1",
        "gate": "token",
        "entropy_target": 2.0,
    },
    "steer, exponential": {"name": "steer", "map": "exponential"},
    "twenty_entropy by quantile": {"name": "twenty_entropy", "rule": "quantile"},
    "twenty_entropy of all tokens": {"name": "twenty_entropy", "candidates": "all"},
    "grpo with correction and entropy bonus": {
        "name": "grpo",
        "correction": {
            "mode": "mask",
            "level": "sequence",
            "low": 0.001,
            "high": 1000.0,
            "normalise": True,
        },
        "entropy_bonus": {"coef": 0.001, "target": 5.0},
    },
}
ALGORITHMS = {name: {"name": name, **SETTINGS.get(name, {})} for name in METHODS} | BESIDES

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor": 2},
    "tp4": {"tensor": 4},
    "tp2 sp": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
    "pp2 vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "dp2": {"data": 2},
    "dp4": {"data": 4},
    "tp2 pp2": {"tensor": 2, "pipeline": 2},
    "tp2 dp2": {"tensor": 2, "data": 2},
    "pp2 dp2": {"pipeline": 2, "data": 2},
    "cp2": {"context": 2},
    "cp4": {"context": 4},
    "cp2 tp2": {"context": 2, "tensor": 2},
    "cp2 pp2": {"context": 2, "pipeline": 2},
}
CUTS = ({"budget": 64, "packed": True}, {"budget": 40, "packed": False})
OFF_POLICY = 0.5  # so that clips and ratios have something to do


Rows = dict[str, dict[str, dict[str, Any]]]  # method -> layout -> errors


def table(
    folder: str, layouts: Sequence[str] = tuple(LAYOUTS), methods: Sequence[str] = tuple(ALGORITHMS)
) -> tuple[Rows, list[str]]:
    """By method and layout the largest errors over the cuts into micro-batches; and what failed.

    Args:
        folder: of the model.
        layouts, methods: names of those that are checked.
    """
    rows: Rows = {}
    faults: list[str] = []
    with rank_processes(4) as pool:
        for name, algorithm in ((name, ALGORITHMS[name]) for name in methods):
            one = Case(algorithm, off_policy=OFF_POLICY)
            wholes = [take(pool, replace(one, packed=cut["packed"]), folder, None) for cut in CUTS]
            rows[name] = {}
            for layout in layouts:
                parallel, found = LAYOUTS[layout], []
                for cut, whole in zip(CUTS, wholes, strict=True):
                    case = replace(one, parallel=parallel, **cut)
                    found.append(compare(whole, take(pool, case, folder, whole["scores"])))
                    faults += [f"{name}, {layout}, {cut}: {fault}" for fault in found[-1].faults]
                rows[name][layout] = row(found)
                print(f"{name:40} {layout:10} {rows[name][layout]}", flush=True)
    return rows, faults


def row(found: list[Difference]) -> dict[str, Any]:
    """One entry of the table."""
    keys = {key for each in found for key in each.largest}
    worst = {key: max(each.largest.get(key, 0.0) for each in found) for key in sorted(keys)}
    return {
        **{key: float(f"{value:.1e}") for key, value in worst.items()},
        "selected": max(each.selected for each in found),
        "excused": sum(len(each.excused) for each in found),
        "faults": sum(len(each.faults) for each in found),
    }


def write(rows: Rows, out: Path) -> None:
    """The table as JSON, a line for every method and layout."""
    head = {
        "what": (
            "one training step in the layout against the same step on one rank, both in float32 on"
            " CPU: largest differences over the cuts, relative, those of weights to what the step"
            " moves them; tokens in all selections; tokens selected otherwise because they lie near"
            " a threshold (excused)"
        ),
        "limits": {"relative": RELATIVE, "near a threshold": NEAR},
        "micro-batches": CUTS,
        "spread of ln(p / p_old)": OFF_POLICY,
        "learning rate": Case.lr,
        "settings": {name: settings for name, settings in ALGORITHMS.items() if name in rows},
        "layouts": {
            name: parallel
            for name, parallel in LAYOUTS.items()
            if any(name in row for row in rows.values())
        },
    }
    methods = (
        f"  {json.dumps(name)}: {{\n"
        + ",\n".join(
            f"   {json.dumps(layout)}: {json.dumps(entry)}" for layout, entry in layouts.items()
        )
        + "\n  }"
        for name, layouts in rows.items()
    )
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    body = ",\n".join([*lines, ' "methods": {\n' + ",\n".join(methods) + "\n }"])
    out.write_text("{\n" + body + "\n}\n")
