"""Whether rollout engine and trainer compute the same log-probs of the same tokens, and what is to blame if not. Pure.

Two comparisons: the tokens of every rollout, at the run's temperature, as they were sampled; and after every weight
sync a canary, sequences that never change, at temperature 1. Blame rests on what one of them shows and the other does
not. The log-probs are compared on the ranks that hold the trainer's (megatron/differences.py), and judged here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_stare.errors import UserError
from megatron_stare.records.log_prob_difference import LogProbDifference, Sizes
from megatron_stare.records.rollout_batch import RolloutBatch

# nats, of the token that differs most. float16's is a fifth of bfloat16's, whose rounding is eight times coarser
LIMITS = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
CANARY_TOKENS = 64  # of its longest sequence
_AGREES = 0.1  # share of the limit under which two log-probs count as the same, when blame is sought


class AgreementError(UserError):
    """Engine and trainer do not compute the same log-probs, so the ratios of training would be wrong."""


def agreement_metrics(difference: LogProbDifference, step: int) -> dict[str, float]:
    """The sizes of the differences: by quantile, and their maxima by position and by age of the weights in steps.

    Args:
        step: whose rollout it is; tokens of the weights before it have age 1.
    """
    if not difference.everywhere.tokens:
        return {}
    metrics = {f"agreement/{name}": size for name, size in difference.quantiles.items()}
    metrics["agreement/max"] = difference.largest
    for first, sizes in difference.from_position.items():
        metrics[f"agreement/max_from_position_{first}"] = sizes.largest
    for version, sizes in difference.of_version.items():
        metrics[f"agreement/max_of_age_{step - version}"] = sizes.largest
    return metrics


def canary_batch(vocab_size: int, sequences: int, longest: int) -> RolloutBatch:
    """Sequences of random tokens, the same in every run, of different lengths up to `longest` tokens.

    All but a sequence's first token count as its response.
    """
    generator = torch.Generator().manual_seed(20261121)
    lengths = torch.linspace(longest, max(2, longest // 4), sequences).long()
    responses = lengths - 1
    total = int(responses.sum())
    tokens = torch.randint(vocab_size, (int(lengths.sum()),), generator=generator)
    return RolloutBatch(
        tokens=tokens.to(torch.int32),
        loss_mask=torch.ones(total, dtype=torch.bool),
        rollout_log_probs=torch.zeros(total),
        run_versions=torch.zeros(sequences, dtype=torch.int64),
        run_lengths=responses,
        runs=torch.ones(sequences, dtype=torch.int64),
        prompt_lengths=torch.ones(sequences, dtype=torch.int64),
        response_lengths=responses,
        groups=torch.arange(sequences),
        rewards=torch.zeros(sequences, dtype=torch.float64),
        verified=torch.ones(sequences, dtype=torch.bool),
        truncated=torch.zeros(sequences, dtype=torch.bool),
    )


def canary_verdict(differences: Sequence[LogProbDifference], limit: float) -> str | None:
    """What the canary shows, by engine; None: engines and trainer agree."""
    wrong = [i for i, difference in enumerate(differences) if not difference.agrees(limit)]
    if not wrong:
        return None
    if len(wrong) < len(differences):
        return f"the weights of engine {wrong[0]} are to blame: the other engines agree with the trainer"
    worst = differences[wrong[0]]
    small = limit * _AGREES
    if _first_position(worst).largest <= small:
        return (
            "positions are to blame (RoPE's base or scaling, or the attention mask): the first position, which attends "
            "to nothing else, agrees, later ones do not"
        )
    if worst.longest.largest <= small:
        return "padding is to blame: the longest sequence agrees, which nothing pads, shorter ones do not"
    return "the weights are to blame: the engine computes with others than the trainer, in all positions"


def rollout_verdict(sampled: LogProbDifference, unscaled: LogProbDifference, temperature: float, limit: float) -> str:
    """What is to blame for sampled log-probs that differ although the canary agrees.

    Args:
        sampled: against the trainer at the run's temperature.
        unscaled: the same tokens against the trainer at temperature 1.
    """
    small = limit * _AGREES
    if temperature != 1.0 and unscaled.largest <= small:
        return f"the temperature is to blame: the engine samples at 1, the trainer divides by {temperature:g}"
    if sampled.lowest >= -small:
        return (
            "the sampling support is to blame: the engine finds every sampled token as likely as the trainer or "
            "likelier, as top-k, top-p or min-p make them"
        )
    if _first_position(sampled).largest_number <= limit < sampled.everywhere.largest_number:
        return (
            "the engine's cache or batching is to blame: the canary agrees, and so do first tokens; later ones do not"
        )
    return (
        "the temperature, a penalty or a bias of the engine is to blame: the canary, which is not sampled, agrees, and "
        "log-probs differ both ways"
    )


def _first_position(difference: LogProbDifference) -> Sizes:
    return difference.from_position.get(0, Sizes(0, 0, 0.0))


def limit_of(configured: float | None, trained: str, served: str | None = None) -> float:
    """The largest difference a run goes on with, nats: what is set, or that of the coarser dtype.

    Args:
        trained: the trainer's dtype.
        served: the engines'; None: the same.
    """
    return max(LIMITS[trained], LIMITS[served or trained]) if configured is None else configured


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


def summary(differences: Sequence[LogProbDifference]) -> Mapping[str, float]:
    """The canary's metric: the largest difference of all engines."""
    return {"agreement/canary_max": max((d.largest for d in differences), default=0.0)}
