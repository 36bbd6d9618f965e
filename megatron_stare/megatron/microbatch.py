"""One rank's part of a rollout batch: micro-batches for the model, and the flat view that methods see.

Shape legend: b rows and s positions of a micro-batch (packed: one row of all tokens); n response positions of a
micro-batch, those that were sampled; N those of this rank, micro-batch after micro-batch; M those of the whole batch
in canonical order, tool observations too.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_stare.batch import MicroBatchPlan, RolloutBatch, TokenBatch
from megatron_stare.megatron.packing import PackedSequences, pack


@dataclass(frozen=True)
class MicroBatch:
    """What the model is fed, and which of its outputs score which response positions."""

    tokens: Tensor  # [b, s] int64
    positions: Tensor  # [b, s] int64
    rows: Tensor  # [n] int64, rows of the flattened [b s] outputs that predict a response token that was sampled
    targets: Tensor  # [n] int64, the tokens they predict
    span: slice  # where these n stand among the rank's N
    packing: PackedSequences | None = None


class RankBatch:
    """A rollout batch as data-parallel rank `dp_rank` takes it, following the plan.

    Args:
        packed: lay the sequences of a micro-batch end to end instead of padding them.
        multiple: positions of a micro-batch are padded to a multiple of this (sequence parallelism cuts them).
        uniform: give all micro-batches the shape of the largest.
    """

    def __init__(
        self,
        batch: RolloutBatch,
        plan: MicroBatchPlan,
        dp_rank: int,
        device: torch.device,
        *,
        packed: bool = False,
        multiple: int = 1,
        uniform: bool = False,
    ) -> None:
        self.batch = batch
        self.plan = plan
        self.device = device
        token_start = _starts(batch.lengths)
        response_start = _starts(batch.response_lengths)
        self.micro_batches: list[MicroBatch] = []
        index, done = [torch.zeros(0, dtype=torch.int64)], 0
        lay_out = _packed if packed else _padded
        grids = [lay_out(batch.lengths[list(samples)], multiple) for samples in plan.ranks[dp_rank]]
        if uniform:
            rows, columns = (max(grid.sample.shape[axis] for grid in grids) for axis in range(2))
            grids = [grid.stretched(rows, columns) for grid in grids]
        for samples, grid in zip(plan.ranks[dp_rank], grids, strict=True):
            micro, where = _micro_batch(batch, samples, grid, token_start, response_start, done)
            if packed:
                micro = replace(micro, packing=pack(_sizes(grid), device))
            self.micro_batches.append(_to(micro, device))
            index.append(where)
            done += where.numel()
        self.index = torch.cat(index)  # [N] canonical numbers of this rank's response positions
        self.sequence = torch.repeat_interleave(torch.arange(batch.size), batch.response_lengths)  # [M]
        self.position = torch.arange(self.sequence.numel()) - response_start[self.sequence]  # [M]

    def token_batch(
        self, log_prob: Tensor, entropy: Tensor, carries_loss: Tensor, enters_moments: Tensor, shaped: Tensor
    ) -> TokenBatch:
        """The flat view of this rank's positions.

        Args:
            log_prob: [N] from the log-prob pass.
            entropy: [N] likewise.
            carries_loss: [B] bool, responses whose sampled tokens carry loss.
            enters_moments: [B] bool, responses that the others are judged against.
            shaped: [B] rewards as the method shaped them.
        """
        batch, index = self.batch, self.index
        assert batch.advantages is not None
        sequence = self.sequence[index]
        counted = batch.sampled & carries_loss[self.sequence]  # [M]
        lengths = self._loss_lengths(carries_loss)
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
            moments_mask=(batch.sampled & enters_moments[self.sequence])[index].to(here),
            sequence_lengths=lengths.to(here),
            groups=batch.groups.to(here),
            rewards=batch.rewards.to(here),
            penalties=(shaped - batch.rewards).to(here),
            num_groups=int(batch.groups.max()) + 1,
            max_length=int(batch.response_lengths.max()),
            step=batch.step,
        )

    def mini_batch(self, number: int) -> RankBatch:
        """The micro-batches of one optimizer step alone; their spans are still those among the rank's N."""
        part = copy.copy(self)
        part.micro_batches = self.micro_batches[self.plan.mini_batches[number]]
        return part

    @property
    def span(self) -> slice:
        """Where the response positions of these micro-batches stand among the rank's N."""
        return slice(self.micro_batches[0].span.start, self.micro_batches[-1].span.stop)

    def tokens_of(self, number: int, tokens: TokenBatch, carries_loss: Tensor) -> TokenBatch:
        """The rank's N positions, of which only those of one mini-batch carry loss and are counted.

        Args:
            tokens: from `token_batch`.
            carries_loss: [B] bool, as given there.
        """
        mine = torch.zeros(self.batch.size, dtype=torch.bool)
        mine[self.plan.samples(number)] = True
        lengths = self._loss_lengths(carries_loss & mine)
        here = mine.to(self.device)[tokens.sequence]
        return replace(
            tokens,
            mask=tokens.mask & here,
            moments_mask=tokens.in_moments & here,
            num_sequences=int((lengths > 0).sum()),
            sequence_lengths=lengths.to(self.device),
        )

    def _loss_lengths(self, carries_loss: Tensor) -> Tensor:
        """[B] int64 loss positions of every sample; on the host, where the batch lies."""
        counted = self.batch.sampled & carries_loss[self.sequence]
        return torch.zeros(self.batch.size, dtype=torch.int64).index_add_(0, self.sequence, counted.to(torch.int64))


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


