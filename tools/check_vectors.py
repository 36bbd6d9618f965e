"""Checks this project's maths against a file of worked numbers, with the functions that training uses.

    python tools/check_vectors.py tests/algorithms/algorithm_vectors.json

Every group of the file is evaluated and its largest error printed. A number passes if |got - want| is at most
1e-6 max(1, |want|); everything the file expects must be there, have the same shape, and pass.

Exit status: 0 all passed; 1 a number is off, or a group or a field cannot be evaluated; 2 no such file, or not one of
this shape.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_stare.algorithms.advantage import group_advantages
from megatron_stare.algorithms.aggregate import coefficients
from megatron_stare.algorithms.cispo import Cispo
from megatron_stare.algorithms.clip_cov import ClipCov
from megatron_stare.algorithms.correction import Correction
from megatron_stare.algorithms.covariance import budget, covariance
from megatron_stare.algorithms.entropy_bonus import USED, EntropyBonus
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.grpo_s import GrpoS
from megatron_stare.algorithms.gspo import Gspo
from megatron_stare.algorithms.gtpo import Gtpo
from megatron_stare.algorithms.kl_cov import KlCov
from megatron_stare.algorithms.method import Method
from megatron_stare.algorithms.sensitivity import critical_surprisal, second_moment, sensitivity
from megatron_stare.algorithms.shaping import LengthPenalty, Overlong, informative_groups
from megatron_stare.algorithms.stapo import SpuriousTokens
from megatron_stare.algorithms.stare import Stare
from megatron_stare.algorithms.surrogate import bounded_ratio, ratio
from megatron_stare.algorithms.twenty_entropy import TwentyEntropy
from megatron_stare.batch import TokenBatch
from megatron_stare.ops.statistics import answer, gather_statistics
from megatron_stare.ops.vocab_parallel import log_prob_and_entropy
from megatron_stare.statistics import Mean, SegmentSum, Statistics, scalar, tensor, threshold, top_k_count

TOLERANCE = 1e-6
FOR_PEOPLE = {"crosscheck", "note", "strict", "clip_cov_note", "meta"}
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"


class CannotEvaluateError(Exception):
    """The file holds something that this tool does not know how to compute, or lacks what it needs."""


@dataclass
class Found:
    """What comparing a group gave."""

    numbers: int = 0
    largest: float = 0.0  # |got - want| / max(1, |want|)
    where: list[str] = field(default_factory=list)  # the places that are off


class Fields:
    """An object of the file that remembers which of its keys were read, so that none is passed over."""

    def __init__(self, values: Any, path: str, found: Found) -> None:
        if not isinstance(values, dict):
            raise CannotEvaluateError(f"{path} is not an object")
        self.values, self.path, self.found = values, path, found
        self.read: set[str] = set()
        self.children: list[Fields] = []

    def __getitem__(self, key: str) -> Any:
        if key not in self.values:
            raise CannotEvaluateError(f"{self.path}.{key} is missing")
        self.read.add(key)
        return self.values[key]

    def tensor(self, key: str) -> Tensor:
        return torch.tensor(self[key], dtype=torch.float64)

    def mask(self, key: str) -> Tensor:
        return self.tensor(key) > 0.5

    def below(self, key: str) -> Fields:
        child = Fields(self[key], f"{self.path}.{key}", self.found)
        self.children.append(child)
        return child

    def items(self, key: str) -> list[Fields]:
        if not isinstance(self[key], list):
            raise CannotEvaluateError(f"{self.path}.{key} is not a list")
        rows = [Fields(row, f"{self.path}.{key}[{i}]", self.found) for i, row in enumerate(self[key])]
        self.children += rows
        return rows

    def keys(self, pattern: str) -> list[tuple[str, list[float]]]:
        """The keys that match, with the numbers their groups hold (`0p2` reads 0.2)."""
        hits = [(key, re.fullmatch(pattern, key)) for key in self.values]
        return [(key, [float(g.replace("p", ".")) for g in hit.groups()]) for key, hit in hits if hit]

    def expect(self, key: str, got: Any) -> None:
        compare(got.tolist() if isinstance(got, Tensor) else got, self[key], f"{self.path}.{key}", self.found)

    def unread(self) -> list[str]:
        here = [f"{self.path}.{key}" for key in self.values if key not in self.read | FOR_PEOPLE]
        return here + [each for child in self.children for each in child.unread()]


def compare(got: Any, want: Any, path: str, found: Found) -> None:
    """Adds the difference of two nested lists of numbers, or of two texts, to `found`."""
    if isinstance(want, list) or isinstance(got, list):
        if not (isinstance(want, list) and isinstance(got, list) and len(want) == len(got)):
            raise CannotEvaluateError(f"{path} has another shape than what is computed")
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            compare(one, other, f"{path}[{i}]", found)
        return
    found.numbers += 1
    if isinstance(want, str) or isinstance(got, str):
        error = 0.0 if got == want else math.inf
    else:
        one, other = (math.nan if x is None else float(x) for x in (got, want))
        same = one == other or (math.isnan(one) and math.isnan(other))
        error = 0.0 if same else abs(one - other) / max(1.0, abs(other))
    error = math.inf if math.isnan(error) else error
    found.largest = max(found.largest, error)
    if error > TOLERANCE:
        found.where.append(f"{path}: got {got}, want {want}")


# ---- from padded [B, L] arrays to the flat tokens that methods see, and back


@dataclass
class Padded:
    """Valid tokens of some sequences, laid end to end."""

    batch: TokenBatch
    mask: Tensor  # [B, L] bool, of these sequences

    def spread(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """[N] -> [B, L], `fill` elsewhere."""
        return torch.full(self.mask.shape, fill, dtype=torch.float64).masked_scatter(self.mask, x.to(torch.float64))


def pad(mask: Tensor, rows: list[int] | None = None, /, **given: Tensor) -> Padded:
    """Args: per-token fields of TokenBatch as [B, L], `advantage` as [B, L] or [B]; `rewards` [B] of a single group."""
    length = mask.shape[1]
    here = torch.zeros_like(mask)
    here[list(range(len(mask))) if rows is None else rows] = True
    here &= mask
    where = here.nonzero()
    rewards = given.pop("rewards", None)
    flat = {name: (x[:, None].expand(mask.shape) if x.dim() == 1 else x)[here] for name, x in given.items()}
    zero = torch.zeros(len(where), dtype=torch.float64)
    log_prob = flat.pop("log_prob", zero)
    own: dict[str, Any] = {
        "old_log_prob": log_prob,
        "rollout_log_prob": log_prob,
        "entropy": zero,
        "advantage": zero,
        "selection_log_prob": log_prob,  # selections read the policy of the update
        **flat,
    }
    batch = TokenBatch(
        log_prob=log_prob,
        mask=torch.ones(len(where), dtype=torch.bool),
        sequence=where[:, 0],
        position=where[:, 1],
        index=where[:, 0] * length + where[:, 1],
        num_sequences=len(mask),
        sequence_lengths=mask.sum(1),
        groups=torch.zeros(len(mask), dtype=torch.int64),
        rewards=rewards,
        num_groups=1,
        max_length=length,
        **own,
    )
    return Padded(batch, here)


def ask(method: Method, batch: TokenBatch) -> Statistics:
    return gather_statistics(lambda known: method.requests(batch, known), None)


def total(method: Method, batch: TokenBatch, state: dict[str, Tensor] | None = None) -> Tensor:
    """The loss of a batch as training sums it."""
    statistics = ask(method, batch)
    loss = method.token_loss(batch, statistics, initial(method) if state is None else state).loss
    return (method.coefficients(batch, statistics) * loss).sum()


def initial(method: Method | EntropyBonus) -> dict[str, Tensor]:
    return {name: torch.tensor(x, dtype=torch.float64) for name, x in method.initial_state().items()}


def aggregate(batch: TokenBatch, loss: Tensor, how: Any, length: int | None = None) -> Tensor:
    return (coefficients(batch, how, batch.mask.sum(), length_norm=length) * loss).sum()


def first_and_rest(mask: Tensor) -> list[list[int]]:
    """The two micro-batches that the file's key names speak of."""
    return [[0], list(range(1, len(mask)))] if len(mask) > 1 else [[0]]


