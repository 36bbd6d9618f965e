"""Numbers that the trainer computed of the tokens of a few responses, for people who read them.
Imports torch only.

Comes from `megatron/step/diagnostics.py`, a part from every rank that holds some of the tokens; the
driver joins them and hangs what belongs to a response on its trajectory. Shape legend: n tokens of
one response, m tokens of a part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenNumbers:
    """Tokens of the loss mask, as they were trained on.

    In a part the first two columns say which token of the rollout batch a row is; on a trajectory
    they are those of its own tokens. There every column has a row for each of the n tokens, and
    tokens outside the loss mask, which an environment wrote, have NaN and 0.
    """

    sample: Tensor  # [m] int64, of the whole batch
    position: Tensor  # [m] int64, from the start of the response
    log_prob: Tensor  # [m] float32 nats, of the log-prob pass
    entropy: Tensor  # [m] float32 nats, likewise
    advantage: Tensor  # [m] float32, of the response
    weight: Tensor  # [m] float32, what the loss multiplies the advantage by; NaN where that is 0
    # [m] int8: 1 in L+ (rarest of positive advantage), -1 in L- (of negative), 2 in U+, -2 in U-
    selected: Tensor
    # [m] int8, 1 past the critical surprisal s* of its position, 0 not; -1 where that is not known
    rare: Tensor

    def to_host(self) -> TokenNumbers:
        """The columns on the CPU; waits for the device."""
        return TokenNumbers(**{f.name: getattr(self, f.name).cpu() for f in fields(self)})


def of_responses(
    parts: Sequence[TokenNumbers], loss_masks: Mapping[int, Tensor]
) -> dict[int, TokenNumbers]:
    """The numbers of whole responses, by sample, from the parts that the ranks hold.

    Args:
        loss_masks: of each sample that was asked for, [n] bool.

    Raises:
        RuntimeError: the parts do not hold every token of the loss masks just once.
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
    """Up to `limit` of `size` samples, evenly. The first of a batch would always be those of the
    same prompts; a stride shows as many prompts as it can."""
    count = min(limit, size)
    return [i * size // count for i in range(count)]


def _blank(like: Tensor, length: int) -> Tensor:
    return torch.full((length,), torch.nan if like.is_floating_point() else 0, dtype=like.dtype)
