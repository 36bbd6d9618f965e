"""One rank's part of a rollout batch: micro-batches for the model, and the flat view that methods see.

Shape legend: b samples and s positions of a micro-batch, right-padded; n response positions of a micro-batch; N those
of this rank, micro-batch after micro-batch; M those of the whole batch in canonical order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stare.batch import MicroBatchPlan, RolloutBatch, TokenBatch


@dataclass(frozen=True)
class MicroBatch:
    """What the model is fed, and which of its outputs score which response positions."""

    tokens: Tensor  # [b, s] int64
    positions: Tensor  # [b, s] int64
    rows: Tensor  # [n] int64, rows of the flattened [b s] outputs that predict a response token
    targets: Tensor  # [n] int64, the tokens they predict
    span: slice  # where these n stand among the rank's N


class RankBatch:
    """A rollout batch as data-parallel rank `dp_rank` takes it, following the plan."""

    def __init__(self, batch: RolloutBatch, plan: MicroBatchPlan, dp_rank: int, device: torch.device) -> None:
        self.batch = batch
        self.device = device
        token_start = _starts(batch.lengths)
        response_start = _starts(batch.response_lengths)
        self.micro_batches: list[MicroBatch] = []
        index, done = [torch.zeros(0, dtype=torch.int64)], 0
        for samples in plan.ranks[dp_rank]:
            micro, where = _micro_batch(batch, samples, token_start, response_start, done)
            self.micro_batches.append(_to(micro, device))
            index.append(where)
            done += where.numel()
        self.index = torch.cat(index)  # [N] canonical numbers of this rank's response positions
        self.sequence = torch.repeat_interleave(torch.arange(batch.size), batch.response_lengths)  # [M]
        self.position = torch.arange(self.sequence.numel()) - response_start[self.sequence]  # [M]

    def token_batch(self, log_prob: Tensor, entropy: Tensor) -> TokenBatch:
        """The flat view of this rank's positions, from the log-prob pass. log_prob and entropy are [N]."""
        batch, index = self.batch, self.index
        assert batch.advantages is not None
        sequence = self.sequence[index]
        counted = batch.sampled & batch.scored[self.sequence]  # [M]
        lengths = torch.zeros(batch.size, dtype=torch.int64).index_add_(0, self.sequence, counted.to(torch.int64))
        here = self.device
        return TokenBatch(
            log_prob=log_prob,
            old_log_prob=log_prob,
            rollout_log_prob=batch.rollout_log_probs[index].to(here),
            entropy=entropy,
            advantage=batch.advantages[sequence].to(here, torch.float32),
            mask=counted[index].to(here),
            sequence=sequence.to(here),
            position=self.position[index].to(here),
            index=index.to(here),
            num_sequences=int((lengths > 0).sum()),
            sequence_lengths=lengths.to(here),
        )


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


def _micro_batch(
    batch: RolloutBatch, samples: tuple[int, ...], token_start: Tensor, response_start: Tensor, done: int
) -> tuple[MicroBatch, Tensor]:
    """The micro-batch of these samples, and the canonical numbers [n] of its response positions."""
    if not samples:  # a dummy: one padding token, no rows
        none, one = torch.zeros(0, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
        return MicroBatch(one, one, none, none, slice(done, done)), none
    chosen = torch.tensor(samples)
    lengths, prompts = batch.lengths[chosen], batch.prompt_lengths[chosen]
    b, s = len(samples), int(lengths.max())
    column = torch.arange(s).expand(b, s)
    real = column < lengths[:, None]
    source = token_start[chosen][:, None] + column
    tokens = torch.where(real, batch.tokens[source.clamp_max(batch.tokens.numel() - 1)], 0)
    # the output at column c predicts the token at c + 1
    predicts = (column >= prompts[:, None] - 1) & (column < lengths[:, None] - 1)
    rows = predicts.flatten().nonzero().squeeze(1)
    targets = torch.where(real, tokens, 0).roll(-1, dims=1).flatten()[rows]
    where = (response_start[chosen][:, None] + column - (prompts[:, None] - 1)).flatten()[rows]
    return MicroBatch(tokens, column.contiguous(), rows, targets, slice(done, done + rows.numel())), where


def _to(micro: MicroBatch, device: torch.device) -> MicroBatch:
    return MicroBatch(
        micro.tokens.to(device),
        micro.positions.to(device),
        micro.rows.to(device),
        micro.targets.to(device),
        micro.span,
    )
