"""Computes STARE as in the paper, over a whole batch, in numpy float64. Imports nothing from this
project.

`conformance.py` compares the selector with this reference. The reference sorts values, but the
selector uses histograms. The reference uses plain loops, but the selector uses collectives.
Source: arXiv 2606.19236, sections 3.2 to 3.4 and table 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SETS = {"O1": "L+", "O2": "U+", "O3": "U-", "O4": "L-"}
VARIANTS = {"C1": ("O1", "O3"), "C2": ("O1", "O4"), "C3": ("O2", "O3"), "C4": ("O2", "O4")}
CODES = {"L+": 1, "L-": -1, "U+": 2, "U-": -2}
DEFAULTS: dict[str, Any] = {
    "variant": "O1",
    "share": 0.1,
    "rare_below": None,
    "common": "complement",
    "amplify": 1.1,
    "attenuate": 0.9,
    "entropy_target": 0.3,
    "gate": "batch",
    "gate_entropy": "response",
    "adaptive": False,
    "adapt_rate": 0.01,
    "amplify_max": 1.5,
    "attenuate_min": 0.5,
}


def reference(
    batches: Sequence[Mapping[str, np.ndarray]], settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns one dict for each update: the token sets as codes [B, T] (see CODES; 0 means no set),
    the weights [B, T], and the state of the method after the update.

    Args:
        batches: for each update, `log_probs`, `entropies`, `mask` [B, T] and `advantages` [B] or
            [B, T] of the whole batch, with the rows in order.
        settings: STARE's settings. Settings that are left out have the paper's values.
    """
    chosen = {**DEFAULTS, **settings}
    target = chosen["entropy_target"]
    gate, factors = 1.0, {"amplify": chosen["amplify"], "attenuate": chosen["attenuate"]}
    results = []
    for batch in batches:
        mask = batch["mask"].astype(bool)
        entropy = np.where(mask, batch["entropies"], 0.0).astype(np.float64)
        if target is not None and mask.any():
            mean = math.fsum(entropy[mask]) / int(mask.sum())
            if chosen["gate"] == "batch":
                gate = float(mean < target)
            if chosen["adaptive"]:
                move = chosen["adapt_rate"] * float(np.sign(target - mean))
                up, down = factors["amplify"] + move, factors["attenuate"] - move
                factors["amplify"] = min(max(up, 1.0), chosen["amplify_max"])
                factors["attenuate"] = min(max(down, chosen["attenuate_min"]), 1.0)
        gates = _gates(chosen, gate, entropy, mask)
        codes, weights = np.zeros(mask.shape, np.int8), np.ones(mask.shape)
        for operator in VARIANTS.get(chosen["variant"], (chosen["variant"],)):
            members = _members(SETS[operator], chosen, batch, mask)
            factor = factors["amplify" if operator in ("O1", "O3") else "attenuate"]
            codes[members] = CODES[SETS[operator]]
            weights = np.where(members, 1.0 + gates * (factor - 1.0), weights)
        results.append({"codes": codes, "weights": weights, "gate": gate, **factors})
    return results


def _gates(
    chosen: Mapping[str, Any], gate: float, entropy: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """Returns one number per token [B, T]: 1 if the token's gate is open, and 0 if the gate is
    closed."""
    target = chosen["entropy_target"]
    if chosen["gate"] == "batch" or target is None:
        return np.full(mask.shape, gate)
    if chosen["gate"] == "token":
        return (entropy < target).astype(np.float64)
    means = [row[kept].sum() / max(int(kept.sum()), 1) for row, kept in zip(entropy, mask)]  # noqa: B905
    return np.repeat((np.array(means) < target).astype(np.float64)[:, None], mask.shape[1], axis=1)


def _members(
    of: str, chosen: Mapping[str, Any], batch: Mapping[str, np.ndarray], mask: np.ndarray
) -> np.ndarray:
    """Returns a bool mask [B, T] that is True for the tokens of one set. Tokens of equal surprisal
    are selected in the order of their responses (rows), and within a response in the order of their
    positions.

    Args:
        of: name of the set, such as "L+".
    """
    advantages = batch["advantages"].astype(np.float64)
    if advantages.ndim == 1:
        advantages = np.repeat(advantages[:, None], mask.shape[1], axis=1)
    wanted = mask & ((advantages > 0) if of.endswith("+") else (advantages < 0))
    surprisal = np.maximum(-np.where(mask, batch["log_probs"], 0.0).astype(np.float64), 0.0)
    rare = np.zeros(mask.shape, bool)
    if chosen["rare_below"] is not None:
        rare = wanted & (np.exp(-surprisal) < chosen["rare_below"])
        return rare if of.startswith("L") else wanted & ~rare
    places = [tuple(place) for place in np.argwhere(wanted)]
    n, share = len(places), chosen["share"]
    number = 0 if n == 0 or share <= 0 else min(n, max(1, int(n * share + 0.999999)))
    bottom = of.startswith("U") and chosen["common"] == "bottom"
    ordered = sorted(places, key=lambda at: surprisal[at] if bottom else -surprisal[at])  # stable
    for place in ordered[:number]:
        rare[place] = True
    return rare if bottom or of.startswith("L") else wanted & ~rare
