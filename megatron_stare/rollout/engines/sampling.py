"""Samples tokens with noise that depends only on (seed, step, prompt cursor, sample index,
position).

The noise of a response therefore does not depend on the batch, on the engine, or on a restart. The
noise key of a response is computed from the seed, the step, the prompt cursor and the sample index.
The caller, decode.py, passes logits and gets back tokens and log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# logits processed at once, so that float64 copies for a large vocabulary stay near 100 MB
_BLOCK = 1 << 22


def row_keys(
    seed: int, step: int | Sequence[int], cursors: Sequence[int], sample_indices: Sequence[int]
) -> NDArray[np.uint64]:
    """Returns the noise keys [B], one key per response. All tokens of a response have the same
    noise key. The function `uniforms` mixes the position of each token into the noise key.

    Args:
        step: step in which a response began, one number for all responses or [B].
    """
    key = absorb(np.zeros(len(cursors), dtype=np.uint64), seed)
    key = absorb(key, step)
    key = absorb(key, cursors)
    return absorb(key, sample_indices)


def uniforms(keys: NDArray[np.uint64], position: int | Sequence[int] | NDArray[np.int64]) -> Tensor:
    """Returns the sampling noise [B]. Each value is a float64 multiple of 2^-53 in [0, 1).

    Args:
        keys: [B], from row_keys.
        position: position of the token in its response, counted from 0, one number for all
            responses or [B].
    """
    return torch.from_numpy((absorb(keys, position) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def absorb(
    state: NDArray[np.uint64], word: int | Sequence[int] | NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Mixes `word`, a 64-bit integer, into each of the hash states [B] with splitmix64. `word` is a
    vector [B], or one number for all states.

    If `word` is fixed, `absorb` is a bijection from the old states to the new states. If the old
    state is fixed, `absorb` is a bijection from the values of `word` to the new states.

    The noise key of a response absorbs four numbers: the seed, the step, the prompt cursor and the
    sample index. If two responses differ in one of these numbers and have the other three in
    common, the bijections guarantee two different noise keys. For responses that differ in several
    of these numbers, equal noise keys are improbable, but not excluded.
    """
    z = (state ^ np.asarray(word, dtype=np.int64).view(np.uint64)) + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def choose_tokens(
    logits: Tensor, temperature: float, noise: Tensor | None, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Chooses one token per row.

    Args:
        logits: [B, V].
        temperature: divides the logits.
        noise: [B] float64 in [0, 1). The inverse of the cumulative distribution maps the noise to a
            token. None: choose the likeliest token.
        top_p: sample only from the smallest set of likeliest tokens whose probabilities sum to at
            least top_p; 1: sample from all tokens.

    Returns:
        [B] int64 tokens, and [B] float32 log-probs, in nats, under the temperature-scaled
        distribution. A token of probability 0 is never drawn. Rows with NaN yield a NaN log-prob.
    """
    rows = max(1, _BLOCK // logits.shape[-1])
    if logits.shape[0] <= rows:
        return _choose(logits, temperature, noise, top_p)
    parts = [
        _choose(
            logits[i : i + rows], temperature, None if noise is None else noise[i : i + rows], top_p
        )
        for i in range(0, logits.shape[0], rows)
    ]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat(
        [log_probs for _, log_probs in parts]
    )


def _choose(
    logits: Tensor, temperature: float, noise: Tensor | None, top_p: float
) -> tuple[Tensor, Tensor]:
    scaled = logits.float() / temperature
    if noise is None:
        tokens = scaled.argmax(-1, keepdim=True)
    else:
        cdf = _nucleus(torch.softmax(scaled, -1, dtype=torch.float64), top_p).cumsum(-1)
        total = cdf[:, -1:].contiguous()
        # first index whose cdf exceeds the draw; a token of probability 0 never is that index
        tokens = torch.searchsorted(cdf, noise[:, None] * total, right=True)
        # if u * total rounds up to total, take the last token with nonzero probability, at which
        # the cdf reaches total
        tokens = torch.minimum(tokens, torch.searchsorted(cdf, total)).clamp_max(
            scaled.shape[-1] - 1
        )
    return tokens[:, 0], torch.log_softmax(scaled, -1).gather(-1, tokens)[:, 0]


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Returns the probabilities [B, V], with probability 0 for every token outside the nucleus. The
    nucleus is the smallest set of tokens whose probabilities sum to at least top_p. Among equally
    likely tokens, the tokens with lower ids enter the nucleus first."""
    if top_p >= 1:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    # a token is kept if the tokens before it sum to less than top_p
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(probabilities).scatter(
        -1, order, torch.where(before < top_p, ordered, 0.0)
    )
