"""Whether rollout engine and trainer compute the same log-probs of the same tokens, and what is to blame if not. Pure.

Two comparisons: the tokens of every rollout, at the run's temperature, as they were sampled; and after every weight
sync a canary, sequences that never change, at temperature 1. Blame rests on what one of them shows and the other does
not. Shape legend: N response positions of a batch laid end to end, in canonical order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stare.batch import RolloutBatch
from megatron_stare.errors import UserError

LIMITS = {"float32": 1e-3, "bfloat16": 0.5}  # nats, of the token that differs most
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
POSITIONS = (0, 1, 8, 64, 512, 4096)  # where the ranges of positions begin that are reported by themselves
CANARY_TOKENS = 64  # of its longest sequence
_AGREES = 0.1  # share of the limit under which two log-probs count as the same, when blame is sought


class AgreementError(UserError):
    """Engine and trainer do not compute the same log-probs, so the ratios of training would be wrong."""


@dataclass(frozen=True)
class Difference:
    """Engine minus trainer, nats, where both scored a token.

    positions: [n] int64 tokens before it in its response, or in its canary sequence.
    sequences: [n] int64 which sequence it is of.
    """

    values: Tensor  # [n]
    positions: Tensor
    sequences: Tensor

    @property
    def largest(self) -> float:
        """NaN where one is not a number."""
        return float(self.values.abs().amax()) if self.values.numel() else 0.0

    def agrees(self, limit: float) -> bool:
        return self.largest <= limit  # False for NaN too


def rollout_difference(batch: RolloutBatch, trainer: Tensor) -> Difference:
    """Of the sampled tokens of a batch. `trainer`: [N] log-probs of the log-prob pass."""
    sequences = torch.repeat_interleave(torch.arange(batch.size), batch.response_lengths)
    starts = batch.response_lengths.cumsum(0) - batch.response_lengths
    positions = torch.arange(sequences.numel()) - starts[sequences]
    kept = batch.sampled
    return Difference((batch.rollout_log_probs - trainer)[kept], positions[kept], sequences[kept])


def agreement_metrics(difference: Difference, versions: Tensor, step: int) -> dict[str, float]:
    """The sizes of the differences: by quantile, and their maxima by position and by age of the weights in steps.

    Args:
        versions: [n] int64 weight version of every token.
        step: whose rollout it is; tokens of the weights before it have age 1.
    """
    size = difference.values.abs().double()
    if not size.numel():
        return {}
    ordered = size.sort().values  # torch.quantile takes at most 16 million
    metrics = {f"agreement/{name}": float(ordered[round(q * (size.numel() - 1))]) for name, q in QUANTILES.items()}
    for first, end in zip(POSITIONS, (*POSITIONS[1:], None), strict=True):
        inside = difference.positions >= first
        if end is not None:
            inside &= difference.positions < end
        if inside.any():
            metrics[f"agreement/max_from_position_{first}"] = float(size[inside].amax())
    for version in versions.unique().tolist():
        metrics[f"agreement/max_of_age_{step - version}"] = float(size[versions == version].amax())
    return metrics


def canary_batch(vocab_size: int, sequences: int, longest: int) -> RolloutBatch:
    """Sequences of random tokens, the same in every run, of different lengths up to `longest` tokens.

    All but a sequence's first token count as its response.
    """
    generator = torch.Generator().manual_seed(20261121)
    lengths = torch.linspace(longest, max(2, longest // 4), sequences).long()
    responses = lengths - 1
    total = int(responses.sum())
    return RolloutBatch(
        tokens=torch.randint(vocab_size, (int(lengths.sum()),), generator=generator),
        prompt_lengths=torch.ones(sequences, dtype=torch.int64),
        response_lengths=responses,
        sampled=torch.ones(total, dtype=torch.bool),
        rollout_log_probs=torch.zeros(total),
        weight_versions=torch.zeros(total, dtype=torch.int64),
        groups=torch.arange(sequences),
        rewards=torch.zeros(sequences, dtype=torch.float64),
        scored=torch.ones(sequences, dtype=torch.bool),
        truncated=torch.zeros(sequences, dtype=torch.bool),
        advantages=torch.zeros(sequences),
    )


def canary_differences(
    canary: RolloutBatch, trainer: Tensor, engines: Sequence[Sequence[Sequence[float]]]
) -> list[Difference]:
    """One an engine.

    Args:
        trainer: [N] log-probs at temperature 1.
        engines: log-probs by engine, then by sequence of the canary.
    """
    found = []
    for scored in engines:
        log_probs = torch.tensor([x for sequence in scored for x in sequence])
        found.append(rollout_difference(_with_log_probs(canary, log_probs), trainer))
    return found


def _with_log_probs(canary: RolloutBatch, log_probs: Tensor) -> RolloutBatch:
    return RolloutBatch(**{**vars(canary), "rollout_log_probs": log_probs})


def canary_verdict(differences: Sequence[Difference], limit: float) -> str | None:
    """What the canary shows; None: engines and trainer agree."""
    wrong = [i for i, difference in enumerate(differences) if not difference.agrees(limit)]
    if not wrong:
        return None
    if len(wrong) < len(differences):
        return f"the weights of engine {wrong[0]} are to blame: the other engines agree with the trainer"
    worst = differences[wrong[0]]
    small = limit * _AGREES
    if _largest(worst, worst.positions == 0) <= small:
        return (
            "positions are to blame (RoPE's base or scaling, or the attention mask): the first position, which attends "
            "to nothing else, agrees, later ones do not"
        )
    longest = worst.sequences == worst.sequences[worst.positions.argmax()]
    if _largest(worst, longest) <= small:
        return "padding is to blame: the longest sequence agrees, which nothing pads, shorter ones do not"
    return "the weights are to blame: the engine computes with others than the trainer, in all positions"


def rollout_verdict(sampled: Difference, unscaled: Difference, temperature: float, limit: float) -> str:
    """What is to blame for sampled log-probs that differ although the canary agrees.

    Args:
        sampled: against the trainer at the run's temperature.
        unscaled: the same tokens against the trainer at temperature 1.
    """
    small = limit * _AGREES
    if temperature != 1.0 and unscaled.largest <= small:
        return f"the temperature is to blame: the engine samples at 1, the trainer divides by {temperature:g}"
    if float(sampled.values.amin()) >= -small:
        return (
            "the sampling support is to blame: the engine finds every sampled token as likely as the trainer or "
            "likelier, as top-k, top-p or min-p make them"
        )
    wrong = sampled.values.abs() > limit
    if not wrong[sampled.positions == 0].any() and wrong.any():
        return (
            "the engine's cache or batching is to blame: the canary agrees, and so do first tokens; later ones do not"
        )
    return (
        "the temperature, a penalty or a bias of the engine is to blame: the canary, which is not sampled, agrees, and "
        "log-probs differ both ways"
    )


def _largest(difference: Difference, where: Tensor) -> float:
    chosen = difference.values[where].abs()
    return float(chosen.amax()) if chosen.numel() else 0.0


def limit_of(configured: float | None, dtype: str) -> float:
    """The largest difference a run goes on with, nats."""
    return LIMITS[dtype] if configured is None else configured


def require_agreement(what: str, largest: float, limit: float, verdict: str, where: str) -> None:
    """Raises AgreementError where the largest difference exceeds the limit, or is not a number."""
    if largest <= limit:
        return
    raise AgreementError(
        f"{what} differ by up to {largest:.3g} nats between rollout engine and trainer, the limit is {limit:g};"
        f" {verdict}",
        where=where,
        fix="mend that, or raise sglang.agreement_limit where the difference is known to be harmless",
    )


def summary(differences: Sequence[Difference]) -> Mapping[str, float]:
    """The canary's metric: the largest difference of all engines."""
    return {"agreement/canary_max": max((d.largest for d in differences), default=0.0)}
