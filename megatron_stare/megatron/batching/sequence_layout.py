"""How the sequences of a micro-batch lie over the ranks that compute it together. One object decides it.

Shape legend: b rows and s positions of a micro-batch (packed: one row of all tokens), n response positions that this
rank computes, H hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_stare.config.schema import Config
from megatron_stare.megatron.batching.packing import PackedSequences, pack
from megatron_stare.megatron.layout import Layout


@dataclass(frozen=True)
class Grid:
    """Which sample of a micro-batch ([b, s], -1: padding) and which of its tokens ([b, s]) stands at every position."""

    sample: Tensor
    token: Tensor

    def stretched(self, rows: int, columns: int) -> Grid:
        """With padding on the right and below."""
        more = (0, columns - self.sample.shape[1], 0, rows - self.sample.shape[0])
        sample = torch.nn.functional.pad(self.sample, more, value=-1)
        token = torch.arange(columns).expand(rows, columns).clone()
        token[: self.token.shape[0], : self.token.shape[1]] = self.token
        return Grid(sample, token)


class SequenceLayout(ABC):
    """What micro-batches, the head and a step's sums must know of it.

    A context-parallel layout is one more subclass. It must give: in `lay_out`, every sequence padded to a multiple of
    twice the context ranks, so that all get equal parts and, with causal attention, equal work; in `split`, the columns
    of this rank's two chunks of each sequence, one from either end; in `describe`, the sequences as they were before
    the split, for an attention that exchanges keys and values; in `rows`, this rank's own hidden states and no others,
    as every response position lies on one context rank; in `group`, the data ranks times the context ranks. A position
    brings its sample and token along, so that targets, canonical numbers and masks follow the split by themselves; the
    ranks of a context group are given the same share of the batch.
    """

    @abstractmethod
    def lay_out(self, lengths: Sequence[Tensor]) -> list[Grid]:
        """Where the tokens of every micro-batch of a rank stand, from the lengths of its samples ([.] each)."""

    @abstractmethod
    def split(self, grid: Grid) -> Grid:
        """The positions that this rank's model is fed."""

    @abstractmethod
    def describe(self, grid: Grid, device: torch.device) -> PackedSequences | None:
        """Where sequences begin and end in a whole grid, for the attention; None: every row is one."""

    @abstractmethod
    def rows(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """[n, H] hidden states of the response positions, on every rank that holds columns of the output layer; its
        backward brings the gradient to wherever they came from.

        Args:
            hidden: [s, b, H] the last stage's output here, or a part of its s.
            rows: [n] int64 rows of the flattened [b, s] positions that `split` gave.
        """

    @property
    @abstractmethod
    def group(self) -> ProcessGroup | None:
        """Ranks that hold other tokens of the batch, over which sums, maxima and selects are reduced; None: this rank
        holds all."""


@dataclass(frozen=True)
class WholeSequences(SequenceLayout):
    """A sequence lies on all tensor-parallel ranks alike; under sequence parallelism Megatron cuts the positions of a
    micro-batch, after the embedding, into one part a rank.

    packed: sequences stand end to end in one row; else a row each, padded on the right.
    cut: sequence parallelism.
    multiple: positions of a micro-batch are padded to a multiple of this, so that they can be cut.
    uniform: all micro-batches are given the shape of the largest.
    """

    packed: bool = False
    cut: bool = False
    multiple: int = 1
    uniform: bool = False
    data_group: ProcessGroup | None = None

    def lay_out(self, lengths: Sequence[Tensor]) -> list[Grid]:
        one = _packed if self.packed else _padded
        grids = [one(each, self.multiple) for each in lengths]
        if self.uniform:
            rows, columns = (max(grid.sample.shape[axis] for grid in grids) for axis in range(2))
            grids = [grid.stretched(rows, columns) for grid in grids]
        return grids

    def split(self, grid: Grid) -> Grid:
        return grid

    def describe(self, grid: Grid, device: torch.device) -> PackedSequences | None:
        if not self.packed:
            return None
        sizes = torch.unique_consecutive(grid.sample[0], return_counts=True)[1]  # padding last
        return pack(sizes.tolist(), device)

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


def sequence_layout(config: Config, layout: Layout) -> SequenceLayout:
    """That of a run, on this rank."""
    parallel = config.parallel
    return WholeSequences(
        packed=config.batch.packed,
        cut=parallel.sequence,
        multiple=layout.tp if parallel.sequence else 1,
        uniform=parallel.virtual_pipeline > 1,
        data_group=layout.dp_group if layout.dp > 1 else None,
    )


def _padded(lengths: Tensor, multiple: int) -> Grid:
    """A row a sample, padded on the right. No sample makes a dummy of padding alone."""
    longest = int(lengths.max()) if len(lengths) else 1
    rows, columns = max(len(lengths), 1), longest + -longest % multiple
    token = torch.arange(columns).expand(rows, columns)
    number = torch.arange(rows)[:, None].expand(rows, columns)
    real = token < (lengths[:, None] if len(lengths) else 0)
    return Grid(torch.where(real, number, -1), token)


def _packed(lengths: Tensor, multiple: int) -> Grid:
    """One row of all samples end to end; padding, where there must be some, is a sequence of its own at the end."""
    total = int(lengths.sum())
    padding = multiple if total == 0 else -total % multiple
    number = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    token = torch.arange(total) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    filler = torch.full((padding,), -1)
    return Grid(torch.cat([number, filler])[None], torch.cat([token, torch.arange(padding)])[None])