# ---- one function a group


def entropy_sensitivity(rows: list[Fields], file: Any) -> None:
    for row in rows:
        pi = row.tensor("pi")
        size = len(pi)
        log_prob, entropies = log_prob_and_entropy(pi.log().expand(size, size), torch.arange(size), vocab_size=size)
        entropy = entropies[0]
        s2 = second_moment(pi.square().sum(), torch.xlogy(pi.square(), pi).sum(), entropy)
        phi, s_star = sensitivity(log_prob, entropy, s2), critical_surprisal(entropy, s2)
        tokens = pad(torch.ones(1, size, dtype=torch.bool), log_prob=log_prob[None])
        row.expect("H", entropy)
        row.expect("S2", s2)
        row.expect("surprisal", tokens.batch.surprisal)
        row.expect("Phi", phi)
        row.expect("dH_deta_at_A_plus1", -phi)
        row.expect("finite_difference", -phi)
        row.expect("s_star", s_star)
        row.expect("p_star", (-s_star).exp())
        row.expect("E_pi_Phi", (pi * phi).sum())


def stare_state(gate: bool, amplify: float, attenuate: float) -> dict[str, Tensor]:
    values = {"gate": float(gate), "amplify": amplify, "attenuate": attenuate}
    return {name: torch.tensor(x, dtype=torch.float64) for name, x in values.items()}


