"""Every method's training loss, written from the papers' formulas: float64, whole batch, no
micro-batches, no ranks.

Of the project it takes the records it is given and, for Clip-Cov, the numbers of the draw.
Advantages, filters, selections, aggregations and add-ons are written out again. Shape legend: B
samples, M response positions of a rollout batch in canonical order, tool observations too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support.shaped_by_hand import advantages, grpo_s, gtpo, penalties
from torch import Tensor

from megatron_stare.algorithms.draw import uniform
from megatron_stare.records.rollout_batch import RolloutBatch

LIMIT = 20.0  # of a log ratio
# (low, high, dual) of the clipped surrogate and the aggregation, as published
PUBLISHED: dict[str, tuple[float, float, float | None, str]] = {
    "grpo": (0.2, 0.2, None, "sequence_mean"),
    "dapo": (0.2, 0.28, None, "token_mean"),
    "dr_grpo": (0.2, 0.2, None, "dr_grpo"),
    "justrl": (0.2, 0.28, 10.0, "token_mean"),
    "stare": (0.2, 0.28, 10.0, "token_mean"),
    "stare_predictive": (0.2, 0.28, 10.0, "token_mean"),
    "stapo": (0.2, 0.28, None, "token_mean"),
    "stapo_stare": (0.2, 0.28, 10.0, "token_mean"),
    "twenty_entropy": (0.2, 0.28, 10.0, "token_mean"),
    "gtpo": (0.2, 0.28, None, "token_mean"),
    "grpo_s": (0.2, 0.28, None, "sequence_mean"),
    "gspo": (3e-4, 4e-4, None, "sequence_mean"),
    "clip_cov": (1.0, 1.0, None, "token_mean"),
    "kl_cov": (0.0, 0.0, None, "token_mean"),
    "cispo": (1.0, 4.0, None, "token_mean"),
    "dg": (0.2, 0.28, None, "token_mean"),
    "clip_b": (0.2, 0.2, None, "token_mean"),
    "clip_v": (0.2, 0.2, None, "token_mean"),
    "entropic": (0.2, 0.28, None, "token_mean"),
    "gepo": (0.2, 0.28, None, "token_mean"),
    "grpo_dropout": (0.2, 0.28, None, "token_mean"),
    "opefo": (0.2, 0.28, None, "token_mean"),
    "repo_r": (0.2, 0.28, None, "token_mean"),
    "steer": (0.2, 0.28, 10.0, "token_mean"),
}


@dataclass(frozen=True)
class Scores:
    """[M] float64 each; all of them differ once a policy has moved."""

    now: Tensor  # log-prob under the policy that is trained, with gradient
    old: Tensor  # of the log-prob pass
    rollout: Tensor  # from the engine
    reference: Tensor
    entropy: Tensor  # of the log-prob pass
    now_entropy: Tensor  # with gradient
    read: Tensor  # the log-prob that selections read
    sum_p2: Tensor  # of p^2 over the vocabulary, of the log-prob pass
    sum_p2_log_p: Tensor  # of p^2 ln p
    read_entropy: Tensor | None = None  # the entropy that selections read; None: `entropy`

    @property
    def chosen_by(self) -> Tensor:
        return self.entropy if self.read_entropy is None else self.read_entropy

    @property
    def phi(self) -> Tensor:
        """p (ln p + H) less its mean over the vocabulary."""
        mean = (self.sum_p2_log_p + self.entropy * self.sum_p2).clamp(min=0)
        return self.old.exp() * (self.old + self.entropy) - mean


def training_loss(
    settings: Mapping[str, Any],
    batch: RolloutBatch,
    scores: Scores,
    samples: Sequence[int],
    *,
    gate: bool = True,
    bonus: float = 0.0,
    micro_batches: Sequence[Sequence[int]] = (),
    state: Mapping[str, float] | None = None,
) -> Tensor:
    """The loss of an optimizer step, 0-dim.

    Args:
        settings: the `algorithm` section.
        samples: of the step's mini-batch.
        gate: whether STARE's is open, where it is one for the batch.
        bonus: what the entropy bonus multiplies by.
        micro_batches: samples of each, for aggregation 'micro_batch_mean'.
        state: values that a controller holds.
    """
    name, truncated = settings["name"], settings.get("truncated", "keep")
    sequence = torch.repeat_interleave(torch.arange(batch.size), batch.response_lengths)
    carries = batch.verified if truncated == "keep" else batch.verified & ~batch.truncated
    here = torch.zeros(batch.size, dtype=torch.bool)
    here[list(samples)] = True
    mask = batch.loss_mask & (carries & here)[sequence]
    advantage = advantages(settings, batch)[sequence]

    kept, counted, weight = mask, mask, torch.ones_like(scores.old)
    if (correction := settings.get("correction")) is not None:
        weight, inside = corrected(correction, scores, mask, sequence)
        kept = kept & inside
        leaves = correction.get("mode") == "mask" or "reject" in correction or "veto" in correction
        counted = kept if leaves else counted
    if name in ("stapo", "stapo_stare", "twenty_entropy"):
        rule = settings.get("spurious", {}) if name == "stapo_stare" else settings
        chosen = (
            forks(rule, scores, kept, advantage)
            if name == "twenty_entropy"
            else spared(rule, scores, kept, advantage)
        )
        kept = kept & chosen
        counted = counted & chosen if rule.get("denominator", "kept") == "kept" else counted
    if name in ("clip_b", "clip_v"):
        kept = kept & ~outliers(settings, scores, kept, advantage)
        counted = kept
    if (correction or {}).get("normalise"):
        weight = weight / weight[kept].mean()

    opened = gates(
        settings, scores, kept if settings.get("gate_entropy") == "kept" else mask, sequence, gate
    )
    policy = policy_loss(
        {**settings, **(state or {})}, batch, scores, advantage, kept, sequence, opened
    )
    loss = torch.where(kept, policy * weight, 0.0)
    if (kl := settings.get("reference_kl")) is not None:
        d = scores.reference - scores.now
        loss = (
            loss
            + kl["coef"]
            * {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - d - 1}[kl.get("estimator", "k3")]
        )
    loss = loss - bonus * scores.now_entropy

    aggregation = settings.get("aggregation", PUBLISHED[name][3])
    total = torch.zeros((), dtype=torch.float64)
    of_response = {i: loss[counted & (sequence == i)] for i in range(batch.size)}
    responses = [x for x in of_response.values() if len(x)]
    match aggregation:
        case "token_mean":
            total = torch.cat(responses).mean()
        case "sequence_mean":
            total = torch.stack([x.mean() for x in responses]).mean()
        case "sequence_sum":
            total = torch.stack([x.sum() for x in responses]).mean()
        case "dr_grpo":
            total = torch.stack([x.sum() for x in responses]).mean() / settings["length_norm"]
        case "dr_grpo_verl":
            total = torch.cat(responses).sum() / settings["length_norm"]
        case "micro_batch_mean":
            for part in micro_batches:
                own = [of_response[i] for i in part if len(of_response[i])]
                total = total + (torch.cat(own).mean() * len(own) / len(responses) if own else 0.0)
    return total


def policy_loss(
    settings: Mapping[str, Any],
    batch: RolloutBatch,
    scores: Scores,
    advantage: Tensor,
    kept: Tensor,
    sequence: Tensor,
    opened: Tensor,
) -> Tensor:
    """[M] before weights and add-ons; only where `kept` does it mean anything."""
    name = settings["name"]
    low, high, dual, _ = PUBLISHED[name]
    low, high, dual = (
        settings.get("clip_low", low),
        settings.get("clip_high", high),
        settings.get("dual_clip", dual),
    )
    ratio = (scores.now - scores.old).clamp(-LIMIT, LIMIT).exp()

    def clipped(ratio: Tensor, advantage: Tensor) -> Tensor:
        value = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        if dual is not None:
            value = torch.where(advantage < 0, torch.maximum(value, dual * advantage), value)
        return -value

    def by_response(x: Tensor) -> Tensor:
        """[M] means over the kept tokens of a response."""
        means = [x[kept & (sequence == i)].mean() for i in range(batch.size)]
        return torch.stack(means)[sequence]

    match name:
        case "cispo":
            return -ratio.detach().clamp(1 - low, 1 + high) * advantage * scores.now
        case "gspo":
            return clipped(by_response(scores.now - scores.old).exp(), advantage)
        case "grpo_s":
            whole = by_response(ratio)
            if settings.get("ratio") == "geometric":
                whole = by_response(scores.now - scores.old).exp()
            return clipped(whole, grpo_s(settings, batch, scores.entropy, kept, sequence))
        case "grpo_dropout":
            surprisal = by_response((-scores.read).clamp(min=0))
            return clipped(ratio, after_dropout(batch, advantage, surprisal, kept, sequence))
        case "gtpo":
            return clipped(
                ratio,
                gtpo(settings, batch, scores.entropy, kept, sequence, penalties(settings, batch)),
            )
        case "kl_cov":
            k = max(1, int(settings.get("share", 2e-3) * int(kept.sum())))
            held = largest(covariance(scores, kept, advantage), kept, k)
            distance = settings.get("coef", 1.0) * (scores.now - scores.old).abs()
            return -advantage * ratio + torch.where(held, distance, 0.0)
        case "clip_cov":
            return torch.where(
                drawn(settings, batch, scores, kept, advantage), 0.0, clipped(ratio, advantage)
            )
        case "dg":
            surprisal = (-scores.read).clamp(min=0)
            delight = 1 / (1 + (-advantage * surprisal / settings.get("eta", 1.0)).exp())
            return torch.where(opened, delight, 0.5) * clipped(ratio, advantage)
        case "entropic" | "gepo" | "opefo" | "repo_r" | "steer":
            factor = factors(settings, batch, scores, advantage, kept, sequence)
            return factor * clipped(ratio, advantage)
        case "stare" | "stapo_stare" | "stare_predictive":
            factor = torch.ones_like(advantage)
            predictive = settings["name"] == "stare_predictive"
            for operator in OPERATORS[settings.get("variant", "C2" if predictive else "O1")]:
                chosen, published = operated_on(operator, settings, scores, kept, advantage)
                if predictive:
                    chosen = chosen & (scores.phi < -3e-6)
                weight = "amplify" if published > 1 else "attenuate"
                factor[chosen & opened] = settings.get(weight, published)
            return factor * clipped(ratio, advantage)
    return clipped(ratio, advantage)


def after_dropout(
    batch: RolloutBatch, advantage: Tensor, surprisal: Tensor, kept: Tensor, sequence: Tensor
) -> Tensor:
    """[M] GRPODropout's advantages, a prompt at a time. `surprisal` is the mean of the token's
    response."""
    new = torch.zeros_like(advantage)
    responses = sequence[kept].unique().tolist()
    first = {i: int(torch.nonzero(kept & (sequence == i))[0]) for i in responses}
    for group in batch.groups.unique():
        members = [i for i in responses if batch.groups[i] == group]
        if not members:
            continue
        s = torch.tensor([float(surprisal[first[i]]) for i in members], dtype=torch.float64)
        a = torch.tensor([float(advantage[first[i]]) for i in members], dtype=torch.float64)
        left = torch.ones_like(a)
        while torch.cov(torch.stack([a * left, s]), correction=0)[0, 1] < -1e-12:
            right = torch.nonzero((a > 0) & (left > 0)).flatten().tolist()
            if not right:
                break
            left[min(right, key=s.tolist().__getitem__)] = 0
        weights = (-s).exp() * left
        baseline = (weights * a).sum() / weights.sum().clamp(min=1e-300)
        for i, held in zip(members, (left * (a - baseline)).tolist(), strict=True):
            new[sequence == i] = held
    return new


def factors(
    settings: Mapping[str, Any],
    batch: RolloutBatch,
    scores: Scores,
    advantage: Tensor,
    kept: Tensor,
    sequence: Tensor,
) -> Tensor:
    """[M] the weights of the methods that have one for every token."""
    surprisal, sign = (-scores.read).clamp(min=0), advantage.sign()
    p = (-surprisal).exp()
    match settings["name"]:
        case "repo_r":
            likely = -surprisal + (scores.chosen_by if settings.get("centred", True) else 0.0)
            return (1 - settings.get("zeta", 0.01) * sign * likely).clamp(min=0)
        case "entropic":
            steered = 1 + settings["alpha"] * sign
            return torch.where(p > settings.get("probable_above", 0.95), steered, 1.0)
        case "steer":
            change = (
                p / scores.old.exp() * advantage * (1 - p) * (scores.chosen_by - surprisal)
            ).abs()
            least = settings.get("weight_min", 0.8)
            if settings.get("map") == "exponential":
                rate = -math.log(least) / max(float(change[kept].max()), 0.02)
                return (-rate * change).exp().clamp(least, 1.0)
            low, high = float(change[kept].min()), float(change[kept].max())
            return 1.2 - (1.2 - least) * ((change - low) / (high - low)).clamp(0, 1)
        case "opefo":
            change = -advantage * scores.phi
            up, down = change[kept & (change > 0)].sum(), -change[kept & (change < 0)].sum()
            return 1 + (down - up) / (down + up) * change.sign()
    weights = torch.ones_like(advantage)  # gepo
    group = batch.groups[sequence]
    for each in group.unique():
        here = kept & (group == each)
        mean = surprisal[here].mean()
        weights[here & (advantage > 0) & bool(mean < settings["low"])] = 0.5
        weights[here & (advantage < 0) & bool(mean > settings["high"])] = 0.2
    return weights


def outliers(
    settings: Mapping[str, Any], scores: Scores, kept: Tensor, advantage: Tensor
) -> Tensor:
    """[M] bool: the tokens that Clip_B or Clip_V removes."""
    wrong, mu = kept & (advantage < 0), settings["mu"]
    if settings["name"] == "clip_b":
        log_p = scores.read.clamp(max=0)
        signal = log_p.exp() * (log_p + scores.chosen_by)
        return wrong & (signal - signal[kept].mean() < -mu * signal[kept].std(correction=0))
    candidates = wrong & (-scores.phi > mu * scores.phi[kept].std(correction=0))
    most = max(1, int(settings["max_share"] * int(kept.sum())))
    return largest(-scores.phi, candidates, most)


OPERATORS = {
    "O1": ["L+"],
    "O2": ["U+"],
    "O3": ["U-"],
    "O4": ["L-"],
    "C1": ["L+", "U-"],
    "C2": ["L+", "L-"],
    "C3": ["U+", "U-"],
    "C4": ["U+", "L-"],
}


def operated_on(
    operator: str, settings: Mapping[str, Any], scores: Scores, kept: Tensor, advantage: Tensor
) -> tuple[Tensor, float]:
    """[M] bool, the tokens of L+, U+, L- or U-, and the weight they have as published: what raises
    the entropy."""
    side = kept & (advantage > 0 if operator[1] == "+" else advantage < 0)
    k = int(int(side.sum()) * settings.get("share", 0.1) + 0.999999)
    if "rare_below" in settings:
        rare = side & (scores.read < math.log(settings["rare_below"]))
    else:
        rare = largest(-scores.read, side, k)
    if operator[0] == "L":
        return rare, 1.1 if operator == "L+" else 0.9
    surprisal = (-scores.read).clamp(min=0)
    common = largest(-surprisal, side, k) if settings.get("common") == "bottom" else side & ~rare
    return common, 0.9 if operator == "U+" else 1.1


def gates(
    settings: Mapping[str, Any], scores: Scores, over: Tensor, sequence: Tensor, gate: bool
) -> Tensor:
    """[M] bool: the tokens that STARE's gate is open for. `gate` is that of a batch."""
    if settings.get("gate") == "token":
        return scores.entropy < settings["entropy_target"]
    opened = torch.full_like(over, gate)
    if settings.get("gate") == "sample":
        for i in range(int(sequence.max()) + 1):
            opened[sequence == i] = bool(
                scores.entropy[over & (sequence == i)].mean() < settings["entropy_target"]
            )
    return opened


