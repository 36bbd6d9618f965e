"""Computes signs of reward hacking from the samples of one step. Reward hacking means that the
policy earns reward without the intended reasoning.

The functions are pure. The results are logged as metrics of the step and therefore appear in the
report. No single sign proves reward hacking. docs/diagnostics.md explains how to read each sign.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import StatisticsError, correlation, fmean
from typing import TYPE_CHECKING

import numpy as np

from megatron_stare.records.metric import Metric

if TYPE_CHECKING:  # the report imports texts from here, and needs no torch
    from torch import Tensor

    from megatron_stare.records.trajectory import Trajectory

METRICS = (
    Metric(
        "signal/length_reward",
        "correlation",
        "Pearson's correlation of response length and reward over the verified responses",
        "no drift towards 1 (length is rewarded); NaN: one of them does not vary",
    ),
    Metric(
        "signal/length_right",
        "tokens",
        "mean length of right responses (reward above 0.5)",
        "moves with signal/length_wrong",
    ),
    Metric(
        "signal/length_wrong",
        "tokens",
        "mean length of wrong responses",
        "does not grow away from signal/length_right",
    ),
    Metric(
        "signal/repetition",
        "share",
        "4-grams of token ids that occurred earlier in the same response",
        "steady; rising: the policy loops",
    ),
    Metric(
        "signal/format",
        "share",
        "verified responses in which the verifier finds an answer",
        "rises early, then near 1",
    ),
    Metric(
        "signal/no_reasoning",
        "share",
        "right answers with fewer than 8 tokens before them",
        "does not rise; rising: answers are guessed or remembered",
    ),
)

NGRAM = 4  # tokens: sequences of two repeat in any prose, sequences of four hardly ever
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, 2^64 divided by the golden ratio
_THREADS = 4  # numpy sorts without the GIL; each thread holds a few copies of a response
FEW_TOKENS = 8  # "The answer is" and a box fit; a line of calculation does not


def hacking_signals(samples: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the `signal/*` metrics of a step. All metrics except `signal/repetition` use only the
    samples that have a reward.

    If the verifier does not report where the answer is, `signal/format` and `signal/no_reasoning`
    are missing.
    """
    verified = [s for s in samples if s.judged]
    right, wrong = [s for s in verified if is_right(s)], [s for s in verified if not is_right(s)]
    signals = {
        "signal/length_reward": length_reward_correlation(verified),
        "signal/length_right": _mean([len(s) for s in right]),
        "signal/length_wrong": _mean([len(s) for s in wrong]),
        "signal/repetition": repetition([s.tokens for s in samples]),
    }
    if any(s.answer_at is not None for s in verified):
        signals["signal/format"] = _mean([has_answer(s) for s in verified])
        signals["signal/no_reasoning"] = _mean(
            [tokens_before_answer(s) < FEW_TOKENS for s in right if has_answer(s)]
        )
    return signals


def is_right(sample: Trajectory) -> bool:
    """Returns True if the sample's reward is above 0.5. Evaluation uses the same threshold."""
    return (sample.reward or 0.0) > 0.5


def has_answer(sample: Trajectory) -> bool:
    """Returns True if the verifier's parser finds an answer in the right format."""
    return sample.answer_at is not None and sample.answer_at >= 0


def length_reward_correlation(samples: Sequence[Trajectory]) -> float:
    """Returns Pearson's correlation between response length in tokens and reward, or NaN if all
    lengths or all rewards are equal."""
    try:
        return correlation([float(len(s)) for s in samples], [s.reward or 0.0 for s in samples])
    except StatisticsError:  # fewer than two, or no spread
        return math.nan


def repetition(responses: Sequence[Tensor], n: int = NGRAM) -> float:
    """Returns the share of n-grams that are repetitions, or NaN if there are no n-grams. An n-gram
    is a sequence of n token ids. An n-gram is a repetition if the same response contains an equal
    n-gram at an earlier position. `responses` contains one 1-dim tensor of token ids for each
    response.

    Each n-gram of a response is hashed to 64 bits, and the hashes are sorted. In a response of
    20,480 tokens, two different n-grams have the same hash with a probability of about 1e-11. Exact
    codes instead of hashes would take two sorts: one sort of the token ids, and one sort of the
    codes. The hashes are sorted with numpy, because a sort with torch would take ten times as long.
    Sorting each response by itself is faster than sorting the whole batch, and needs little memory.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        counts = list(pool.map(partial(_counted, n=n), responses))
    total, repeated = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    return repeated / total if total else math.nan


def _counted(tokens: Tensor, n: int) -> tuple[int, int]:
    """Returns the number of n-grams in a response, and how many of them are repetitions."""
    grams = len(tokens) - n + 1
    if grams < 1:
        return 0, 0
    ids = tokens.numpy().astype(np.uint64)
    hashes = ids[:grams].copy()
    for i in range(1, n):
        hashes *= _MULTIPLIER
        hashes += ids[i : i + grams]
    hashes.sort()
    return grams, int(np.count_nonzero(hashes[1:] == hashes[:-1]))


def tokens_before_answer(sample: Trajectory) -> float:
    """Estimates how many sampled tokens precede the answer. The estimate is the number of all
    sampled tokens, multiplied by the share of the response's text before the answer.

    Call `tokens_before_answer` only for a sample in which the verifier found an answer.
    """
    assert sample.answer_at is not None
    # the policy's tokens, not an environment's
    sampled = sum(tokens for version, tokens in sample.versions if version >= 0)
    return sampled * sample.answer_at / len(sample.said)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
