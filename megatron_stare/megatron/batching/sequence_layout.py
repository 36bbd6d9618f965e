"""Lays out the sequences of a micro-batch over the ranks that compute the micro-batch together.

Shape legend: a micro-batch has b rows of s positions each. A packed micro-batch has one row with
all tokens. This rank computes the log-probs at n response positions. The hidden size is H.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_stare.config.performance import shares_prompts
from megatron_stare.config.schema import Config
from megatron_stare.megatron.backend.cpu_backend import has_transformer_engine
from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.batching.packing import (
    PackedSequences,
    SharedColumns,
    pack,
    shared_columns,
)
from megatron_stare.megatron.batching.zigzag import WHOLE, Zigzag


@dataclass(frozen=True)
class Grid:
    """Records the sample and the token at each position of a micro-batch. `sample` [b, s] is the
    index of a position's sample in the micro-batch, or -1 at padding. `token` [b, s] is the index
    of a position's token in its sample, counted from 0.

    `shared`: the columns of a packed row that are fed to the model. The model can skip columns that
        repeat the prompt of an earlier sample. If `shared` is None, all columns are fed to the
        model.
    """

    sample: Tensor
    token: Tensor
    shared: SharedColumns | None = None

    def stretched(self, rows: int, columns: int) -> Grid:
        """Returns a copy of the grid, padded on the right to `columns` and at the bottom to
        `rows`."""
        more = (0, columns - self.sample.shape[1], 0, rows - self.sample.shape[0])
        sample = torch.nn.functional.pad(self.sample, more, value=-1)
        token = torch.arange(columns).expand(rows, columns).clone()
        token[:, self.token.shape[1] :] -= self.token.shape[1]  # packed: padding is a sequence too
        token[: self.token.shape[0], : self.token.shape[1]] = self.token
        return Grid(sample, token)


class SequenceLayout(ABC):
    """Assigns the tokens of sequences to positions and ranks. Micro-batches, the output layer and
    the reductions over ranks use a SequenceLayout.

    The layout records the sample and the token of every position. The sample and the token at a
    position determine three values: the target of the position, the loss mask of the position, and
    the index of the position in the canonical order of the batch. A layout may therefore put a
    token at any position on any rank. Ranks that hold chunks of the same sequences receive the same
    share of the batch.
    """

    @abstractmethod
    def lay_out(self, lengths: Sequence[Tensor]) -> list[Grid]:
        """Assigns a position to every token in all micro-batches of a rank. `lengths` contains one
        tensor for each micro-batch, with the lengths of the micro-batch's samples."""

    @abstractmethod
    def split(self, grid: Grid) -> Grid:
        """Returns the part of the grid that this rank feeds to its model."""

    def share(self, grid: Grid, prompts: Tensor, groups: Tensor) -> Grid:
        """Finds the columns of a packed row that repeat the prompt of an earlier sample, so that
        the model can skip these columns. Returns a copy of the grid, in which the field `shared`
        contains the columns to feed to the model. If the layout does not share prompts, returns the
        grid unchanged.

        Args:
            prompts: [samples of the micro-batch] int64 prompt length of each sample.
            groups: [samples of the micro-batch] int64; samples of one group share one prompt.
        """
        return grid

    @abstractmethod
    def describe(self, grid: Grid, device: torch.device) -> PackedSequences | None:
        """Returns the boundaries of the packed sequences for attention, or None if each row is one
        sequence. `grid` must not be split over ranks."""

    @abstractmethod
    def rows(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Returns [n, H] hidden states of the response positions, on every rank that holds columns
        of the output layer. The backward pass returns the gradients of the hidden states to the
        ranks that own these states.

        Args:
            hidden: [s, b, H] output of the last stage on this rank. Under sequence parallelism,
                this rank holds only a part of the s positions.
            rows: [n] int64 rows of the flattened [b, s] positions from `split`.
        """

    @property
    @abstractmethod
    def group(self) -> ProcessGroup | None:
        """Group of the ranks over which the batch's tokens are divided, or None if this rank holds
        all tokens. Collectives in the group compute sums, maxima and selections over all tokens of
        the batch."""

    @property
    def micro_batch_group(self) -> ProcessGroup | None:
        """Group of the ranks that hold chunks of the same responses in the same micro-batches, or
        None if this rank holds whole responses."""
        return None


@dataclass(frozen=True)
class WholeSequences(SequenceLayout):
    """Layout with whole sequences on every tensor-parallel rank. Under sequence parallelism,
    Megatron divides the output of the embedding layer over the tensor-parallel ranks, so that each
    rank holds a part of the positions.

    `packed`: whether sequences are laid end to end in one row; if False, each sequence has its own
        row, padded on the right.
    `cut`: whether sequence parallelism is on.
    `multiple`: each micro-batch is padded until its number of positions is a multiple of this
        value, so that context parallelism and sequence parallelism can divide the positions evenly
        over ranks.
    `each`: each packed sequence is padded until its length is a multiple of this value.
    `uniform`: whether all micro-batches are padded to the shape of the largest micro-batch.
    `share_prompts`: if true, the model processes each prompt of a micro-batch once, and not once
        per response.
    """

    packed: bool = False
    cut: bool = False
    multiple: int = 1
    each: int = 1
    uniform: bool = False
    share_prompts: bool = False
    data_group: ProcessGroup | None = None

    def lay_out(self, lengths: Sequence[Tensor]) -> list[Grid]:
        if self.packed:
            grids = [_packed(each, self.each, self.multiple) for each in lengths]
        else:
            grids = [_padded(each, self.multiple) for each in lengths]
        if self.uniform:
            rows, columns = (max(grid.sample.shape[axis] for grid in grids) for axis in range(2))
            grids = [grid.stretched(rows, columns) for grid in grids]
        return grids

    def split(self, grid: Grid) -> Grid:
        return grid

    def share(self, grid: Grid, prompts: Tensor, groups: Tensor) -> Grid:
        if not self.share_prompts or not len(prompts):
            return grid
        return replace(
            grid,
            shared=shared_columns(grid.sample[0], grid.token[0], prompts, groups, self.multiple),
        )

    def describe(self, grid: Grid, device: torch.device) -> PackedSequences | None:
        return pack(self.sequences(grid), device, shared=grid.shared) if self.packed else None

    def sequences(self, grid: Grid) -> list[int]:
        """Returns the lengths of the sequences that are laid end to end in a row of `grid`. The
        lengths include padding. `grid` must not be split over ranks."""
        columns = grid.token.shape[1]
        if not self.packed:
            return [columns]
        starts = (grid.token[0] == 0).nonzero().squeeze(1)
        return torch.cat([starts, torch.tensor([columns])]).diff().tolist()

    def rows(self, hidden: Tensor, rows: Tensor) -> Tensor:
        if self.cut:
            hidden = gather_from_sequence_parallel_region(hidden)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        s, b, _ = hidden.shape
        return hidden.reshape(s * b, -1).index_select(0, rows % s * b + rows // s)

    @property
    def group(self) -> ProcessGroup | None:
        return self.data_group


@dataclass(frozen=True)
class SplitSequences(WholeSequences):
    """Layout for context parallelism. Each sequence is padded to a multiple of twice the number of
    context-parallel ranks and cut into chunks. Each rank feeds two chunks of every sequence to its
    model. Attention exchanges keys and values between the ranks.

    `data_group`: group of the ranks that hold different sequences, or different chunks of the same
        sequences.
    `place`: the Zigzag object that defines which chunks of a sequence this rank holds.
    `context_group`: group of the ranks that hold the chunks of the same sequences.
    """

    place: Zigzag = WHOLE
    context_group: ProcessGroup | None = None

    def split(self, grid: Grid) -> Grid:
        mine = self.place.columns(self.sequences(grid))
        return Grid(grid.sample[:, mine], grid.token[:, mine])

    def describe(self, grid: Grid, device: torch.device) -> PackedSequences | None:
        return pack(self.sequences(grid), device, self.place) if self.packed else None

    @property
    def micro_batch_group(self) -> ProcessGroup | None:
        return self.context_group


def sequence_layout(config: Config, layout: Layout) -> SequenceLayout:
    """Builds a run's sequence layout for this rank."""
    parallel = config.parallel
    place = Zigzag(layout.cp_rank, layout.cp)
    whole = WholeSequences(
        packed=config.batch.packed,
        cut=parallel.sequence,
        multiple=place.multiple * (layout.tp if parallel.sequence else 1),
        each=place.multiple,
        uniform=parallel.virtual_pipeline > 1,
        # Transformer Engine's attention takes whole sequences only; megatron/model/attention.py
        # repeats shared prompts itself
        share_prompts=shares_prompts(config) and not has_transformer_engine(),
        data_group=layout.dp_group if layout.dp * layout.cp > 1 else None,
    )
    return (
        whole
        if layout.cp == 1
        else SplitSequences(**vars(whole), place=place, context_group=layout.cp_group)
    )


def _padded(lengths: Tensor, multiple: int) -> Grid:
    """Returns a grid with one row per sample. The rows are padded on the right. If there are no
    samples, the grid has one row, which consists of padding."""
    longest = int(lengths.max()) if len(lengths) else 1
    rows, columns = max(len(lengths), 1), longest + -longest % multiple
    token = torch.arange(columns).expand(rows, columns)
    number = torch.arange(rows)[:, None].expand(rows, columns)
    real = token < (lengths[:, None] if len(lengths) else 0)
    return Grid(torch.where(real, number, -1), token)


def _packed(lengths: Tensor, each: int, multiple: int) -> Grid:
    """Returns a grid that has only one row. The row contains all samples, one after the other.
    Every sample is padded to a length that is divisible by the argument `each`. If `multiple` does
    not divide the length of the row, a separate sequence of padding is added at the end of the
    row."""
    sizes = lengths + -lengths % each
    total = int(sizes.sum())
    padding = multiple if total == 0 else -total % multiple
    number = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    token = torch.arange(total) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    sample = torch.where(token < lengths[number], number, -1)
    filler = torch.full((padding,), -1)
    return Grid(torch.cat([sample, filler])[None], torch.cat([token, torch.arange(padding)])[None])