def partition(scope: str, sequences: int) -> list[list[int]]:
    if scope == "global":
        return [list(range(sequences))]
    if scope == "one_sequence_per_micro_batch":
        return [[i] for i in range(sequences)]
    parts = re.findall(r"\[([\d,\s]*)\]", scope) if scope.startswith("micro_batches_") else []
    if not parts:
        raise CannotEvaluateError(f"scope {scope!r} is not known")
    return [[int(i) for i in part.split(",") if i.strip()] for part in parts]


def stare_weights(group: Fields, file: Any) -> None:
    mask, given = group.mask("response_mask"), {"log_prob": group.tensor("log_prob")}
    given["advantage"] = group.tensor("advantage_per_sequence")
    for case in group.items("cases"):
        method = Stare(variant=case["variant"], share=case["ratio"])
        state = stare_state(case["gate"], case["W"], case["M"])
        weights, selected = torch.ones(mask.shape, dtype=torch.float64), {"plus": 0, "minus": 0}
        for rows in partition(case["scope"], len(mask)):
            padded = pad(mask, rows, **given)
            statistics = ask(method, padded.batch)
            weights *= padded.spread(method.weights(padded.batch, statistics, state), fill=1.0)
            for side in method.sides():
                selected[side] += int(threshold(statistics, side).k)
        case.expect("weights", weights)
        case.expect("n_Lplus", selected["plus"])
        case.expect("n_Lminus", selected["minus"])


def stare_topk_count(rows: list[Fields], file: Any) -> None:
    for row in rows:
        row.expect("k", top_k_count(torch.tensor(row["n"]), row["ratio"]))