def corrected(
    correction: Mapping[str, Any], scores: Scores, mask: Tensor, sequence: Tensor
) -> tuple[Tensor, Tensor]:
    """[M] weights, and [M] bool which tokens stay."""
    log_ratio = (scores.old - scores.rollout).clamp(-LIMIT, LIMIT)
    own = log_ratio.exp()
    level = own.clone()
    stays = torch.ones_like(mask)
    low, high = correction.get("low", 0.5), correction.get("high", 2.0)
    for i in range(int(sequence.max()) + 1):
        rows = mask & (sequence == i)
        if correction.get("level") == "sequence":
            level[sequence == i] = log_ratio[rows].sum().clamp(-LIMIT, LIMIT).exp()
        elif correction.get("level") == "geometric":
            level[sequence == i] = log_ratio[rows].mean().exp()
        if "veto" in correction and bool((own[rows] < correction["veto"]).any()):
            stays[sequence == i] = False
    if "reject" in correction:
        stays = stays & (own >= correction["reject"][0]) & (own <= correction["reject"][1])
    inside = (level >= low) & (level <= high)
    match correction.get("mode", "truncate"):
        case "mask":
            return level, stays & inside
        case "truncate":
            return level.clamp(max=high), stays
        case "clip":
            return level.clamp(low, high), stays
    return torch.where(inside, level, 0.0), stays  # icepop


