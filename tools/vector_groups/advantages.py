"""The groups of rewards and advantages: GTPO and GRPO-S, GRPO, length penalties, the filter of
prompt groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_stare.algorithms.advantage import group_advantages
from megatron_stare.algorithms.grpo_s import GrpoS
from megatron_stare.algorithms.gtpo import Gtpo
from megatron_stare.algorithms.shaping import LengthPenalty, Overlong, informative_groups
from megatron_stare.ops.statistics_executor import answer
from megatron_stare.records.batch_statistics import Mean, SegmentSum, scalar, tensor
from vector_groups.fields import Fields, other
from vector_groups.tokens import Padded, aggregate, ask, by_sequence, pad


def gtpo_tokens(group: Fields) -> Padded:
    lengths, entropy = group.tensor("lengths"), group.tensor("entropy")
    mask = torch.arange(entropy.shape[1]) < lengths[:, None]
    return pad(mask, entropy=entropy, rewards=group.tensor("reward"))


def gtpo(group: Fields, file: Any) -> None:
    padded = gtpo_tokens(group)
    batch = padded.batch
    joint = Gtpo(alpha1=group["alpha1"], alpha2=group["alpha2"], eps=0.0)
    separate = replace(joint, normalise="separate")
    group.expect("shaped_no_clip", padded.spread(joint.shaped(batch, ask(joint, batch))))
    for key, (low, high) in group.keys(r"shaped_entropy_clipped_(\d+p\d+)_(\d+p\d+)"):
        clamped = replace(joint, entropy_clamp=(low, high))
        group.expect(key, padded.spread(clamped.shaped(batch, ask(clamped, batch))))
    advantage = joint.normalised(batch, ask(joint, batch))
    group.expect("advantage_joint_all_tokens_population_std", padded.spread(advantage))
    advantage = separate.normalised(batch, ask(separate, batch))
    group.expect("advantage_eq6_separate_population_std", padded.spread(advantage))
    correct = group.mask("reward")[batch.sequence]
    means = answer({"correct": Mean(advantage, correct), "wrong": Mean(advantage, ~correct)}, None)
    group.expect("mean_adv_on_correct_tokens_separate", scalar(means, "correct"))
    group.expect("mean_adv_on_wrong_tokens_separate", scalar(means, "wrong"))
    for key, (alpha1, alpha2) in group.keys(
        r"conservation_sum_pos_per_t_alpha_(\d+p\d+)_(\d+p\d+)"
    ):
        other_alphas = replace(joint, alpha1=alpha1, alpha2=alpha2)
        shaped = other_alphas.shaped(batch, ask(other_alphas, batch))
        request = SegmentSum(shaped, batch.position, batch.max_length, correct)
        group.expect(key, tensor(answer({"sum": request}, None), "sum"))


def grpo_s(group: Fields, file: Any) -> None:
    padded = gtpo_tokens(other(file, "gtpo"))
    low, high = group["clip"]
    method = GrpoS(
        beta1=group["beta1"], beta2=group["beta2"], clip_low=low, clip_high=high, eps=0.0
    )
    log_ratio = group.tensor("token_ratio")[padded.mask].log()
    batch = replace(padded.batch, log_prob=log_ratio, old_log_prob=torch.zeros_like(log_ratio))
    statistics = ask(method, batch)
    advantage = method.normalised(batch, statistics)
    entropy = tensor(statistics, "grpo_s/entropy") / tensor(statistics, "grpo_s/length")
    group.expect("seq_entropy", entropy)
    group.expect("shaped", method.shaped(batch, statistics)[0])
    group.expect("advantage_over_group_population_std", advantage)
    group.expect("seq_ratio_arithmetic_mean", by_sequence(method.response_ratio(batch), batch))
    loss = method.surrogate(batch, advantage[batch.sequence]).loss
    group.expect("objective", -aggregate(batch, loss, "sequence_mean"))


def grop(rows: list[Fields], file: Any) -> None:
    for row in rows:
        lengths, correct = row.tensor("lengths"), row.mask("correct")
        groups, counted = (
            torch.zeros(len(lengths), dtype=torch.int64),
            torch.ones(len(lengths), dtype=torch.bool),
        )
        penalty = LengthPenalty(easy_from=row["gamma1"])
        row.expect("penalty", penalty.penalty(lengths, correct, groups, counted))
        row.expect(
            "regime", ("hard", "medium", "easy")[int(penalty.regimes(correct, groups, counted)[0])]
        )


def grpo_advantage(group: Fields, file: Any) -> None:
    rewards = group.tensor("reward")
    groups, counted = (
        torch.zeros(len(rewards), dtype=torch.int64),
        torch.ones(len(rewards), dtype=torch.bool),
    )
    group.expect(
        "std_ddof1_eps1e6", group_advantages(rewards, groups, counted, spread="sample", eps=1e-6)
    )
    group.expect(
        "std_population_eps1e6",
        group_advantages(rewards, groups, counted, spread="population", eps=1e-6),
    )
    group.expect("dr_grpo_mean_only", group_advantages(rewards, groups, counted, spread="none"))


def dapo_overlong(rows: list[Fields], file: Any) -> None:
    for row in rows:
        overlong = Overlong(max_length=row["L_max"], cache=row["L_cache"], factor=row["factor"])
        row.expect("penalty", overlong.penalty(torch.tensor([row["length"]]))[0])


def dapo_group_filter(rows: list[Fields], file: Any) -> None:
    for row in rows:
        values = row.tensor("acc")
        counted = torch.ones(len(values), dtype=torch.bool)
        row.expect(
            "keep",
            informative_groups(values, torch.zeros(len(values), dtype=torch.int64), counted)[0],
        )
