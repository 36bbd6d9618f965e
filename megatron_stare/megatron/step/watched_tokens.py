"""What the update at hand makes of the tokens of some responses, from the trainer's own statistics and loss.

Runs on the last pipeline stage beside an update, on [N] numbers alone and without the model; `records/token_numbers.py`
joins what the ranks find.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_stare.algorithms.sensitivity import is_rare, second_moment, sensitivity
from megatron_stare.megatron.batching.microbatch import MicroBatch, RankBatch
from megatron_stare.megatron.step.forecast import push_of
from megatron_stare.megatron.step.objective import Objective
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.token_numbers import TokenNumbers


def token_numbers(objective: Objective, tokens: TokenBatch, part: RankBatch, samples: Sequence[int]) -> TokenNumbers:
    """The numbers of those tokens of `samples` that stand here in the update's micro-batches; on the device, which is
    not waited for.

    The weight is the slope of the loss in the token's log-prob, on-policy, over -(coefficient x advantage): what is
    left of the advantage after STARE's weights, STAPO's mask, GTPO's shares, importance corrections and KL terms, of a
    method in a user's own file too. A token without a coefficient has weight 0. All ranks that hold other tokens of the
    same responses must call it, since a method's loss may sum over them.

    Args:
        objective: of the update.
        tokens: this rank's N positions with the log-probs and entropies of the log-prob pass.
        part: the mini-batch's micro-batches.
    """
    push, here = push_of(tokens, part.micro_batches, objective.loss), torch.isin(part.sequence, torch.tensor(samples))
    found = []
    for micro in part.micro_batches:
        rows = here[micro.span].nonzero().squeeze(1).to(part.device, non_blocking=True)  # found on the host
        found.append(_of_micro_batch(objective, tokens, micro, push[micro.span], rows))
    return TokenNumbers(*(torch.cat(column) for column in zip(*found, strict=True)))


@torch.no_grad()
def _of_micro_batch(
    objective: Objective, tokens: TokenBatch, micro: MicroBatch, push: Tensor, rows: Tensor
) -> tuple[Tensor, ...]:
    """The columns of TokenNumbers, of some `rows` [.] of the micro-batch."""
    seen = objective.tokens_of(tokens.old_log_prob[micro.span], tokens.entropy[micro.span], micro)
    statistics = objective.statistics_of(micro)
    coefficient = objective.method.coefficients(seen, statistics)
    weight = torch.where(coefficient > 0, push / (coefficient * seen.advantage), 0.0)
    weight = torch.where(seen.advantage == 0, torch.nan, weight)
    columns = (
        seen.sequence,
        seen.position,
        seen.old_log_prob,
        seen.entropy,
        seen.advantage,
        weight,
        objective.method.selected(seen, statistics),
        _rare(seen),
    )
    return tuple(column.index_select(0, rows) for column in columns)


def _rare(tokens: TokenBatch) -> Tensor:
    if tokens.sum_p2 is None or tokens.sum_p2_log_p is None:
        return torch.full_like(tokens.loss_mask, -1, dtype=torch.int8)
    s2 = second_moment(tokens.sum_p2, tokens.sum_p2_log_p, tokens.entropy)
    return is_rare(sensitivity(tokens.old_log_prob, tokens.entropy, s2)).to(torch.int8)