def stare_loss(group: Fields, file: Any) -> None:
    inputs = other(file, "stare_weights")
    mask = inputs.mask("response_mask")
    given = {
        "log_prob": inputs.tensor("log_prob"),
        "old_log_prob": group.tensor("old_log_prob"),
        "advantage": inputs.tensor("advantage_per_sequence"),
    }
    uses = group["uses"]
    variant = re.search(r"\b(O1|O4|C2)\b", uses)
    numbers = {name: re.search(rf"\b{name}\s*=?\s*({NUMBER})", uses) for name in ("ratio", "W", "M")}
    if variant is None or not all(numbers.values()):
        raise CannotEvaluateError(f"{group.path}.uses does not name variant, ratio, W and M: {uses!r}")
    share, amplify, attenuate = (float(hit.group(1)) for hit in numbers.values() if hit)
    method = Stare(
        variant=variant.group(1),  # type: ignore[arg-type]
        share=share,
        clip_low=group["clip_low"],
        clip_high=group["clip_high"],
        dual_clip=group["dual_clip_c"],
    )
    state = stare_state(True, amplify, attenuate)
    padded = pad(mask, **given)
    surrogate = method.surrogate(padded.batch, padded.batch.advantage)
    group.expect("per_token_loss_before_weight", padded.spread(surrogate.loss))
    group.expect("loss_global_token_mean", total(method, padded.batch, state))
    legacy = replace(method, aggregation="micro_batch_mean")
    for key, _ in group.keys(r"loss_as_legacy_verl_micro_batches_\d+_\d+"):
        parts = (pad(mask, rows, **given).batch for rows in first_and_rest(mask))
        group.expect(key, sum(total(legacy, batch, state) for batch in parts))


def stare_controller_adaptive(group: Fields, file: Any) -> None:
    method = Stare(
        entropy_target=group["H_tgt"],
        adaptive=True,
        adapt_rate=group["alpha"],
        amplify_max=group["W_max"],
        attenuate_min=group["M_min"],
    )
    state = stare_state(True, group["W0"], group["M0"])
    for entry in group.items("trace"):
        entropy = math.nan if entry["H"] is None else float(entry["H"])
        state = method.control(state, {"entropy": torch.tensor(entropy, dtype=torch.float64)})
        entry.expect("gate", state["gate"])
        entry.expect("W_used", state["amplify"])
        entry.expect("M_used", state["attenuate"])


def stapo(group: Fields, file: Any) -> None:
    padded = pad(group.mask("response_mask"), entropy=group.tensor("entropy"), advantage=group.tensor("advantage"))
    batch, prob = padded.batch, group.tensor("prob")[padded.mask]

    def run(settings: SpuriousTokens) -> tuple[Tensor, Tensor, Tensor]:
        candidates = settings.candidates(prob, batch.advantage, batch.mask)
        tau_h = scalar(answer({"tau": settings.threshold(batch.entropy, candidates, batch.mask)}, None), "tau")
        return candidates, tau_h, batch.mask & settings.spared(batch.entropy, candidates, tau_h)

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
        _, tau_h, keep = run(SpuriousTokens(tau_p=group["tau_p"], version="v1", quantile=percent / 100))
        case.expect("tau_h", tau_h)
        case.expect("keep_mask", padded.spread(keep))
    _, _, keep = run(SpuriousTokens(tau_p=group["tau_p"], quantile=group["v4_q"]))
    loss = torch.where(keep, Grpo().surrogate(batch, batch.advantage).loss, 0.0)
    kept = replace(batch, mask=keep)
    group.expect("loss_ratio1_v4_linear_renormalised", aggregate(kept, loss, "token_mean"))
    group.expect("loss_ratio1_not_renormalised", aggregate(batch, loss, "token_mean"))


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
    for key, (alpha1, alpha2) in group.keys(r"conservation_sum_pos_per_t_alpha_(\d+p\d+)_(\d+p\d+)"):
        other_alphas = replace(joint, alpha1=alpha1, alpha2=alpha2)
        shaped = other_alphas.shaped(batch, ask(other_alphas, batch))
        request = SegmentSum(shaped, batch.position, batch.max_length, correct)
        group.expect(key, tensor(answer({"sum": request}, None), "sum"))


def grpo_s(group: Fields, file: Any) -> None:
    padded = gtpo_tokens(other(file, "gtpo"))
    low, high = group["clip"]
    method = GrpoS(beta1=group["beta1"], beta2=group["beta2"], clip_low=low, clip_high=high, eps=0.0)
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


