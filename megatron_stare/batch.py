"""The records that travel between data, rollout, rewards and training. Imports torch only.

Shape legend: B samples, N response positions of all samples laid end to end, T prompt and response positions of all
samples laid end to end. Samples stand in canonical order: prompt cursor first, then sample number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """One problem to be answered.

    `cursor` counts the prompts drawn since the run began, so it is unique in a run and orders every batch.
    """

    cursor: int
    id: str
    text: str
    answer: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SamplingParams:
    """How an engine samples. Every field is sent explicitly; `seed` keys the noise (see rollout/sampling.py)."""

    temperature: float
    max_new_tokens: int
    seed: int
    step: int
    stop_token_ids: tuple[int, ...]
    greedy: bool = False
    top_p: float = 1.0  # below 1 the sampling support is cut: evaluation may, training never


@dataclass
class Sample:
    """One response to one prompt, as an engine returned it and a verifier scored it."""

    prompt: Prompt
    sample_index: int
    response_ids: list[int]
    rollout_log_probs: list[float]  # nats, of the temperature-scaled distribution
    weight_versions: list[int]  # one a token
    finish_reason: FinishReason
    text: str = ""
    loss_mask: list[bool] | None = None  # False: not sampled (a tool observation); None: every token was sampled
    reward: float | None = None
    reward_status: Literal["pending", "ok", "timeout", "crash"] = "pending"
    answer_at: int | None = None  # character of `text` where the answer begins; -1: no answer; None: not known

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass
class RolloutBatch:
    """Samples as flat tensors, in canonical order, equally laid out for every rank."""

    tokens: Tensor  # [T] int64, each sample's prompt then response
    prompt_lengths: Tensor  # [B] int64
    response_lengths: Tensor  # [B] int64
    sampled: Tensor  # [N] bool, False on tool observations
    rollout_log_probs: Tensor  # [N] float32
    weight_versions: Tensor  # [N] int64
    groups: Tensor  # [B] int64, 0..G-1
    rewards: Tensor  # [B] float64
    scored: Tensor  # [B] bool, False where the verifier failed
    truncated: Tensor  # [B] bool
    advantages: Tensor | None = None  # [B], filled in by the method
    step: int = 0  # keys seeded draws of methods

    @property
    def size(self) -> int:
        return self.prompt_lengths.numel()

    @property
    def lengths(self) -> Tensor:
        """[B] prompt plus response, tokens."""
        return self.prompt_lengths + self.response_lengths

    def first(self, samples: int) -> RolloutBatch:
        """The batch of its first `samples` samples."""
        tokens, responses = int(self.lengths[:samples].sum()), int(self.response_lengths[:samples].sum())
        sizes = {"tokens": tokens, "sampled": responses, "rollout_log_probs": responses, "weight_versions": responses}
        kept: dict[str, Any] = {
            name: x[: sizes.get(name, samples)] for name, x in vars(self).items() if isinstance(x, Tensor)
        }
        return replace(self, **kept)

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], step: int = 0) -> RolloutBatch:
        """Sorts into canonical order and flattens."""
        samples = sorted(samples, key=lambda s: (s.prompt.cursor, s.sample_index))
        cursors = sorted({s.prompt.cursor for s in samples})
        group_of = {cursor: group for group, cursor in enumerate(cursors)}

        def flat(rows: list[list[int]] | list[list[bool]] | list[list[float]], dtype: torch.dtype) -> Tensor:
            return torch.tensor([x for row in rows for x in row], dtype=dtype)

        return cls(
            tokens=flat([[*s.prompt.token_ids, *s.response_ids] for s in samples], torch.int64),
            prompt_lengths=torch.tensor([len(s.prompt.token_ids) for s in samples]),
            response_lengths=torch.tensor([len(s.response_ids) for s in samples]),
            sampled=flat([s.loss_mask or [True] * len(s.response_ids) for s in samples], torch.bool),
            rollout_log_probs=flat([s.rollout_log_probs for s in samples], torch.float32),
            weight_versions=flat([s.weight_versions for s in samples], torch.int64),
            groups=torch.tensor([group_of[s.prompt.cursor] for s in samples]),
            rewards=torch.tensor([s.reward if s.reward is not None else 0.0 for s in samples], dtype=torch.float64),
            scored=torch.tensor([s.reward_status == "ok" for s in samples]),
            truncated=torch.tensor([s.truncated for s in samples]),
            step=step,
        )


# fields of TokenBatch that describe the whole batch, not one position each
_WHOLE_BATCH = frozenset(
    ("num_sequences", "sequence_lengths", "groups", "rewards", "penalties", "num_groups", "max_length", "step")
)


@dataclass
class TokenBatch:
    """What a method sees: response positions laid end to end ([N]), whatever part of the batch they are.

    `log_prob` carries gradient in the training pass; everything else is detached. `index` numbers every response
    position of the whole batch in canonical order, so that ties are broken alike in every layout.
    """

    log_prob: Tensor  # [N] under the current policy, nats
    old_log_prob: Tensor  # [N] from the log-prob pass
    rollout_log_prob: Tensor  # [N] from the engine
    entropy: Tensor  # [N] nats, from the log-prob pass
    advantage: Tensor  # [N]
    mask: Tensor  # [N] bool, positions that carry loss
    sequence: Tensor  # [N] int64, which sample of the whole batch
    position: Tensor  # [N] int64, from the start of the response
    index: Tensor  # [N] int64, canonical
    num_sequences: int  # samples of the optimizer step's batch with loss positions
    current_entropy: Tensor | None = None  # [N] with gradient, in the training pass of methods that ask for it
    sequence_lengths: Tensor | None = None  # [B] loss positions of each sample; 0 outside the optimizer step's batch
    selection_log_prob: Tensor | None = None  # [N] what surprisals and selections read; None: old_log_prob
    reference_log_prob: Tensor | None = None  # [N] under the reference policy, for methods that ask for it
    sum_p2: Tensor | None = None  # [N] sum of p^2 over the vocabulary, for the entropy sensitivity
    sum_p2_log_p: Tensor | None = None  # [N] sum of p^2 ln p over the vocabulary
    groups: Tensor | None = None  # [B] int64 prompt group of each sample of the whole batch
    rewards: Tensor | None = None  # [B] as the verifier gave them, before shaping
    penalties: Tensor | None = None  # [B] what shaping added to them; None: nothing
    num_groups: int = 0  # prompt groups of the whole batch
    max_length: int = 0  # positions of the longest response of the whole batch
    step: int = 0  # keys seeded draws

    @property
    def surprisal(self) -> Tensor:
        """[N] s = max(-ln p, 0) + 0.0 of the sampled token, detached; the sum turns -0.0 into 0.0."""
        return (-self.selected_by).clamp_min(0) + 0.0

    @property
    def selected_by(self) -> Tensor:
        """[N] the log-prob that selections read, detached: the same in the requests and in every micro-batch."""
        chosen = self.old_log_prob if self.selection_log_prob is None else self.selection_log_prob
        return chosen.detach()

    def select(self, rows: Tensor) -> TokenBatch:
        """The same record for some of its positions ([n] int64)."""
        per_token = {
            f.name: value[rows]
            for f in fields(self)
            if f.name not in _WHOLE_BATCH and (value := getattr(self, f.name)) is not None
        }
        return replace(self, **per_token)


@dataclass(frozen=True)
class MicroBatchPlan:
    """Which samples every data-parallel rank takes in every micro-batch: `ranks[dp_rank][micro_batch]` = samples.

    One plan serves the log-prob pass and training, so on-policy ratios are 1. Every rank has the same number of
    micro-batches; an empty one is a dummy that runs with coefficient 0. The micro-batches of one mini-batch, the batch
    of an optimizer step, stand together: `sizes` says how many each mini-batch has; (): all are one mini-batch.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    sizes: tuple[int, ...] = ()

    @property
    def micro_batches(self) -> int:
        return len(self.ranks[0])

    @property
    def mini_batches(self) -> list[slice]:
        """The micro-batches of every mini-batch."""
        sizes = self.sizes or (self.micro_batches,)
        return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def samples(self, mini_batch: int) -> list[int]:
        """The samples of one mini-batch, in canonical order."""
        where = self.mini_batches[mini_batch]
        return sorted(sample for rank in self.ranks for micro_batch in rank[where] for sample in micro_batch)
