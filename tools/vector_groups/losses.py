"""The groups of losses: aggregation, GSPO, CISPO, the adaptive entropy bonus, importance
correction."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_stare.algorithms.cispo import Cispo
from megatron_stare.algorithms.correction import Correction
from megatron_stare.algorithms.entropy_bonus import USED, EntropyBonus
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.gspo import Gspo
from megatron_stare.algorithms.surrogate import bounded_ratio, ratio
from megatron_stare.ops.statistics_executor import answer
from vector_groups.fields import NUMBER, CannotEvaluateError, Fields, other
from vector_groups.tokens import (
    Padded,
    aggregate,
    ask,
    by_sequence,
    first_and_rest,
    initial,
    pad,
    total,
)


def loss_aggregation(group: Fields, file: Any) -> None:
    mask, values = group.mask("mask"), group.tensor("loss")
    batch, loss = pad(mask).batch, values[mask]
    group.expect("token_mean", aggregate(batch, loss, "token_mean"))
    group.expect("seq_mean_token_mean", aggregate(batch, loss, "sequence_mean"))
    group.expect("seq_mean_token_sum", aggregate(batch, loss, "sequence_sum"))
    for pattern, how in (
        (r"dr_grpo_Lmax(\d+)", "dr_grpo"),
        (r"verl_seq_mean_token_sum_norm_L(\d+)", "dr_grpo_verl"),
    ):
        for key, (length,) in group.keys(pattern):
            group.expect(key, aggregate(batch, loss, how, int(length)))
    for key, _ in group.keys(r"verl_legacy_token_mean_microbatches_\d+_\d+"):
        parts = (pad(mask, rows) for rows in first_and_rest(mask))
        group.expect(
            key, sum(aggregate(part.batch, values[part.mask], "micro_batch_mean") for part in parts)
        )


def gspo_tokens(group: Fields) -> Padded:
    names = ("log_prob", "old_log_prob", "advantage")
    return pad(group.mask("mask"), **{name: group.tensor(name) for name in names})


def gspo(group: Fields, file: Any) -> None:
    batch = gspo_tokens(group).batch
    method = Gspo(clip_low=group["clip_low"], clip_high=group["clip_high"])
    group.expect("seq_ratio", by_sequence(method.ratio(batch), batch))
    group.expect("loss", total(method, batch))


def cispo(group: Fields, file: Any) -> None:
    group.read |= {"inputs", "eps_low"}  # remarks
    padded = gspo_tokens(other(file, "gspo"))
    batch = padded.batch
    method = Cispo(clip_high=group["eps_high"])
    group.expect("ratio", padded.spread(ratio(batch.log_prob, batch.old_log_prob)))
    weight = bounded_ratio(
        batch.log_prob, batch.old_log_prob, low=method.clip_low, high=method.clip_high
    )
    group.expect("weight", padded.spread(weight))
    group.expect("loss_token_mean", total(method, batch))


def adaptive_entropy_skywork(group: Fields, file: Any) -> None:
    bonus = EntropyBonus(
        coef=group["init"],
        target=group["target"],
        delta=group["delta"],
        coef_min=group["min"],
        coef_max=group["max"],
    )
    state = initial(bonus)
    for entry in group.items("trace"):
        entropy = torch.tensor([entry["step_entropy"]], dtype=torch.float64)
        tokens = pad(torch.ones(1, 1, dtype=torch.bool), entropy=entropy[None])
        state = bonus.control(state, answer(bonus.requests(tokens.batch), None))
        entry.expect("coef_used_this_step", state[USED])


def correction_named(case: str, low: float, high: float) -> Correction:
    """The settings that a case's name stands for; numbers in the name are its constants."""
    if hit := re.fullmatch(r"(token|sequence|geometric)_(truncate|clip|mask)", case):
        return Correction(level=hit[1], mode=hit[2], low=low, high=high)  # type: ignore[arg-type]
    plain = Correction(level="token", mode="truncate", low=low, high=high)
    if case == "token_truncate_batchnorm":
        return replace(plain, normalise=True)
    if hit := re.fullmatch(rf"token_truncate_rs_token_({NUMBER})_({NUMBER})", case):
        return replace(plain, reject=(float(hit[1]), float(hit[2])))
    if hit := re.fullmatch(rf"token_truncate_veto_({NUMBER})", case):
        return replace(plain, veto=float(hit[1]))
    if hit := re.fullmatch(rf"slime_vanilla_clip_({NUMBER})_({NUMBER})", case):
        return Correction(level="token", mode="clip", low=float(hit[1]), high=float(hit[2]))
    if hit := re.fullmatch(
        rf"(?:icepop|verl_decoupled_token_icepop_default)_({NUMBER})_({NUMBER})", case
    ):
        return Correction(level="token", mode="icepop", low=float(hit[1]), high=float(hit[2]))
    raise CannotEvaluateError(f"no such correction: {case}")


def tis_mis(group: Fields, file: Any) -> None:
    train, rollout = group["train_log_prob"], group["rollout_log_prob"]
    lengths = [len(row) for row in train]
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]

    def padded_rows(rows: list[list[float]]) -> Tensor:
        return torch.tensor(
            [[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64
        )

    def ragged(x: Tensor) -> list[list[float]]:
        return [part.tolist() for part in x.to(torch.float64).split(lengths)]

    batch = pad(mask, log_prob=padded_rows(train), rollout_log_prob=padded_rows(rollout)).batch
    group.expect("raw_ratio", ragged(ratio(batch.old_log_prob, batch.rollout_log_prob)))
    cases = group.below("cases")
    for name in cases.values:
        case = cases.below(name)
        method = Grpo(aggregation="token_mean", correction=correction_named(name, *group["bounds"]))
        assert method.correction is not None
        statistics = ask(method, batch)
        case.expect("weights", ragged(method.correction.weights(batch, statistics)))
        if "loss_mask" in case.values:
            case.expect("loss_mask", ragged(method.narrowed(batch, statistics).kept.loss_mask))
