"""The entropy forecast of a step from the trainer's own loss, and what the step really did to the same tokens.

`forecast` runs after the log-prob pass, on [N] numbers alone; `measured_change` after the optimizer step, with one more
forward pass. docs/diagnostics.md says how the two compare.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_stare.algorithms.gradient_norm import cell_metrics, cell_requests, norm_metrics, norm_requests
from megatron_stare.algorithms.proxy import proxy_metrics, proxy_requests
from megatron_stare.algorithms.sensitivity import EntropyForecast, sensitivity_requests
from megatron_stare.megatron.batching.microbatch import MicroBatch, RankBatch
from megatron_stare.megatron.model.head import Head, LossFunction
from megatron_stare.megatron.step.objective import Objective
from megatron_stare.megatron.step.passes import compute_log_probs
from megatron_stare.ops.statistics_executor import answer
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Mean, scalar
from megatron_stare.records.metric import Metric

METRICS = (
    Metric(
        "forecast/measured_change",
        "nats",
        "mean entropy of the same tokens after the first update less before; see observability.measured_every",
        "mostly the sign of forecast/entropy_change",
    ),
)


def forecast(
    objective: Objective, micro_batches: Sequence[MicroBatch], head: Head, group: ProcessGroup | None
) -> dict[str, Tensor]:
    """The `forecast/*` and `gradient/*` metrics of the step that is about to be taken, over the whole batch; 0-dim.

    Args:
        objective: of the step, its tokens with sum_p2 and sum_p2_log_p.
        head: whose temperature and vocabulary the log-probs are of.
        group: ranks that hold other tokens of the batch; None: this rank holds all.
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
    """The norm of every token's gradient by its probability and entropy, over the rollout batch; 0-dim.

    Args:
        tokens: with sum_p2.
        group: as in `forecast`.
    """
    return cell_metrics(answer(cell_requests(tokens), group))


def push_of(tokens: TokenBatch, micro_batches: Sequence[MicroBatch], loss_of: LossFunction) -> Tensor:
    """[N] minus the slope of the loss in every token's log-prob, on-policy: what the gradient multiplies
    (one_hot - p) by. Taken from the loss itself, so weights, masks, aggregation and corrections are all in it."""
    log_prob = tokens.old_log_prob.detach().requires_grad_()
    with torch.enable_grad():
        losses = [loss_of(log_prob[m.span], tokens.entropy[m.span], m)[0] for m in micro_batches]
        (slope,) = torch.autograd.grad(torch.stack(losses).sum(), log_prob, allow_unused=True, materialize_grads=True)
    return -slope


def measured_change(
    model: list[nn.Module], batch: RankBatch, head: Head, tokens: TokenBatch | None, group: ProcessGroup | None
) -> dict[str, Tensor]:
    """`forecast/measured_change`: mean entropy of the batch's tokens under the weights of now, less that of the
    log-prob pass; nats. A forward pass, which all ranks must enter together.

    Args:
        tokens: as they were before the step; None: not on the last pipeline stage, and the answer is empty.
    """
    _, entropy = compute_log_probs(model, batch, head)
    if tokens is None:
        return {}
    answers = answer({"forecast/measured_change": Mean(entropy - tokens.entropy, tokens.loss_mask)}, group)
    return {name: scalar(answers, name) for name in answers}
