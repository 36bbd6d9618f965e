"""Defines the objective of one optimizer step on the last pipeline stage. An `Objective` computes
the method's loss for each micro-batch of the step, and lists the metrics to log.

Shape legend: N = response positions of this rank, n = response positions of a micro-batch, as in
microbatch.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_stare.algorithms.method import Method, State
from megatron_stare.megatron.batching.microbatch import MicroBatch, RankBatch
from megatron_stare.megatron.step.measured import ENTROPY, LOG_PROB
from megatron_stare.ops.micro_batch_scope import gather_by_micro_batch, summary
from megatron_stare.ops.statistics_executor import gather_statistics
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Max, Mean, Request, Statistics, Sum
from megatron_stare.records.metric import Metric

METRICS = (
    Metric(
        "loss/policy",
        "loss",
        "what the update minimises: the sum of coefficient times token loss, all terms included",
        "near 0 on policy; its size says little",
    ),
    Metric(
        "ratio/max_abs_log",
        "nats",
        "largest |ln ratio| of new and old policy over the tokens of all updates",
        "exactly 0 with one update a batch; below some tenths with several",
    ),
)


@dataclass(frozen=True)
class Objective:
    """The loss of one optimizer step, and the metrics that are logged for the step.

    `tokens`: this rank's N positions. The positions of other mini-batches are masked, and the token
        counts cover only this mini-batch.
    `rows`: [m] int64 indices of the mini-batch's m positions among this rank's N positions.
    `statistics`: statistics of the mini-batch over all ranks.
    `own`: the statistics of each micro-batch, keyed by the micro-batch's span. If the setting
        statistics.scope is micro_batch, each micro-batch uses its entry in the dict `own`, and not
        the field `statistics`. If statistics.scope is not micro_batch, the dict `own` is empty.
    `is_log_prob_pass`: whether this training pass is also the log-prob pass. In a log-prob pass,
        the old log-probs equal the current log-probs.
    """

    method: Method
    tokens: TokenBatch
    rows: Tensor
    statistics: Statistics
    state: State
    own: Mapping[tuple[int, int], Statistics] = field(default_factory=dict)
    is_log_prob_pass: bool = False

    def loss(
        self, log_prob: Tensor, entropy: Tensor, micro: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns a micro-batch's part of the loss, and a dict of tensors [n] to log. This method
        is a LossFunction (megatron/model/head.py)."""
        tokens, statistics = self.tokens_of(log_prob, entropy, micro), self.statistics_of(micro)
        passed = (
            {LOG_PROB: tokens.old_log_prob, ENTROPY: tokens.entropy}
            if self.is_log_prob_pass
            else {}
        )
        terms = self.method.token_loss(tokens, statistics, self.state)
        scale = self.method.coefficients(tokens, statistics)
        # torch.where instead of a product: a masked position may have a loss that is not finite
        each = torch.where(scale > 0, scale * terms.loss, 0.0)
        log_ratio = (log_prob.detach() - tokens.old_log_prob).abs()
        return each.sum(), {
            "loss/policy": each.detach(),
            "ratio/max_abs_log": log_ratio,
            **terms.shares,
            **passed,
        }

    def tokens_of(self, log_prob: Tensor, entropy: Tensor, micro: MicroBatch) -> TokenBatch:
        """Returns the TokenBatch that the method gets for a micro-batch. The TokenBatch contains
        the current log-probs [n] and, if the method needs their gradient, the current entropies
        [n]."""
        rows = torch.arange(micro.span.start, micro.span.stop, device=log_prob.device)
        tokens = replace(
            self.tokens.select(rows),
            log_prob=log_prob,
            current_entropy=entropy if self.method.needs_entropy_gradient else None,
        )
        if self.is_log_prob_pass:
            tokens = replace(tokens, old_log_prob=log_prob.detach(), entropy=entropy.detach())
        return tokens

    def selected(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Returns [N] int8: the result of `Method.selected` at the positions of the given
        micro-batches, and 0 at other positions. Computes the result from the log-probs of the
        log-prob pass, not from the current log-probs."""
        found = torch.zeros_like(self.tokens.loss_mask, dtype=torch.int8)
        for micro in micro_batches:
            seen = self.tokens_of(
                self.tokens.old_log_prob[micro.span], self.tokens.entropy[micro.span], micro
            )
            found[micro.span] = self.method.selected(seen, self.statistics_of(micro))
        return found

    def statistics_of(self, micro: MicroBatch) -> Statistics:
        """Returns the statistics that the method uses for a micro-batch."""
        return self.own.get((micro.span.start, micro.span.stop), self.statistics)

    def requests(self, logged: Mapping[str, Tensor]) -> dict[str, Request]:
        """Returns a dict that maps the name of each metric of the update to a `Request`. A
        `Request` asks for a sum, a maximum or a mean over the mini-batch's tokens. Each `Request`
        contains the values that `loss` logged for this rank's tokens. The answer to a `Request`
        combines the values of all ranks, so each metric covers the tokens of all ranks."""
        mask = self.tokens.loss_mask[self.rows]
        asked: dict[str, Request] = {
            "loss/policy": Sum(logged["loss/policy"], mask),
            "ratio/max_abs_log": Max(logged["ratio/max_abs_log"], mask),
        }
        means = logged.keys() - asked.keys() - {LOG_PROB, ENTROPY}
        return asked | {name: Mean(logged[name], mask) for name in sorted(means)}


def make_objective(
    method: Method,
    part: RankBatch,
    tokens: TokenBatch,
    state: State,
    group: ProcessGroup | None,
    *,
    by_micro_batch: bool,
    is_log_prob_pass: bool,
    known: Statistics | None = None,
) -> Objective:
    """Computes the statistics of one mini-batch and returns its objective. All ranks of the last
    pipeline stage must call `make_objective`.

    Args:
        part: the mini-batch's micro-batches on this rank.
        tokens: the rank's N positions. Only the positions of the mini-batch count.
        group: group of the ranks over which the mini-batch's tokens are divided, or None if this
            rank holds all tokens.
        by_micro_batch: whether tokens are selected within each micro-batch separately.
        known: statistics of the mini-batch, or None to compute these statistics.
    """
    span = part.span
    rows = torch.arange(span.start, span.stop, device=part.device)
    if known is None:
        known = gather_statistics(partial(method.requests, tokens.select(rows)), group)
    own: dict[tuple[int, int], Statistics] = {}
    if by_micro_batch:
        spans = [(micro.span.start, micro.span.stop) for micro in part.micro_batches]
        cut = [tokens.select(torch.arange(*span, device=part.device)) for span in spans]
        within = part.layout.micro_batch_group
        parts = gather_by_micro_batch(
            [partial(method.requests, each) for each in cut], group, within
        )
        own = dict(zip(spans, parts, strict=True))
        known = summary(method.requests(tokens.select(rows), known), known, parts, group, within)
    return Objective(method, tokens, rows, known, state, own, is_log_prob_pass)
