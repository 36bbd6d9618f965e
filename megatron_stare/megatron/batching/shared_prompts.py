"""Prompts that several responses of a micro-batch have in common, and are passed through the model once.

A prompt's hidden states depend on nothing behind it, so those of one sample serve all samples of its group: layers are
given it once, and attention alone, in which responses look back at it, repeats its queries, keys and values.
Shape legend: s positions of a packed row with every prompt before each of its responses, k of them the model is fed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SharedColumns:
    """Which columns of a packed row the model is fed.

    fed: [k] int64, ascending.
    stands: [s] int64, of every column the place among those fed at which its token, or the same of another sample,
        stands.
    """

    fed: Tensor
    stands: Tensor


def shared_columns(sample: Tensor, token: Tensor, prompts: Tensor, groups: Tensor, multiple: int) -> SharedColumns:
    """Of a row in which sequences stand end to end.

    Args:
        sample: [s] int64 which of the micro-batch's samples, -1: padding.
        token: [s] int64 which of its tokens.
        prompts: [samples] int64 tokens of each one's prompt.
        groups: [samples] int64; samples of one group have one prompt.
        multiple: the number of columns fed is one of this, as that of the row is.
    """
    columns = torch.arange(len(sample))
    same = groups[:, None] == groups[None]
    first = same.int().argmax(dim=1)  # of every sample the first of its group
    ours = sample.clamp_min(0)
    in_prompt = (sample >= 0) & (token < prompts[ours])
    starts = torch.full((len(prompts),), len(sample)).scatter_reduce_(
        0, ours[sample >= 0], columns[sample >= 0], "amin"
    )
    source = torch.where(in_prompt, starts[first[ours]] + token, columns)
    copies = (source != columns).nonzero().squeeze(1)
    kept = copies[len(copies) - len(copies) % multiple :]  # fed all the same
    source[kept] = kept
    fed = (source == columns).nonzero().squeeze(1)
    place = torch.empty_like(columns)
    place[fed] = torch.arange(len(fed))
    return SharedColumns(fed, place[source])