@dataclass(frozen=True)
class _Grid:
    """Which sample ([b, s], -1: padding) and which of its tokens ([b, s]) stands at every position."""

    sample: Tensor
    token: Tensor

    def stretched(self, rows: int, columns: int) -> _Grid:
        """With padding on the right and below."""
        more = (0, columns - self.sample.shape[1], 0, rows - self.sample.shape[0])
        sample = torch.nn.functional.pad(self.sample, more, value=-1)
        token = torch.arange(columns).expand(rows, columns).clone()
        token[: self.token.shape[0], : self.token.shape[1]] = self.token
        return _Grid(sample, token)


def _padded(lengths: Tensor, multiple: int) -> _Grid:
    """A row a sample, padded on the right. No sample makes a dummy of padding alone."""
    longest = int(lengths.max()) if len(lengths) else 1
    rows, columns = max(len(lengths), 1), longest + -longest % multiple
    token = torch.arange(columns).expand(rows, columns)
    number = torch.arange(rows)[:, None].expand(rows, columns)
    real = token < (lengths[:, None] if len(lengths) else 0)
    return _Grid(torch.where(real, number, -1), token)


def _packed(lengths: Tensor, multiple: int) -> _Grid:
    """One row of all samples end to end; padding, where there must be some, is a sequence of its own at the end."""
    total = int(lengths.sum())
    padding = multiple if total == 0 else -total % multiple
    number = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    token = torch.arange(total) - torch.repeat_interleave(_starts(lengths), lengths)
    filler = torch.full((padding,), -1)
    return _Grid(torch.cat([number, filler])[None], torch.cat([token, torch.arange(padding)])[None])


def _sizes(grid: _Grid) -> list[int]:
    """Lengths of the sequences of a packed grid, padding last."""
    return torch.unique_consecutive(grid.sample[0], return_counts=True)[1].tolist()


def _micro_batch(
    batch: RolloutBatch,
    samples: tuple[int, ...],
    grid: _Grid,
    token_start: Tensor,
    response_start: Tensor,
    done: int,
) -> tuple[MicroBatch, Tensor]:
    """The micro-batch of these samples, and the canonical numbers [n] of its response positions."""
    chosen = torch.tensor([*samples, 0])  # the last entry is what padding (-1) points to, and is masked
    real = grid.sample >= 0
    sample, token = chosen[grid.sample], grid.token
    last = batch.lengths[sample] - 1
    source = token_start[sample] + torch.where(real, torch.minimum(token, last), 0)
    tokens = torch.where(real, batch.tokens[source], 0)
    # the output at token c predicts token c + 1
    first = batch.prompt_lengths[sample] - 1
    rows = (real & (token >= first) & (token < last)).flatten().nonzero().squeeze(1)
    where = (response_start[sample] + token - first).flatten()[rows]
    rows, where = rows[batch.sampled[where]], where[batch.sampled[where]]
    targets = batch.tokens[source.flatten()[rows] + 1]
    span = slice(done, done + rows.numel())
    return MicroBatch(tokens, token.contiguous(), rows, targets, span), where


def _to(micro: MicroBatch, device: torch.device) -> MicroBatch:
    return replace(
        micro,
        tokens=micro.tokens.to(device),
        positions=micro.positions.to(device),
        rows=micro.rows.to(device),
        targets=micro.targets.to(device),
    )
