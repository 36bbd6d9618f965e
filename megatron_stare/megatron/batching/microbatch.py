"""Defines `RankBatch`, which is one rank's share of a rollout batch. The model receives this share
as micro-batches. The RL algorithm receives this share as flat tensors with one entry per response
position.

Shape legend: a micro-batch has b rows and s positions. A packed micro-batch has one row with all
tokens. The number of response positions in the loss mask of one micro-batch is n. The loss masks of
this rank's micro-batches together contain N response positions, ordered by micro-batch. The whole
batch has B samples. In a mixture of experts, L is the number of layers, and K is the number of
experts per token.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, all_reduce

from megatron_stare.megatron.batching.packing import PackedSequences
from megatron_stare.megatron.batching.sequence_layout import Grid, SequenceLayout
from megatron_stare.records.batch import MicroBatchPlan, TokenBatch
from megatron_stare.records.rollout_batch import RankShare
from megatron_stare.records.trajectory import unknown

HOST = torch.device("cpu")


@dataclass(frozen=True)
class MicroBatch:
    """Input of one model pass, and the indices of the outputs that predict response tokens."""

    tokens: Tensor  # [b, s] int64
    positions: Tensor  # [b, s] int64
    # [n] int64, rows of the flattened [b s] outputs that predict a response token in the loss mask
    rows: Tensor
    targets: Tensor  # [n] int64, the tokens that `rows` predict
    span: slice  # range of these n among the rank's N
    layout: SequenceLayout
    packing: PackedSequences | None = None
    # [L, s, b, K] the engine's experts of every token in every layer, in the routers' layout; stays
    # on the host
    experts: Tensor | None = None

    def to(self, device: torch.device, *, bounds: bool) -> MicroBatch:
        """Copies the tensors to the model's device without waiting for the copies. See
        PackedSequences.to for `bounds`."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _TENSORS}
        return replace(
            self, **moved, packing=self.packing.to(device, bounds=bounds) if self.packing else None
        )

    def pinned(self) -> MicroBatch:
        """Pins the tensors in host memory, for asynchronous copies to a GPU."""
        tensors = {name: getattr(self, name).pin_memory() for name in _TENSORS}
        packing = self.packing.pinned() if self.packing else None
        experts = self.experts.pin_memory() if self.experts is not None else None
        return replace(self, **tensors, packing=packing, experts=experts)


_TENSORS = ("tokens", "positions", "rows", "targets")


class RankBatch:
    """One rank's share of a rollout batch, cut into micro-batches according to a MicroBatchPlan.
    The micro-batches stay on the host until the model needs them.

    The following tensors are [N] int64, with one entry for every response position of this rank.

    `index`: index of the response position in the whole batch, counted from 0 through the responses
        of all samples.
    `sequence`: index of the sample to which the response position belongs.
    `position`: the token's index in the response, counted from 0.
    `held`: index into the flat tensors of `share` that have one entry for every response token,
        such as `share.rollout_log_probs`. The entry at this index belongs to the response position.

    Args:
        share: share of data-parallel rank `dp_rank`.

    Raises:
        ValueError: the samples in the share are not the samples that the plan gives to the rank.
    """

    def __init__(
        self,
        share: RankShare,
        plan: MicroBatchPlan,
        dp_rank: int,
        device: torch.device,
        layout: SequenceLayout,
    ) -> None:
        if share.own.tolist() != plan.branches_of(dp_rank):
            raise ValueError(f"data rank {dp_rank} was given the share of another")
        self.share = share
        self.plan = plan
        self.device = device
        self.layout = layout
        self.micro_batches: list[MicroBatch] = []
        branches = [torch.tensor(each, dtype=torch.int64) for each in plan.ranks[dp_rank]]
        lengths, contexts, alike = share.lengths, share.branches.contexts, _with_one_context(share)
        found, done = [], 0
        for chosen, full in zip(
            branches, layout.lay_out([lengths[each] for each in branches]), strict=True
        ):
            whole = layout.share(full, contexts[chosen], alike[chosen])
            micro, where = _micro_batch(share, chosen, layout.split(whole), done, layout)
            micro = replace(micro, packing=layout.describe(whole, HOST))
            self.micro_batches.append(micro.pinned() if device.type == "cuda" else micro)
            found.append(where)
            done += micro.rows.numel()
        self.sequence, self.position, self.held = torch.cat(found, dim=1)
        self.index = (share.response_lengths.cumsum(0) - share.response_lengths)[
            self.sequence
        ] + self.position

    def token_batch(self, log_prob: Tensor, entropy: Tensor) -> TokenBatch:
        """Returns a TokenBatch, whose flat columns have one entry for each of this rank's response
        positions. Before this call, `Method.judge` must have set the batch's advantages.

        Args:
            log_prob: [N] from the log-prob pass.
            entropy: [N] from the log-prob pass.
        """
        share, here = self.share, self.device
        assert share.advantages is not None and share.carries_loss is not None
        assert share.baseline_mask is not None and share.penalties is not None
        lengths, ranks = self._loss_lengths(share.carries_loss), self.layout.micro_batch_group
        return TokenBatch(
            log_prob=log_prob,
            old_log_prob=log_prob,
            rollout_log_prob=share.rollout_log_probs[self.held].to(here),
            entropy=entropy,
            advantage=share.advantages[self.sequence].to(here, torch.float32),
            loss_mask=share.carries_loss[self.sequence].to(here),
            sequence=self.sequence.to(here),
            position=self.position.to(here),
            index=self.index.to(here),
            num_sequences=int((lengths > 0).sum()),
            baseline_mask=share.baseline_mask[self.sequence].to(here),
            sequence_lengths=lengths.to(here),
            groups=share.groups.to(here),
            rewards=share.rewards.to(here),
            penalties=share.penalties.to(here),
            num_groups=int(share.groups.max()) + 1,
            max_length=int(share.response_lengths.max()),
            step=share.step,
            over_ranks=partial(sum_over_ranks, group=ranks) if ranks is not None else None,
        )

    def mini_batch(self, number: int) -> RankBatch:
        """Returns a batch that contains only the micro-batches of one optimizer step. The tensors
        `index`, `sequence`, `position` and `held` of the returned batch still cover all N response
        positions of the rank. To get only the entries of the mini-batch, index these tensors with
        the property `span` of the returned batch."""
        part = copy.copy(self)
        part.micro_batches = self.micro_batches[self.plan.mini_batches[number]]
        return part

    @property
    def span(self) -> slice:
        """Range of this batch's response positions among the rank's N response positions."""
        return slice(self.micro_batches[0].span.start, self.micro_batches[-1].span.stop)

    def tokens_of(self, number: int, tokens: TokenBatch) -> TokenBatch:
        """Returns a copy of `tokens` for one mini-batch. `number` is the index of the mini-batch.
        The columns of the copy keep all N response positions of the rank. The masks,
        `num_sequences` and `sequence_lengths` cover only this mini-batch.

        Args:
            tokens: from `token_batch`.
        """
        assert self.share.carries_loss is not None
        mine = torch.zeros(self.share.size, dtype=torch.bool)
        mine[self.share.branches.samples[self.plan.branches(number)]] = True
        lengths = self._loss_lengths(self.share.carries_loss & mine)
        here = mine.to(self.device)[tokens.sequence]
        return replace(
            tokens,
            loss_mask=tokens.loss_mask & here,
            baseline_mask=tokens.in_baseline & here,
            num_sequences=int((lengths > 0).sum()),
            sequence_lengths=lengths.to(self.device),
        )

    def _loss_lengths(self, carries_loss: Tensor) -> Tensor:
        """Returns, for every sample, the number of response positions that carry loss, [B] int64.
        The returned tensor is in host memory, like all tensors of the RankShare."""
        return torch.where(carries_loss, self.share.loss_lengths, 0)


