"""Prompts, what methods see of their answers, and how these are cut into micro-batches. Imports
torch only.

Shape legend: B samples of a rollout batch in canonical order (prompt cursor first, then sample
number), N response positions of some of them laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Literal

from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """One problem to be answered.

    `cursor` counts the prompts drawn since the run began, so it is unique in a run and orders every
    batch. Prompts of one `problem` ask the same in other words; empty: only those of the same text
    and answer do.
    """

    cursor: int
    id: str
    text: str
    answer: str
    token_ids: tuple[int, ...] = ()
    problem: str = ""
    # `data.columns` of its row, for the verifier; no part of what makes two prompts equal
    columns: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class SamplingParams:
    """How an engine samples. Every field is sent explicitly; `seed` keys the noise
    (rollout/engines/sampling.py)."""

    temperature: float
    max_new_tokens: int
    seed: int
    step: int
    stop_token_ids: tuple[int, ...]
    greedy: bool = False
    top_p: float = 1.0  # below 1 the sampling support is cut: evaluation may, training never
    return_experts: bool = False  # of a mixture of experts, which of them each token went to


# fields of TokenBatch that describe the whole batch, not one position each
_WHOLE_BATCH = frozenset(
    (
        *(
            "num_sequences",
            "sequence_lengths",
            "groups",
            "rewards",
            "penalties",
            "num_groups",
            "max_length",
            "step",
        ),
        "over_ranks",
    )
)


@dataclass
class TokenBatch:
    """Response positions that a method sees, laid end to end ([N]), whatever part of the batch they
    are.

    `log_prob` carries gradient in the training pass; everything else is detached. `index` numbers
    every response position of the whole batch in canonical order, so that ties are broken alike in
    every layout.
    """

    log_prob: Tensor  # [N] under the current policy, nats
    old_log_prob: Tensor  # [N] from the log-prob pass
    rollout_log_prob: Tensor  # [N] from the engine
    entropy: Tensor  # [N] nats, from the log-prob pass
    advantage: Tensor  # [N]
    loss_mask: Tensor  # [N] bool, positions that carry loss
    sequence: Tensor  # [N] int64, which sample of the whole batch
    position: Tensor  # [N] int64, from the start of the response
    index: Tensor  # [N] int64, canonical
    num_sequences: int  # samples of the optimizer step's batch with loss positions
    baseline_mask: Tensor | None = (
        None  # [N] bool, positions of responses that others are judged against; None: `loss_mask`
    )
    # [N] with gradient, in the training pass of methods that ask for it
    current_entropy: Tensor | None = None
    # [B] loss positions of each sample; 0 outside the optimizer step's batch
    sequence_lengths: Tensor | None = None
    # [N] what surprisals and selections read; None: old_log_prob
    selection_log_prob: Tensor | None = None
    selection_entropy: Tensor | None = None  # [N] nats, what selections read; None: entropy
    # [N] under the reference policy, for methods that ask for it
    reference_log_prob: Tensor | None = None
    sum_p2: Tensor | None = None  # [N] sum of p^2 over the vocabulary, for the entropy sensitivity
    sum_p2_log_p: Tensor | None = None  # [N] sum of p^2 ln p over the vocabulary
    groups: Tensor | None = None  # [B] int64 prompt group of each sample of the whole batch
    rewards: Tensor | None = None  # [B] as the verifier gave them, before shaping
    penalties: Tensor | None = None  # [B] what shaping added to them; None: nothing
    num_groups: int = 0  # prompt groups of the whole batch
    max_length: int = 0  # positions of the longest response of the whole batch
    step: int = 0  # keys seeded draws
    # where a response is cut over several ranks: sums a tensor over them, differentiably, called by
    # all of them; None: responses are whole on their rank
    over_ranks: Callable[[Tensor], Tensor] | None = None

    @property
    def in_baseline(self) -> Tensor:
        """[N] bool, positions of responses that others are judged against; those without loss
        (`truncated: mask`) are outside `loss_mask`."""
        return self.loss_mask if self.baseline_mask is None else self.baseline_mask

    @property
    def surprisal(self) -> Tensor:
        """[N] s = max(-ln p, 0) + 0.0 of the sampled token, detached; the sum turns -0.0 into
        0.0."""
        return (-self.selected_by).clamp_min(0) + 0.0

    @property
    def selected_by(self) -> Tensor:
        """[N] the log-prob that selections read, detached: the same in the requests and in every
        micro-batch."""
        chosen = self.old_log_prob if self.selection_log_prob is None else self.selection_log_prob
        return chosen.detach()

    @property
    def selecting_entropy(self) -> Tensor:
        """[N] nats, the entropy that selections read, detached: of the same policy as
        `selected_by`, but for log-probs of the engine, which gives no entropies."""
        chosen = self.entropy if self.selection_entropy is None else self.selection_entropy
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
    """Which samples every data-parallel rank takes in every micro-batch:
    `ranks[dp_rank][micro_batch]` = samples.

    One plan serves the log-prob pass and training, so on-policy ratios are 1. Every rank has the
    same number of micro-batches; an empty one is a dummy that runs with coefficient 0. The
    micro-batches of one mini-batch, the batch of an optimizer step, stand together: `sizes` says
    how many each mini-batch has; (): all are one mini-batch.
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
        return sorted(
            sample for rank in self.ranks for micro_batch in rank[where] for sample in micro_batch
        )

    def samples_of(self, dp_rank: int) -> list[int]:
        """The samples that a data-parallel rank takes, in canonical order."""
        return sorted(sample for micro_batch in self.ranks[dp_rank] for sample in micro_batch)
