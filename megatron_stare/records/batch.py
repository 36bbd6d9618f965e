"""Defines prompts, the batch of response tokens that is a method's input, and the plan of
micro-batches. Torch is the only library that this module imports.

Shape legend: B = samples of a rollout batch in canonical order (by prompt cursor, then by sample
number); N = response positions of some samples, concatenated.
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

    `cursor` is the number of prompts that the run drew before this prompt. Every cursor is unique
    in a run, and every batch is ordered by cursor. Prompts with the same non-empty `problem` are
    rewordings of one problem. Two prompts with an empty `problem` are the same problem only if
    their texts and answers are equal.
    """

    cursor: int
    id: str
    text: str
    answer: str
    token_ids: tuple[int, ...] = ()
    problem: str = ""
    # `data.columns` of the prompt's row, for the verifier; ignored when prompts are compared
    columns: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Demonstration(Prompt):
    """One conversation for supervised training. `token_ids` are the ids of the tokens before the
    first token that carries loss.

    `response`: ids of all tokens that follow `token_ids` in the conversation. At least one token
        follows.
    `loss_mask`: True for each token of `response` that the assistant wrote.
    `written`: the response as text. The text is for people; training uses only the token ids.
    """

    response: tuple[int, ...] = ()
    loss_mask: tuple[bool, ...] = ()
    written: str = ""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of an engine. Every field is sent to the engine, even if the field has its
    default value. `seed` determines the sampling noise (rollout/engines/sampling.py)."""

    temperature: float
    max_new_tokens: int
    seed: int
    step: int
    stop_token_ids: tuple[int, ...]
    greedy: bool = False
    top_p: float = 1.0  # below 1 only in evaluation, because it cuts the sampling support
    return_experts: bool = False  # also return the experts that each token was routed to


# fields of TokenBatch that describe the whole batch instead of single positions
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
    """Input of a method: response tokens, and data about each of these tokens. Each column is a
    tensor [N] with one entry per token. The tokens come from all responses of a rollout batch, a
    mini-batch or a micro-batch.

    In the training pass, `log_prob` and `current_entropy` carry a gradient. All other columns are
    detached. The column `index` contains the number of each response position in the canonical
    order of the whole batch. If two tokens have equal values, a selection prefers the token with
    the lower `index`, so the result is the same in every layout.
    """

    log_prob: Tensor  # [N] under the current policy, nats
    old_log_prob: Tensor  # [N] from the log-prob pass
    rollout_log_prob: Tensor  # [N] from the engine
    entropy: Tensor  # [N] nats, from the log-prob pass
    advantage: Tensor  # [N]
    loss_mask: Tensor  # [N] bool, positions that carry loss
    sequence: Tensor  # [N] int64, number of the sample in the whole batch
    position: Tensor  # [N] int64, from the start of the response
    index: Tensor  # [N] int64, canonical
    num_sequences: int  # samples of the optimizer step's batch with loss positions
    baseline_mask: Tensor | None = (
        None  # [N] bool, positions of responses in the baseline; None: `loss_mask`
    )
    # [N] entropy with gradient, in the training pass, if the method needs it
    current_entropy: Tensor | None = None
    # [B] loss positions of each sample; 0 outside the optimizer step's batch
    sequence_lengths: Tensor | None = None
    # [N] log-prob that surprisals and selections read; None: old_log_prob
    selection_log_prob: Tensor | None = None
    selection_entropy: Tensor | None = None  # [N] nats, read by selections; None: entropy
    # [N] log-prob under the reference policy, if the method needs it
    reference_log_prob: Tensor | None = None
    sum_p2: Tensor | None = None  # [N] sum of p^2 over the vocabulary, for the entropy sensitivity
    sum_p2_log_p: Tensor | None = None  # [N] sum of p^2 ln p over the vocabulary
    groups: Tensor | None = None  # [B] int64 prompt group of each sample of the whole batch
    rewards: Tensor | None = None  # [B] rewards of the verifier, before shaping
    penalties: Tensor | None = None  # [B] what shaping added to the rewards; None: nothing
    num_groups: int = 0  # prompt groups of the whole batch
    max_length: int = 0  # positions of the longest response of the whole batch
    step: int = 0  # keys seeded draws
    # sums a tensor differentiably over the ranks that share a response (all must call it); None:
    # responses are whole on their rank
    over_ranks: Callable[[Tensor], Tensor] | None = None

    @property
    def in_baseline(self) -> Tensor:
        """[N] bool: True for the positions of responses whose rewards enter the baseline of the
        advantages. With the setting `truncated: mask`, the rewards of truncated responses enter the
        baseline, although the tokens of truncated responses carry no loss. With `truncated: mask`,
        `in_baseline` is True and `loss_mask` is False for the tokens of a truncated response."""
        return self.loss_mask if self.baseline_mask is None else self.baseline_mask

    @property
    def surprisal(self) -> Tensor:
        """[N] surprisal of the sampled token, s = max(-ln p, 0), detached. Never -0.0."""
        return (-self.selected_by).clamp_min(0) + 0.0

    @property
    def selected_by(self) -> Tensor:
        """[N] detached log-probs that a method uses to select tokens. The statistics of the whole
        batch are computed from the log-probs in `selected_by`, so that selections and statistics
        agree."""
        chosen = self.old_log_prob if self.selection_log_prob is None else self.selection_log_prob
        return chosen.detach()

    @property
    def selecting_entropy(self) -> Tensor:
        """[N] detached entropies, in nats, that a method uses to select tokens. The entropy
        normally comes from the same policy as the log-probs in `selected_by`. If `selected_by`
        contains an engine's log-probs, the entropy comes from the log-prob pass, because engines
        return no entropies."""
        chosen = self.entropy if self.selection_entropy is None else self.selection_entropy
        return chosen.detach()

    def select(self, rows: Tensor) -> TokenBatch:
        """Returns a TokenBatch that contains only the positions `rows` ([n] int64) of this
        batch."""
        per_token = {
            f.name: value[rows]
            for f in fields(self)
            if f.name not in _WHOLE_BATCH and (value := getattr(self, f.name)) is not None
        }
        return replace(self, **per_token)


@dataclass(frozen=True)
class MicroBatchPlan:
    """Assignment of branches to the micro-batches of every data-parallel rank.
    `ranks[dp_rank][micro_batch]` lists the branches of one micro-batch. Most samples have one
    branch (rollout_batch.Branches).

    The log-prob pass and the training pass use the same plan, so on-policy ratios are exactly 1.
    Every data-parallel rank has the same number of micro-batches. If the branches of one rank fill
    fewer micro-batches than the branches of another rank, the first rank gets additional, empty
    micro-batches. The loss of an empty micro-batch has coefficient 0. The micro-batches of a
    mini-batch (the batch of one optimizer step) are consecutive. `sizes` contains the number of
    micro-batches of each mini-batch. If `sizes` is empty, all micro-batches form one mini-batch.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    sizes: tuple[int, ...] = ()

    @property
    def micro_batches(self) -> int:
        return len(self.ranks[0])

    @property
    def mini_batches(self) -> list[slice]:
        """One slice for each mini-batch. The slice selects the mini-batch's micro-batches from a
        rank's list of micro-batches."""
        sizes = self.sizes or (self.micro_batches,)
        return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def branches(self, mini_batch: int) -> list[int]:
        """Returns the branches of one mini-batch, in canonical order."""
        where = self.mini_batches[mini_batch]
        return sorted(
            branch for rank in self.ranks for micro_batch in rank[where] for branch in micro_batch
        )

    def branches_of(self, dp_rank: int) -> list[int]:
        """Returns the branches of one data-parallel rank, in canonical order."""
        return sorted(branch for micro_batch in self.ranks[dp_rank] for branch in micro_batch)
