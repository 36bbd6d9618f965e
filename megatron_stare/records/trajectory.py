"""One response to one prompt, of one turn or of several, as columns. Imports torch only.

Shape legend: n tokens of the response: those an engine sampled, and those an environment put
between them; L layers and K experts a token of a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron_stare.records.batch import FinishReason, Prompt
from megatron_stare.records.token_numbers import TokenNumbers

# (weight version, number of tokens) from the first token on: a response has one or two of them, its
# tokens thousands
VersionRuns = tuple[tuple[int, int], ...]

# `given_up`: the response was abandoned before it was whole; like a verifier's timeout or crash, it
# has no reward
RewardStatus = Literal["pending", "ok", "timeout", "crash", "given_up"]

NOT_SAMPLED = -1  # the version of tokens that no weights sampled: an environment wrote them


@dataclass
class Trajectory:
    """Response that an environment made of a prompt, and the verifier's reward for it.

    loss_mask is the environment's word on which tokens carry loss; everything after it obeys: loss,
    quantiles, gate, counts and forecast.
    """

    prompt: Prompt
    sample_index: int
    tokens: Tensor  # [n] int32
    # [n] float32, nats, of the temperature-scaled distribution; 0 where nothing was sampled
    log_probs: Tensor
    loss_mask: Tensor  # [n] bool, False where nothing was sampled
    versions: VersionRuns  # covers all n tokens
    finish_reason: FinishReason
    text: str = ""  # with what an environment said in between; for people
    # the policy's own part of `text`, all that a verifier reads; None: all of `text`
    sampled_text: str | None = None
    reward: float | None = None
    reward_status: RewardStatus = "pending"
    # [m, L, K] of the first m tokens of prompt and response; see `routing_column`
    experts: Tensor | None = None
    # character of `said` where the answer begins; -1: no answer; None: not known
    answer_at: int | None = None
    answer: str | None = None  # in the verifier's normal form; "": no answer; None: not known
    numbers: TokenNumbers | None = None  # of its tokens, on the few that are written out with them
    # for stored samples only: the text of every token; see rollout.model_folder.token_texts
    pieces: Sequence[str] = ()

    def __len__(self) -> int:
        return self.tokens.numel()

    @property
    def said(self) -> str:
        """Text of the policy alone, without the words of its environment.

        Verifiers read it, and so does all that counts words or answers.
        """
        return self.text if self.sampled_text is None else self.sampled_text

    @property
    def judged(self) -> bool:
        """Tells whether there is a reward to compare with others'; a verifier that ran out of time
        gives one, 0."""
        return self.reward is not None and self.reward_status in ("ok", "timeout")

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


def sampled_trajectory(
    prompt: Prompt,
    sample_index: int,
    tokens: Iterable[int],
    log_probs: Iterable[float],
    version: int = 0,
    finish_reason: FinishReason = "stop",
) -> Trajectory:
    """A single-turn trajectory from Python numbers, every token sampled by one version: for tools
    and tests."""
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
    """[m, L, K], a byte an entry where the model has at most 255 experts, else two; see `unknown`.

    Args:
        numbers: of experts, token by token, then layer by layer.
        each: experts a token goes to, K.
        experts: of a layer.

    Raises:
        ValueError: they are not those of whole tokens, or an expert is not one of the model's.
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
    """The number that stands for an expert that nobody named: the trainer's router chooses there.
    No expert has it."""
    return torch.iinfo(dtype).max


def covering(column: Tensor, tokens: int) -> Tensor:
    """[tokens, L, K] of a column [m, L, K] of the first m <= tokens of a sequence; the rest
    unknown. An engine never feeds the last token of a response to its model, and knows nothing of
    it."""
    more = torch.full(
        (tokens - len(column), *column.shape[1:]), unknown(column.dtype), dtype=column.dtype
    )
    return torch.cat([column, more])
