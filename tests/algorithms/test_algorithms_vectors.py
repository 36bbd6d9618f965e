"""Worked numbers (algorithm_vectors.json; computed in float64 by code of their own) against our functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_stare.algorithms.advantage import group_advantages
from megatron_stare.algorithms.aggregate import coefficients
from megatron_stare.algorithms.stare import Stare
from megatron_stare.algorithms.surrogate import clipped_surrogate
from megatron_stare.batch import TokenBatch
from megatron_stare.ops.statistics import gather_statistics
from megatron_stare.statistics import Statistics, Threshold, top_k_count

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "algorithm_vectors.json").read_text())


def close(got: Tensor, want: Any) -> None:
    want = torch.as_tensor(want, dtype=torch.float64)
    assert bool(((got.double() - want).abs() <= 1e-6 * want.abs().clamp_min(1)).all()), (got, want)


def token_batch(group: dict[str, Any], rows: list[int], old: Any = None) -> tuple[TokenBatch, Tensor]:
    """The valid tokens of these sequences laid end to end, and where they stand in the padded [B, L]."""
    log_prob = torch.tensor(group["log_prob"], dtype=torch.float64)
    mask = torch.tensor(group["response_mask"]).bool()
    keep = torch.zeros_like(mask)
    keep[rows] = mask[rows]
    where = keep.nonzero()
    advantage = torch.tensor(group["advantage_per_sequence"], dtype=torch.float64)
    flat = log_prob[keep]
    batch = TokenBatch(
        log_prob=flat,
        old_log_prob=flat,
        rollout_log_prob=flat,
        entropy=torch.zeros_like(flat),
        advantage=advantage[where[:, 0]],
        mask=torch.ones(len(flat), dtype=torch.bool),
        sequence=where[:, 0],
        position=where[:, 1],
        index=torch.arange(len(flat)),
        num_sequences=len(rows),
        sequence_lengths=mask.sum(1),
    )
    return batch, where


def partition(scope: str, sequences: int) -> list[list[int]]:
    if scope == "global":
        return [list(range(sequences))]
    if scope == "one_sequence_per_micro_batch":
        return [[i] for i in range(sequences)]
    return [[int(i) for i in part.strip("[]").split(",")] for part in scope.removeprefix("micro_batches_").split("_")]


@pytest.mark.parametrize("case", VECTORS["stare_weights"]["cases"], ids=lambda c: f"{c['variant']}-{c['scope']}")
def test_stare_weights(case: dict[str, Any]) -> None:
    group = VECTORS["stare_weights"]
    method = Stare(variant=case["variant"], share=case["ratio"], amplify=case["W"], attenuate=case["M"])
    state = {
        "gate": torch.tensor(float(case["gate"]), dtype=torch.float64),
        "amplify": torch.tensor(case["W"], dtype=torch.float64),
        "attenuate": torch.tensor(case["M"], dtype=torch.float64),
    }
    got = torch.ones(torch.tensor(group["log_prob"]).shape, dtype=torch.float64)
    counts = {"plus": 0, "minus": 0}
    for rows in partition(case["scope"], len(group["advantage_per_sequence"])):
        batch, where = token_batch(group, rows)
        statistics = ask(method, batch)
        got[where[:, 0], where[:, 1]] = method.weights(batch, statistics, state)
        for side in counts:
            threshold = statistics.get(side)
            counts[side] += int(threshold.k) if isinstance(threshold, Threshold) else 0
    close(got, case["weights"])
    assert (counts["plus"], counts["minus"]) == (case["n_Lplus"], case["n_Lminus"])


def ask(method: Stare, batch: TokenBatch) -> Statistics:
    return gather_statistics(lambda known: method.requests(batch, known), None)


@pytest.mark.parametrize("case", VECTORS["stare_topk_count"], ids=str)
def test_top_k_count(case: dict[str, Any]) -> None:
    assert int(top_k_count(torch.tensor(case["n"]), case["ratio"])) == case["k"]


def test_stare_loss() -> None:
    group, inputs = VECTORS["stare_loss"], VECTORS["stare_weights"]
    batch, where = token_batch(inputs, list(range(len(inputs["log_prob"]))))
    old = torch.tensor(group["old_log_prob"], dtype=torch.float64)[where[:, 0], where[:, 1]]
    surrogate = clipped_surrogate(
        batch.log_prob,
        old,
        batch.advantage,
        low=group["clip_low"],
        high=group["clip_high"],
        dual=group["dual_clip_c"],
    )
    want = torch.tensor(group["per_token_loss_before_weight"], dtype=torch.float64)
    close(surrogate.loss, want[where[:, 0], where[:, 1]].tolist())
    # the sentence `uses` of the file: C2, ratio .25, W 1.1, M .9, gate on
    method = Stare(variant="C2", share=0.25, amplify=1.1, attenuate=0.9)
    state = {name: torch.tensor(x, dtype=torch.float64) for name, x in method.initial_state().items()}
    weights = method.weights(batch, ask(method, batch), state)
    scale = coefficients(batch, "token_mean", torch.tensor(len(old)))
    close((scale * weights * surrogate.loss).sum(), group["loss_global_token_mean"])


def test_stare_controller() -> None:
    group = VECTORS["stare_controller_adaptive"]
    method = Stare(
        amplify=group["W0"],
        attenuate=group["M0"],
        entropy_target=group["H_tgt"],
        adaptive=True,
        adapt_rate=group["alpha"],
        amplify_max=group["W_max"],
        attenuate_min=group["M_min"],
    )
    state = {name: torch.tensor(x, dtype=torch.float64) for name, x in method.initial_state().items()}
    for entry in group["trace"]:
        entropy = torch.tensor(float("nan") if entry["H"] is None else entry["H"], dtype=torch.float64)
        state = method.control(state, {"entropy": entropy})
        assert bool(state["gate"]) == entry["gate"]
        close(state["amplify"], entry["W_used"])
        close(state["attenuate"], entry["M_used"])


def test_group_advantages() -> None:
    group = VECTORS["grpo_advantage"]
    rewards = torch.tensor(group["reward"], dtype=torch.float64)
    groups, counted = torch.zeros(len(rewards), dtype=torch.int64), torch.ones(len(rewards), dtype=torch.bool)
    for spread, key in (
        ("sample", "std_ddof1_eps1e6"),
        ("population", "std_population_eps1e6"),
        ("none", "dr_grpo_mean_only"),
    ):
        close(group_advantages(rewards, groups, counted, spread=spread), group[key])


def test_aggregation() -> None:
    group = VECTORS["loss_aggregation"]
    mask = torch.tensor(group["mask"]).bool()
    loss = torch.tensor(group["loss"], dtype=torch.float64)[mask]
    inputs = {"log_prob": group["loss"], "response_mask": group["mask"], "advantage_per_sequence": [0.0] * len(mask)}
    batch, _ = token_batch(inputs, list(range(len(mask))))
    tokens = mask.sum()
    close((coefficients(batch, "token_mean", tokens) * loss).sum(), group["token_mean"])
    close((coefficients(batch, "sequence_mean", tokens) * loss).sum(), group["seq_mean_token_mean"])
