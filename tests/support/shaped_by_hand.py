"""Shapes rewards by the papers' formulas, in float64 and prompt group by prompt group; see
losses_by_hand.py.

Shape legend: B samples, M response positions of a rollout batch in canonical order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_stare.records.rollout_batch import RolloutBatch

SPREAD = {"dr_grpo": "none"}  # of the centred rewards, as published; elsewhere 'sample'
EPS = 1e-8


def penalties(settings: Mapping[str, Any], batch: RolloutBatch) -> Tensor:
    """[B] DAPO's soft overlong punishment, or GROP's."""
    if "length_penalty" in settings:
        return grop(settings, batch)
    if (rule := settings.get("overlong")) is None:
        return torch.zeros(batch.size, dtype=torch.float64)
    over = batch.response_lengths.double() - (rule["max_length"] - rule["cache"])
    return -(over / rule["cache"] * rule.get("factor", 1.0)).clamp(min=0)


def grop(settings: Mapping[str, Any], batch: RolloutBatch) -> Tensor:
    """[B] Group Relative Overlong Punishment (arXiv 2508.04349, appendix D)."""
    easy_from = settings["length_penalty"]["easy_from"]
    found = torch.zeros(batch.size, dtype=torch.float64)
    for group in range(int(batch.groups.max()) + 1):
        members = [
            i
            for i in range(batch.size)
            if int(batch.groups[i]) == group and judged(settings, batch)[i]
        ]
        right = [i for i in members if float(batch.rewards[i]) >= 0.5]
        easy, hard = (
            len(right) >= easy_from * len(members),
            len(right) <= (1 - easy_from) * len(members),
        )
        if not members or (not easy and (hard or 2 * len(right) <= len(members))):
            continue
        lengths = [int(batch.response_lengths[i]) for i in (right if easy else members)]
        limit = max((min(lengths) + max(lengths)) / 2, sum(lengths) / len(lengths))
        for i in right:
            found[i] = -0.5 * min(max(float(batch.response_lengths[i]) - limit, 0.0) / limit, 1.0)
    return found


def judged(settings: Mapping[str, Any], batch: RolloutBatch) -> Tensor:
    """[B] bool: the responses that the others of their prompt are measured against."""
    return (
        batch.verified & ~batch.truncated if settings.get("truncated") == "drop" else batch.verified
    )


def advantages(settings: Mapping[str, Any], batch: RolloutBatch) -> Tensor:
    """[B] (r - mean) / (std + 1e-6) over the scored responses of a prompt."""
    rewards = batch.rewards + penalties(settings, batch)
    found = torch.zeros(batch.size, dtype=torch.float64)
    spread = settings.get("advantage_spread", SPREAD.get(settings["name"], "sample"))
    for group in range(int(batch.groups.max()) + 1):
        rows = judged(settings, batch) & (batch.groups == group)
        here = rewards[rows]
        if len(here) == 1:
            found[rows] = here if spread == "none" else here / (1 + 1e-6)
        elif len(here.unique()) > 1:
            centred = here - here.mean()
            std = {
                "sample": here.std(),
                "population": here.std(correction=0),
                "none": torch.tensor(1 - 1e-6),
            }[spread]
            found[rows] = centred / (std + 1e-6)
    return found


def right_and_wrong(
    batch: RolloutBatch, counted: Tensor, sequence: Tensor
) -> list[tuple[list[int], list[int]]]:
    """By prompt, the correct and the wrong responses with a token that counts."""
    present = [bool(counted[sequence == i].any()) for i in range(batch.size)]
    found = []
    for group in range(int(batch.groups.max()) + 1):
        members = [i for i in range(batch.size) if int(batch.groups[i]) == group and present[i]]
        correct = [i for i in members if float(batch.rewards[i]) >= 0.5]
        found.append((correct, [i for i in members if i not in correct]))
    return found


def gtpo(
    settings: Mapping[str, Any],
    batch: RolloutBatch,
    entropy: Tensor,
    kept: Tensor,
    sequence: Tensor,
    penalty: Tensor,
) -> Tensor:
    """[M] token advantages of GTPO, eqs. 3 to 6; 0 on prompts that are always or never solved."""
    alpha1, alpha2 = settings.get("alpha1", 1.0), settings.get("alpha2", 0.1)
    if "entropy_clamp" in settings:
        entropy = entropy.clamp(*settings["entropy_clamp"])
    starts = batch.response_lengths.cumsum(0) - batch.response_lengths
    position = torch.arange(len(sequence)) - starts[sequence]
    prompts = right_and_wrong(batch, kept, sequence)
    whole = settings.get("scope", "group") == "batch"
    everyone = (
        [i for right, _ in prompts for i in right],
        [i for _, wrong in prompts for i in wrong],
    )
    found = torch.zeros(len(sequence), dtype=torch.float64)
    for right, wrong in [everyone] if whole else prompts:
        shaped = torch.zeros_like(found)
        sides = [
            kept & torch.isin(sequence, torch.tensor(side, dtype=torch.int64))
            for side in (right, wrong)
        ]
        for sign, side in ((1, sides[0]), (-1, sides[1])):
            for t in position[side].unique().tolist():
                at = side & (position == t)
                x = entropy[at] + EPS if sign > 0 else 1 / (entropy[at] + EPS)
                shaped[at] = (
                    sign * (alpha1 + alpha2 * len(x) * (x / x.sum())) + penalty[sequence[at]]
                )
        together = [sides[0] | sides[1]] if settings.get("normalise", "joint") == "joint" else sides
        for rows in together:
            if bool(rows.any()):
                values = shaped[rows]
                spread = values.std(correction=0)
                if spread > 1e-6 * (alpha1 + alpha2):  # else rounding, which is not divided by
                    found[rows] = (values - values.mean()) / (spread + EPS)
    for right, wrong in prompts:
        if not (right and wrong):
            found[torch.isin(sequence, torch.tensor(right + wrong, dtype=torch.int64))] = 0.0
    return found


def grpo_s(
    settings: Mapping[str, Any],
    batch: RolloutBatch,
    entropy: Tensor,
    kept: Tensor,
    sequence: Tensor,
) -> Tensor:
    """[M] advantages of GRPO-S, eqs. 8 to 10, the same for all tokens of a response."""
    beta1, beta2 = settings.get("beta1", 1.0), settings.get("beta2", 0.1)
    penalty = penalties(settings, batch)
    found = torch.zeros(batch.size, dtype=torch.float64)
    for right, wrong in right_and_wrong(batch, kept, sequence):
        if not (right and wrong):
            continue
        mean = {i: float(entropy[kept & (sequence == i)].mean()) for i in right + wrong}
        total = sum(mean[i] for i in right) + EPS
        inverse = sum(1 / (mean[i] + EPS) for i in wrong) + EPS
        reward = {i: beta1 + beta2 * len(right) * mean[i] / total for i in right}
        reward |= {i: -beta1 - beta2 * len(wrong) / (mean[i] + EPS) / inverse for i in wrong}
        values = torch.tensor(
            [reward[i] + float(penalty[i]) for i in right + wrong], dtype=torch.float64
        )
        found[right + wrong] = (values - values.mean()) / (values.std(correction=0) + EPS)
    return found[sequence]