def by_sequence(x: Tensor, batch: TokenBatch) -> Tensor:
    """[B] of a value that is the same for all tokens of a sequence."""
    return torch.zeros(batch.num_sequences, dtype=x.dtype).scatter(0, batch.sequence, x)


def grop(rows: list[Fields], file: Any) -> None:
    for row in rows:
        lengths, correct = row.tensor("lengths"), row.mask("correct")
        groups, counted = torch.zeros(len(lengths), dtype=torch.int64), torch.ones(len(lengths), dtype=torch.bool)
        penalty = LengthPenalty(easy_from=row["gamma1"])
        row.expect("penalty", penalty.penalty(lengths, correct, groups, counted))
        row.expect("regime", ("hard", "medium", "easy")[int(penalty.regimes(correct, groups, counted)[0])])


def grpo_advantage(group: Fields, file: Any) -> None:
    rewards = group.tensor("reward")
    groups, counted = torch.zeros(len(rewards), dtype=torch.int64), torch.ones(len(rewards), dtype=torch.bool)
    group.expect("std_ddof1_eps1e6", group_advantages(rewards, groups, counted, spread="sample", eps=1e-6))
    group.expect("std_population_eps1e6", group_advantages(rewards, groups, counted, spread="population", eps=1e-6))
    group.expect("dr_grpo_mean_only", group_advantages(rewards, groups, counted, spread="none"))


def dapo_overlong(rows: list[Fields], file: Any) -> None:
    for row in rows:
        overlong = Overlong(max_length=row["L_max"], cache=row["L_cache"], factor=row["factor"])
        row.expect("penalty", overlong.penalty(torch.tensor([row["length"]]))[0])


def dapo_group_filter(rows: list[Fields], file: Any) -> None:
    for row in rows:
        values = row.tensor("acc")
        counted = torch.ones(len(values), dtype=torch.bool)
        row.expect("keep", informative_groups(values, torch.zeros(len(values), dtype=torch.int64), counted)[0])


def loss_aggregation(group: Fields, file: Any) -> None:
    mask, values = group.mask("mask"), group.tensor("loss")
    batch, loss = pad(mask).batch, values[mask]
    group.expect("token_mean", aggregate(batch, loss, "token_mean"))
    group.expect("seq_mean_token_mean", aggregate(batch, loss, "sequence_mean"))
    group.expect("seq_mean_token_sum", aggregate(batch, loss, "sequence_sum"))
    for pattern, how in ((r"dr_grpo_Lmax(\d+)", "dr_grpo"), (r"verl_seq_mean_token_sum_norm_L(\d+)", "dr_grpo_verl")):
        for key, (length,) in group.keys(pattern):
            group.expect(key, aggregate(batch, loss, how, int(length)))
    for key, _ in group.keys(r"verl_legacy_token_mean_microbatches_\d+_\d+"):
        parts = (pad(mask, rows) for rows in first_and_rest(mask))
        group.expect(key, sum(aggregate(part.batch, values[part.mask], "micro_batch_mean") for part in parts))


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
    ones = torch.ones(mask.shape, dtype=torch.float64)  # an advantage: tokens without one are no candidates
    padded = pad(mask, entropy=group.tensor("entropy"), advantage=ones)
    batch, loss = padded.batch, group.tensor("per_token_loss")[mask]
    method = TwentyEntropy(share=group["ratio"])
    statistics = ask(method, batch)
    keep = method.narrowed(batch, statistics).kept.mask
    group.expect("k", threshold(statistics, "forks").k)
    group.expect("keep", padded.spread(keep))
    kept_loss = torch.where(keep, loss, 0.0)
    everything = replace(method, denominator="all")
    for key, variant in (("loss_paper_denominator_kept", method), ("loss_trl_denominator_all", everything)):
        group.expect(key, (variant.coefficients(batch, ask(variant, batch)) * kept_loss).sum())
    trl = replace(method, rule="quantile")
    group.expect("trl_quantile_threshold_linear", scalar(ask(trl, batch), "forks"))


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
    weight = bounded_ratio(batch.log_prob, batch.old_log_prob, low=method.clip_low, high=method.clip_high)
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
    if hit := re.fullmatch(rf"(?:icepop|verl_decoupled_token_icepop_default)_({NUMBER})_({NUMBER})", case):
        return Correction(level="token", mode="icepop", low=float(hit[1]), high=float(hit[2]))
    raise CannotEvaluateError(f"no such correction: {case}")


