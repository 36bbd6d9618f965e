"""Defines `TokenNumbers`: values that the trainer computes for each token of a few responses. The
run's report shows the values of each TokenNumbers next to the response. Torch is the only library
that this module imports.

Every rank that holds tokens of the chosen responses makes a TokenNumbers for its own tokens
(`megatron/step/diagnostics.py`). A TokenNumbers that one rank makes is called a part. The driver
joins the parts, and attaches the values of each response to the response's trajectory.

Shape legend: n = tokens of one response; m = tokens in the TokenNumbers of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenNumbers:
    """Values that the trainer computed for the loss-mask tokens.

    Each row of a part (the TokenNumbers of one rank) describes one token. The columns `sample` and
    `position` say which token of the rollout batch a row describes. In the TokenNumbers of a
    trajectory, every column has a row for each of the trajectory's n tokens. For tokens outside the
    loss mask, float columns contain NaN, and integer columns except `sample` and `position` contain
    0.
    """

    sample: Tensor  # [m] int64, of the whole batch
    position: Tensor  # [m] int64, from the start of the response
    log_prob: Tensor  # [m] float32 nats, from the log-prob pass
    entropy: Tensor  # [m] float32 nats, from the log-prob pass
    advantage: Tensor  # [m] float32, of the response
    weight: Tensor  # [m] float32, factor on the advantage in the loss; NaN if the advantage is 0
    # [m] int8 code of the method's selection: 1 L+, -1 L-, 2 U+, -2 U- (see Method.selected)
    selected: Tensor
    # [m] int8, 1 past the critical surprisal s* of its position, else 0; -1 if s* is not known
    rare: Tensor

    def to_host(self) -> TokenNumbers:
        """Waits for the device and returns a TokenNumbers that has all columns in CPU memory."""
        return TokenNumbers(**{f.name: getattr(self, f.name).cpu() for f in fields(self)})


def of_responses(
    parts: Sequence[TokenNumbers], loss_masks: Mapping[int, Tensor]
) -> dict[int, TokenNumbers]:
    """Joins the TokenNumbers that the ranks have made for their own tokens. Returns one
    TokenNumbers per response, keyed by the sample's index in the batch.

    Args:
        loss_masks: [n] bool loss mask of each requested sample.

    Raises:
        RuntimeError: the parts do not hold every token of the loss masks exactly once.
    """
    columns = {
        f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(TokenNumbers)
    }
    found = {}
    for sample, mask in loss_masks.items():
        rows = (columns["sample"] == sample).nonzero().squeeze(1)
        where = columns["position"][rows]
        if not torch.equal(where.sort().values, mask.nonzero().squeeze(1)):
            raise RuntimeError(f"the ranks do not hold every token of sample {sample} once")
        whole = {
            name: _blank(column, len(mask)).index_copy_(0, where, column[rows])
            for name, column in columns.items()
        }
        whole |= {"sample": torch.full((len(mask),), sample), "position": torch.arange(len(mask))}
        found[sample] = TokenNumbers(**whole)
    return found


def spread(size: int, limit: int) -> list[int]:
    """Picks samples of a batch at evenly spaced indices, and returns these indices. `size` is the
    number of samples in the batch, and `limit` is the largest number of samples to pick. All
    samples of one prompt have consecutive indices in a batch. Samples at evenly spaced indices
    therefore come from as many prompts as possible, while samples from the beginning of the batch
    would come from few prompts."""
    count = min(limit, size)
    return [i * size // count for i in range(count)]


def _blank(like: Tensor, length: int) -> Tensor:
    return torch.full((length,), torch.nan if like.is_floating_point() else 0, dtype=like.dtype)
