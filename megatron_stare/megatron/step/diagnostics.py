"""Diagnoses an update on the last pipeline stage: forecasts the change of the entropy, and computes
numbers for single tokens.

`forecast` runs after the log-prob pass. `forecast` differentiates the trainer's own loss with
respect to the tokens' log-probs. The differentiation needs no forward or backward pass of the
model. `measured_change` runs after the optimizer step. `measured_change` uses one more forward pass
to measure how much the entropy of the same tokens actually changed. See docs/diagnostics.md for a
comparison of the forecast and the measured change.

`token_numbers` shows how the current update treats each token of chosen responses. `token_numbers`
needs the trainer's statistics and loss, but no forward or backward pass of the model.
`records/token_numbers.py` joins the ranks' results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_stare.algorithms.gradient_norm import (
    cell_metrics,
    cell_requests,
    norm_metrics,
    norm_requests,
)
from megatron_stare.algorithms.proxy import proxy_metrics, proxy_requests
from megatron_stare.algorithms.sensitivity import (
    EntropyForecast,
    is_rare,
    second_moment,
    sensitivity,
    sensitivity_requests,
)
from megatron_stare.megatron.batching.microbatch import MicroBatch, RankBatch
from megatron_stare.megatron.model.head import Head, LossFunction
from megatron_stare.megatron.step.objective import Objective
from megatron_stare.megatron.step.passes import compute_log_probs
from megatron_stare.ops.statistics_executor import answer
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Mean, scalar
from megatron_stare.records.metric import Metric
from megatron_stare.records.token_numbers import TokenNumbers

METRICS = (
    Metric(
        "forecast/measured_change",
        "nats",
        "mean entropy of the same tokens after the first update minus before; see"
        " observability.measured_every",
        "mostly the same sign as forecast/entropy_change",
    ),
)


def forecast(
    objective: Objective,
    micro_batches: Sequence[MicroBatch],
    head: Head,
    group: ProcessGroup | None,
) -> dict[str, Tensor]:
    """Returns the metrics `forecast/*` and `gradient/*` of the coming step, as 0-dim tensors. The
    metrics cover the whole batch.

    Args:
        objective: the step's objective, whose tokens have sum_p2 and sum_p2_log_p.
        head: output head that computed the log-probs. Gives the temperature and the vocabulary
            size.
        group: group of the ranks that hold other tokens of the batch, or None if this rank holds
            all tokens.
    """
    tokens, sets = objective.tokens, objective.method.selects
    push = push_of(tokens, micro_batches, objective.loss)
    requests = {
        **sensitivity_requests(tokens, push),
        **proxy_requests(tokens, sets, objective.selected(micro_batches)),
        **norm_requests(tokens, push, head.vocab_size),
    }
    answers = answer(requests, group)
    return {
        **EntropyForecast.of(answers, head.temperature).metrics(),
        **proxy_metrics(answers, sets, head.temperature),
        **norm_metrics(answers, head.temperature),
    }


def token_norms(tokens: TokenBatch, group: ProcessGroup | None) -> dict[str, Tensor]:
    """Divides the rollout batch's tokens into cells. A cell contains the tokens in one range of
    probability and one range of entropy. Returns two 0-dim tensors for each cell: the mean norm of
    the gradients of the cell's tokens, and the cell's share of all tokens.

    Args:
        tokens: tokens with sum_p2.
        group: as in `forecast`.
    """
    return cell_metrics(answer(cell_requests(tokens), group))


def push_of(
    tokens: TokenBatch, micro_batches: Sequence[MicroBatch], loss_of: LossFunction
) -> Tensor:
    """Returns, for every token, the negative derivative of the on-policy loss with respect to the
    token's log-prob, [N]. Gradient descent on a token's logits changes the logits in proportion to
    the returned value times (one_hot - p), where p is the policy's distribution and one_hot is the
    one-hot vector of the sampled token. `push_of` differentiates the trainer's own loss function.
    The derivatives therefore include the token weights, the masks, the aggregation and the
    corrections of the loss."""
    log_prob = tokens.old_log_prob.detach().requires_grad_()
    with torch.enable_grad():
        losses = [loss_of(log_prob[m.span], tokens.entropy[m.span], m)[0] for m in micro_batches]
        (slope,) = torch.autograd.grad(
            torch.stack(losses).sum(), log_prob, allow_unused=True, materialize_grads=True
        )
    return -slope


def measured_change(
    model: list[nn.Module],
    batch: RankBatch,
    head: Head,
    tokens: TokenBatch | None,
    group: ProcessGroup | None,
    *,
    exact: bool,
) -> dict[str, Tensor]:
    """Returns the metric `forecast/measured_change` in nats: the mean entropy of the batch's tokens
    under the current weights, minus the mean entropy of the same tokens in the log-prob pass. Runs
    a forward pass, so all ranks must call `measured_change` together.

    Args:
        tokens: tokens before the step, or None on all pipeline stages but the last. Without tokens,
            the function returns an empty dict.
        exact: as in records.batch_statistics.Sum.
    """
    _, entropy = compute_log_probs(model, batch, head)
    if tokens is None:
        return {}
    answers = answer(
        {"forecast/measured_change": Mean(entropy - tokens.entropy, tokens.loss_mask, exact)}, group
    )
    return {name: scalar(answers, name) for name in answers}


def token_numbers(
    objective: Objective, tokens: TokenBatch, part: RankBatch, samples: Sequence[int]
) -> TokenNumbers:
    """Returns the TokenNumbers of the tokens in `part` that belong to one of the samples in
    `samples`. The returned TokenNumbers has one row per token. The returned values stay on the
    device, and the call does not wait for the device.

    A token's weight is the slope of the on-policy loss with respect to the token's log-prob,
    divided by -(coefficient x advantage). The weight is the total factor on the token's advantage,
    including STARE's weights, STAPO's mask, GTPO's shares, importance corrections and KL terms.
    This definition of the token weight holds for every algorithm, also for one in a user's own
    file. A token with coefficient 0 has weight 0, and a token with advantage 0 has weight NaN. If
    several ranks hold tokens of the same responses, all these ranks must call `token_numbers`,
    because a method's loss may contain a sum over these ranks.

    Args:
        objective: the update's objective.
        tokens: this rank's N positions with the log-probs and entropies of the log-prob pass.
        part: this rank's micro-batches of the mini-batch.
        samples: indices of samples in the rollout batch.
    """
    push = push_of(tokens, part.micro_batches, objective.loss)
    here = torch.isin(part.sequence, torch.tensor(samples))
    found = []
    for micro in part.micro_batches:
        # row numbers are found on the host
        rows = here[micro.span].nonzero().squeeze(1).to(part.device, non_blocking=True)
        found.append(_of_micro_batch(objective, tokens, micro, push[micro.span], rows))
    return TokenNumbers(*(torch.cat(column) for column in zip(*found, strict=True)))


@torch.no_grad()
def _of_micro_batch(
    objective: Objective, tokens: TokenBatch, micro: MicroBatch, push: Tensor, rows: Tensor
) -> tuple[Tensor, ...]:
    """Returns the columns of TokenNumbers for the response positions that `rows` selects. `rows` is
    a 1-dim tensor of indices into the micro-batch's response positions."""
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
