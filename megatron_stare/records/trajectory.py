"""Defines `Trajectory`, the record of one response to a prompt. A response consists of one or more
turns of the policy. Between two turns, an environment can insert tokens. The per-token values of a
response are stored in columns. The only third-party imports are numpy and torch.

Shape legend: n = tokens of the response; L = layers; K = experts to which a mixture of experts
routes a token. Each token of a response was either sampled by an engine or inserted by an
environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron_stare.records.batch import FinishReason, Prompt
from megatron_stare.records.token_numbers import TokenNumbers

# (weight version, number of tokens) of each run of tokens, in order; most responses have one or two
VersionRuns = tuple[tuple[int, int], ...]

# `given_up`: the response was abandoned unfinished; like a verifier's crash, it has no reward
RewardStatus = Literal["pending", "ok", "timeout", "crash", "given_up"]

NOT_SAMPLED = -1  # weight version of tokens that an environment wrote


@dataclass(frozen=True)
class Branch:
    """A branch of a response: a part of the response's tokens, preceded by a context of its own.
    The first branch, whose context is the prompt, has no `Branch` object.

    A response has several branches if its environment rewrites the history, or lets the policy act
    as several agents. Each token of a response belongs to exactly one branch, and was sampled after
    the context of this branch. A token that also occurs in the context of another branch carries no
    loss in that context.
    """

    start: int  # index in the response of the branch's first token
    context: tuple[int, ...]  # ids of the tokens before the first token; at least one


@dataclass
class Trajectory:
    """Response that an environment produced for a prompt, and the reward of this response.

    The environment sets loss_mask, which marks the tokens that carry loss. The loss, the quantiles,
    the gate, the counts and the forecast use only the tokens in loss_mask.
    """

    prompt: Prompt
    sample_index: int
    tokens: Tensor  # [n] int32
    # [n] float32, nats, of the temperature-scaled distribution; 0 for tokens of the environment
    log_probs: Tensor
    loss_mask: Tensor  # [n] bool, False for tokens of the environment
    versions: VersionRuns  # covers all n tokens
    finish_reason: FinishReason
    text: str = ""  # all turns and the environment's words between them; for people
    # the policy's part of `text`, which verifiers read; None: all of `text`
    sampled_text: str | None = None
    # set by an environment that judges its own responses, else by the verifier's verdict
    reward: float | None = None
    reward_status: RewardStatus = "pending"
    verdict_detail: str = ""  # why an environment that judges gave no reward
    # [m, L, K] experts of the first m tokens of prompt and response; see `routing_column`
    experts: Tensor | None = None
    # index in `said` where the answer begins; -1: no answer; None: not known
    answer_at: int | None = None
    answer: str | None = None  # in the verifier's normal form; "": no answer; None: not known
    numbers: TokenNumbers | None = None  # per-token values, on the few trajectories that show them
    turns: int = 1  # of the policy
    # by ascending start, after the first branch, whose context is the prompt
    branches: Sequence[Branch] = ()
    # Calls of tools, in order, of values that JSON can hold: {"turn": from 1, "name": text, or None
    # for a malformed call, "asked": arguments, or a malformed call's text, "answer": text,
    # "failed": bool, "seconds": s, "tokens": masked tokens of all answers to a turn, with its first
    # call}.
    calls: Sequence[Mapping[str, Any]] = ()
    # for stored samples only: the text of every token; see rollout.model_folder.token_texts
    pieces: Sequence[str] = ()

    def __len__(self) -> int:
        return self.tokens.numel()

    @property
    def said(self) -> str:
        """Text that the policy wrote, without the environment's words.

        Verifiers, and all code that counts words or answers, read only the policy's own text.
        """
        return self.text if self.sampled_text is None else self.sampled_text

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Returns two indices for every branch: the index of its first token, and the index after
        its last token."""
        return list(pairwise([0, *(branch.start for branch in self.branches), len(self)]))

    @property
    def judged(self) -> bool:
        """Returns True if the trajectory has a reward that the method can use. If a verifier that
        runs in a local process times out, the reward is 0. If a verifier that is called over HTTP
        times out, there is no reward."""
        return self.reward is not None and self.reward_status in ("ok", "timeout")

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


def runs_between(versions: VersionRuns, start: int, end: int) -> VersionRuns:
    """Returns the part of `versions` that covers the tokens from `start` to `end`, excluding
    `end`."""
    ends = list(accumulate(length for _, length in versions))
    cut = (
        (version, min(last, end) - max(last - length, start))
        for (version, length), last in zip(versions, ends, strict=True)
    )
    return tuple((version, length) for version, length in cut if length > 0)


def sampled_trajectory(
    prompt: Prompt,
    sample_index: int,
    tokens: Iterable[int],
    log_probs: Iterable[float],
    version: int = 0,
    finish_reason: FinishReason = "stop",
) -> Trajectory:
    """Builds a single-turn trajectory from Python numbers, for tools and tests. The argument
    `version` becomes the weight version of every token."""
    ids = torch.tensor([*tokens], dtype=torch.int32)
    return Trajectory(
        prompt=prompt,
        sample_index=sample_index,
        tokens=ids,
        log_probs=torch.tensor([*log_probs], dtype=torch.float32),
        loss_mask=torch.ones(len(ids), dtype=torch.bool),
        versions=((version, len(ids)),) if len(ids) else (),
        finish_reason=finish_reason,
    )


def routing_column(numbers: np.ndarray, layers: int, each: int, experts: int) -> Tensor:
    """Returns a tensor [m, L, K] of expert numbers. Each entry has one byte if a layer has at most
    255 experts, and two bytes otherwise. The largest value of the tensor's dtype stands for an
    unknown expert; see `unknown`.

    Args:
        numbers: expert numbers, ordered by token and then by layer.
        layers: L.
        each: K, the number of experts to which a token is routed.
        experts: number of experts in a layer.

    Raises:
        ValueError: the numbers do not fill a whole number of tokens, or an expert number is out of
            range.
    """
    if numbers.size % (layers * each):
        raise ValueError(
            f"{numbers.size} experts are not {each} in each of {layers} layers for every token"
        )
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < experts:
        raise ValueError(f"numbers {numbers.min()} to {numbers.max()} of {experts} experts")
    dtype = np.uint8 if experts <= unknown(torch.uint8) else np.int16
    return torch.from_numpy(numbers.astype(dtype).reshape(-1, layers, each))


def unknown(dtype: torch.dtype) -> int:
    """Returns the number that stands for an unknown expert; no expert has this number. Where the
    engine's expert is unknown, the trainer's router chooses an expert."""
    return torch.iinfo(dtype).max