def spared(rule: Mapping[str, Any], scores: Scores, kept: Tensor, advantage: Tensor) -> Tensor:
    """[M] bool: what STAPO does not silence."""
    spurious = kept & (advantage > 0) & (scores.read.exp() < rule.get("tau_p", 0.002))
    over = scores.entropy[spurious if rule.get("version", "v4") == "v4" else kept]
    if len(over) == 0:
        return torch.ones_like(kept)
    threshold = np.quantile(
        over.numpy(), rule.get("quantile", 0.75), method=rule.get("interpolation", "linear")
    )
    return ~(spurious & (scores.entropy < float(threshold)))


def forks(rule: Mapping[str, Any], scores: Scores, kept: Tensor, advantage: Tensor) -> Tensor:
    """[M] bool: the tokens of highest entropy, of groups that teach something."""
    candidates = kept if rule.get("candidates") == "all" else kept & (advantage != 0)
    share = rule.get("share", 0.2)
    if rule.get("rule") == "quantile":
        return candidates & (
            scores.entropy >= float(np.quantile(scores.entropy[candidates].numpy(), 1 - share))
        )
    return largest(scores.entropy, candidates, max(1, int(int(candidates.sum()) * share + 0.9999)))


def covariance(scores: Scores, kept: Tensor, advantage: Tensor) -> Tensor:
    """[M] (A - mean A) (ln p - mean ln p)."""
    return (advantage - advantage[kept].mean()) * (scores.read - scores.read[kept].mean())


def drawn(
    settings: Mapping[str, Any],
    batch: RolloutBatch,
    scores: Scores,
    kept: Tensor,
    advantage: Tensor,
) -> Tensor:
    """[M] bool: the tokens that Clip-Cov takes the loss of."""
    cov = covariance(scores, kept, advantage)
    candidates = kept & (cov > settings.get("cov_low", 1.0)) & (cov < settings.get("cov_high", 5.0))
    candidates &= ~(
        (advantage > 0) & ((scores.read - scores.old).exp() > 2.0)
    )  # clipped already: its bounds are 0 and 2
    k = max(1, int(settings.get("share", 2e-4) * int(kept.sum())))
    ticket = uniform(settings.get("seed", 0), batch.step, torch.arange(len(kept)))
    return largest(ticket, candidates, k)


def largest(x: Tensor, among: Tensor, k: int) -> Tensor:
    """[M] bool: the k largest `x` of those `among`, or all of them; of equal ones the earlier."""
    rows = among.nonzero().squeeze(1)
    chosen = torch.zeros_like(among)
    chosen[rows[(-x[rows]).argsort(stable=True)[:k]]] = True
    return chosen