def tis_mis(group: Fields, file: Any) -> None:
    train, rollout = group["train_log_prob"], group["rollout_log_prob"]
    lengths = [len(row) for row in train]
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]

    def padded_rows(rows: list[list[float]]) -> Tensor:
        return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)

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
            case.expect("loss_mask", ragged(method.narrowed(batch, statistics).kept.mask))


GROUPS: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        entropy_sensitivity,
        stare_weights,
        stare_topk_count,
        stare_loss,
        stare_controller_adaptive,
        stapo,
        gtpo,
        grpo_s,
        grop,
        grpo_advantage,
        dapo_overlong,
        dapo_group_filter,
        loss_aggregation,
        cov_selection,
        twenty_entropy,
        gspo,
        cispo,
        adaptive_entropy_skywork,
        tis_mis,
    )
}


def other(file: dict[str, Any], name: str) -> Fields:
    """The inputs that a group takes from another one of the same file."""
    if name not in file:
        raise CannotEvaluateError(f"group {name}, whose inputs are needed, is missing")
    return Fields(file[name], name, Found())


def evaluate(name: str, file: dict[str, Any]) -> Found:
    """Compares one group. What cannot be evaluated is among the places that are off."""
    found = Found()
    try:
        if name not in GROUPS:
            raise CannotEvaluateError("no such group is known")
        values = file[name]
        groups = Fields({name: values}, "", found).items(name) if isinstance(values, list) else None
        whole = groups if groups is not None else [Fields(values, name, found)]
        GROUPS[name](whole if groups is not None else whole[0], file)
        if unread := [path for each in whole for path in each.unread()]:
            raise CannotEvaluateError(f"not evaluated: {', '.join(unread)}")
        if not found.numbers:
            raise CannotEvaluateError("it holds nothing to compare")
    except Exception as error:
        found.largest = math.inf
        what = str(error) if isinstance(error, CannotEvaluateError) else f"{type(error).__name__}: {error}"
        found.where.append(f"{name} cannot be evaluated: {what}")
    return found


def read(path: Path) -> dict[str, Any]:
    """The file's groups by name. Raises ValueError, in one sentence, where it is not a file of this shape."""
    try:
        file = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    groups = {k: v for k, v in file.items() if k not in FOR_PEOPLE} if isinstance(file, dict) else {}
    if not groups:
        raise ValueError(f"{path}: no groups of vectors in it; the file must be an object of groups by name")
    return groups


def main(arguments: list[str] | None = None) -> int:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE.json", help="worked numbers, shaped as algorithm_vectors.json")
    try:
        file = read(parser.parse_args(arguments).file)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    failed = 0
    for name in file:
        found = evaluate(name, file)
        failed += bool(found.where)
        print(f"{name:28} {found.numbers:5} numbers   largest error {found.largest:.1e}   {verdict(found)}")
        for line in found.where[:5]:
            print(f"    {line}")
        if len(found.where) > 5:
            print(f"    and {len(found.where) - 5} more")
    print(f"{len(file) - failed} of {len(file)} groups passed (tolerance {TOLERANCE:g} max(1, |want|))")
    return 1 if failed else 0


def verdict(found: Found) -> str:
    return "FAILED" if found.where else "ok"


if __name__ == "__main__":
    sys.exit(main())