def _with_one_context(share: RankShare) -> Tensor:
    """Returns an integer ID for the context of each branch, as [S] int64 for S branches. If two
    branches have the same ID, their contexts are equal. If the context of a branch is only the
    prompt, the branch's ID is the index of the branch's prompt group. If the context of a branch is
    not the prompt alone, the branch has a unique ID."""
    if share.branched is None:
        return share.groups
    branches = share.branched
    own = share.groups.max() + 1 + torch.arange(branches.size)
    return torch.where(branches.of_prompt, share.branch_groups, own)


def _micro_batch(
    share: RankShare, chosen: Tensor, grid: Grid, done: int, layout: SequenceLayout
) -> tuple[MicroBatch, Tensor]:
    """Returns the micro-batch of the chosen branches, and a tensor [3, n] that describes the
    micro-batch's response positions. Each column of the tensor describes one response position. Row
    0 of the tensor contains the index `sequence`, row 1 the index `position`, and row 2 the index
    `held`. The docstring of RankBatch defines these three indices."""
    branches, lengths = share.branches, share.lengths
    # the last entry is for padding, whose branch is -1
    number = torch.cat([chosen, torch.zeros(1, dtype=torch.int64)])
    real = grid.sample >= 0
    branch, token = number[grid.sample], grid.token
    # the output at token c predicts token c + 1
    first, last = branches.contexts[branch] - 1, lengths[branch] - 1
    rows = (real & (token >= first) & (token < last)).flatten().nonzero().squeeze(1)
    of, place = branch.flatten()[rows], (token - first).flatten()[rows]
    where = torch.stack(
        [
            branches.samples[of],
            branches.starts[of] + place,
            share.starts(branches.responses)[of] + place,
        ]
    )
    kept = share.loss_mask[where[2]]
    rows, where = rows[kept], where[:, kept]
    source = share.starts(lengths)[branch] + token
    tokens = torch.zeros(grid.sample.shape, dtype=torch.int64)
    tokens[real] = share.tokens[source[real]].to(torch.int64)
    targets = share.tokens[source.flatten()[rows] + 1].to(torch.int64)
    if grid.shared is not None:  # packed: a single row, [1, s]
        tokens = tokens[:, grid.shared.fed]
        token = token[:, grid.shared.fed]
        rows = grid.shared.stands[rows]
    span = slice(done, done + rows.numel())
    experts = None
    if share.experts is not None:
        dtype = share.experts.dtype
        experts = torch.full((*real.shape, *share.experts.shape[1:]), unknown(dtype), dtype=dtype)
        experts[real] = share.experts[source[real]]
        experts = experts.permute(2, 1, 0, 3).contiguous()  # [b, s, L, K] to routers' layout
    return MicroBatch(
        tokens, token.contiguous(), rows, targets, span, layout, experts=experts
    ), where


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sums `x` over the ranks of `group`, and returns the sum on every rank. All ranks of `group`
    must call `sum_over_ranks`. If one rank of `group` runs the sum's backward pass, all ranks of
    `group` must run this backward pass.

    The total loss L = sum_r L_r is the sum of the losses of all ranks r. Let x_r be the tensor `x`
    of rank r, and let y = sum_r x_r be the returned sum. The gradient of L with respect to x_r is
    sum_q dL_q / dy, a sum over all ranks q. The backward pass therefore sums the gradients over the
    ranks.
    """
    return _SumOverRanks.apply(x, group)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    all_reduce(total, group=group)
    return total
