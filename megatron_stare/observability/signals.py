"""Signs that a policy earns its reward by other means than reasoning, from the samples of one step.

Comes from scored samples; goes into the step's metrics and from there to the report. Pure functions of the samples.
None of them proves anything alone; docs/diagnostics.md says how each is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import StatisticsError, correlation, fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the report takes its words from here, and does without torch
    from megatron_stare.batch import Sample

NGRAM = 4  # tokens: two in a row repeat in any prose, four hardly do
FEW_TOKENS = 8  # "The answer is" and a box fit; a line of working does not


def hacking_signals(samples: Sequence[Sample]) -> dict[str, float]:
    """The `signal/*` metrics of a step. Samples without a verdict are left out, but for the repetition.

    Metrics of where the answer stands are missing where the verifier does not say it.
    """
    scored = [s for s in samples if s.reward_status == "ok"]
    right, wrong = [s for s in scored if is_right(s)], [s for s in scored if not is_right(s)]
    signals = {
        "signal/length_reward": length_reward_correlation(scored),
        "signal/length_right": _mean([len(s.response_ids) for s in right]),
        "signal/length_wrong": _mean([len(s.response_ids) for s in wrong]),
        "signal/repetition": repetition([s.response_ids for s in samples]),
    }
    if any(s.answer_at is not None for s in scored):
        signals["signal/format"] = _mean([has_answer(s) for s in scored])
        signals["signal/no_reasoning"] = _mean([tokens_before_answer(s) < FEW_TOKENS for s in right if has_answer(s)])
    return signals


def is_right(sample: Sample) -> bool:
    """Above one half, as in the evaluation."""
    return (sample.reward or 0.0) > 0.5


def has_answer(sample: Sample) -> bool:
    """An answer stands in the right format, as the verifier's parser sees it."""
    return sample.answer_at is not None and sample.answer_at >= 0


def length_reward_correlation(samples: Sequence[Sample]) -> float:
    """Pearson's correlation of length in tokens and reward; NaN where one of them is the same for all."""
    try:
        return correlation([float(len(s.response_ids)) for s in samples], [s.reward or 0.0 for s in samples])
    except StatisticsError:  # fewer than two, or no spread
        return math.nan


def repetition(responses: Sequence[Sequence[int]], n: int = NGRAM) -> float:
    """Share of the n-grams of token ids that stood earlier in the same response; NaN where there are none."""
    total = repeated = 0
    for ids in responses:
        grams = list(zip(*(ids[i:] for i in range(n)), strict=False))
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / total if total else math.nan


def tokens_before_answer(sample: Sample) -> float:
    """Tokens before the answer begins: the response's tokens times the share of its text that stands before it.

    Only of a sample that has an answer.
    """
    assert sample.answer_at is not None
    return len(sample.response_ids) * sample.answer_at / len(sample.text)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
