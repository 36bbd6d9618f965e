"""The groups of methods that select tokens: STAPO, Clip-Cov and KL-Cov, 20-Entropy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_stare.algorithms.clip_cov import ClipCov
from megatron_stare.algorithms.covariance import budget, covariance
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.kl_cov import KlCov
from megatron_stare.algorithms.stapo import SpuriousTokens
from megatron_stare.algorithms.twenty_entropy import TwentyEntropy
from megatron_stare.ops.statistics_executor import answer
from megatron_stare.records.batch_statistics import scalar, threshold
from vector_groups.fields import Fields
from vector_groups.tokens import aggregate, ask, pad, total


def stapo(group: Fields, file: Any) -> None:
    padded = pad(
        group.mask("response_mask"),
        entropy=group.tensor("entropy"),
        advantage=group.tensor("advantage"),
    )
    batch, prob = padded.batch, group.tensor("prob")[padded.mask]

    def run(settings: SpuriousTokens) -> tuple[Tensor, Tensor, Tensor]:
        candidates = settings.candidates(prob, batch.advantage, batch.loss_mask)
        tau_h = scalar(
            answer({"tau": settings.threshold(batch.entropy, candidates, batch.loss_mask)}, None),
            "tau",
        )
        return (
            candidates,
            tau_h,
            batch.loss_mask & settings.spared(batch.entropy, candidates, tau_h),
        )

    v4 = group.below("v4")
    for name in v4.values:
        if name not in ("linear", "lower", "higher"):
            continue  # reported as a field that is not read
        case = v4.below(name)
        settings = SpuriousTokens(tau_p=group["tau_p"], quantile=group["v4_q"], interpolation=name)
        candidates, tau_h, keep = run(settings)
        case.expect("tau_h", tau_h)
        case.expect("keep_mask", padded.spread(keep))
        group.expect("v4_candidate_set", padded.spread(candidates))
    for key, (percent,) in group.keys(r"v1_q(\d+)_over_all_valid"):
        case = group.below(key)
        _, tau_h, keep = run(
            SpuriousTokens(tau_p=group["tau_p"], version="v1", quantile=percent / 100)
        )
        case.expect("tau_h", tau_h)
        case.expect("keep_mask", padded.spread(keep))
    _, _, keep = run(SpuriousTokens(tau_p=group["tau_p"], quantile=group["v4_q"]))
    loss = torch.where(keep, Grpo().surrogate(batch, batch.advantage).loss, 0.0)
    kept = replace(batch, loss_mask=keep)
    group.expect("loss_ratio1_v4_linear_renormalised", aggregate(kept, loss, "token_mean"))
    group.expect("loss_ratio1_not_renormalised", aggregate(batch, loss, "token_mean"))


def cov_selection(group: Fields, file: Any) -> None:
    names = ("advantage", "log_prob", "old_log_prob")
    padded = pad(group.mask("mask"), **{name: group.tensor(name) for name in names})
    batch = padded.batch
    held = KlCov(share=group["kl_cov_ratio"], coef=group["kl_cov_coef"])
    statistics = ask(held, batch)
    group.expect("mean_advantage", scalar(statistics, "cov/advantage"))
    group.expect("mean_log_prob", scalar(statistics, "cov/log_prob"))
    group.expect("covariance", padded.spread(covariance(batch, statistics)))
    group.expect("kl_cov_k", threshold(statistics, "held").k)
    group.expect("kl_cov_selected", padded.spread(held.held(batch, statistics)))
    group.expect("kl_cov_loss_token_mean", total(held, batch))
    clipping = ClipCov(cov_low=group["clip_cov_lb"], cov_high=group["clip_cov_ub"])
    group.expect("clip_cov_candidates", padded.spread(clipping.candidates(batch, statistics)))
    for key, (share,) in group.keys(r"clip_cov_budget_ratio_(\d+p\d+)"):
        group.expect(key, budget(statistics, share))


def twenty_entropy(group: Fields, file: Any) -> None:
    mask = group.mask("mask")
    # an advantage: tokens without one are no candidates
    ones = torch.ones(mask.shape, dtype=torch.float64)
    padded = pad(mask, entropy=group.tensor("entropy"), advantage=ones)
    batch, loss = padded.batch, group.tensor("per_token_loss")[mask]
    method = TwentyEntropy(share=group["ratio"])
    statistics = ask(method, batch)
    keep = method.narrowed(batch, statistics).kept.loss_mask
    group.expect("k", threshold(statistics, "forks").k)
    group.expect("keep", padded.spread(keep))
    kept_loss = torch.where(keep, loss, 0.0)
    everything = replace(method, denominator="all")
    for key, variant in (
        ("loss_paper_denominator_kept", method),
        ("loss_trl_denominator_all", everything),
    ):
        group.expect(key, (variant.coefficients(batch, ask(variant, batch)) * kept_loss).sum())
    trl = replace(method, rule="quantile")
    group.expect("trl_quantile_threshold_linear", scalar(ask(trl, batch), "forks"))
