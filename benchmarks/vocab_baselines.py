"""Baselines that the log-prob operator is measured against, each written afresh and at its best.

Every baseline takes this rank's logits [N, V] with gradient, targets [N] over the whole vocabulary
and the group, and gives log-prob [N] and entropy [N]; `of_entropy` says whether the entropy carries
gradient, without which it is computed outside autograd. Temperature is 1 and no column is padding,
which spares the baselines both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Baseline = Callable[[Tensor, Tensor, "ProcessGroup | None", bool], tuple[Tensor, "Tensor | None"]]


def float32(
    logits: Tensor, targets: Tensor, group: ProcessGroup | None, of_entropy: bool
) -> tuple[Tensor, Tensor]:
    """The formulation of published trainers: a float32 copy, log_softmax for the log-prob, softmax
    for the entropy. Over several ranks: an autograd function for each, with a collective for the
    maximum and for every sum.

    At its best: the entropy's product with the logits is summed without being written, and the
    log-softmax is shared by both.
    """
    x = logits.float()
    if group is not None:
        log_prob = _SplitLogProb.apply(x, targets, group)
        with nullcontext() if of_entropy else torch.no_grad():
            return log_prob, _SplitEntropy.apply(x, group)
    log_p = x.log_softmax(-1)
    log_prob = log_p.gather(1, targets[:, None]).squeeze(1)
    with nullcontext() if of_entropy else torch.no_grad():
        p = x.softmax(-1)
        return log_prob, -torch.linalg.vecdot(p, log_p)


def cross_entropy(
    logits: Tensor, targets: Tensor, group: ProcessGroup | None, of_entropy: bool
) -> tuple[Tensor, Tensor]:
    """torch's cross_entropy of a float32 copy, and the entropy as ln sum exp less the mean logit.
    One rank only."""
    if group is not None:
        raise NotImplementedError("knows no split vocabulary")
    x = logits.float()
    log_prob = -torch.nn.functional.cross_entropy(x, targets, reduction="none")
    with nullcontext() if of_entropy else torch.no_grad():
        return log_prob, x.logsumexp(-1) - torch.linalg.vecdot(x.softmax(-1), x)


def megatron(
    logits: Tensor, targets: Tensor, group: ProcessGroup | None, of_entropy: bool
) -> tuple[Tensor, None]:
    """megatron.core's vocab_parallel_cross_entropy: the log-prob alone, there is no entropy.
    float32 logits are overwritten."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from megatron_stare.megatron.backend.cpu_backend import backend

    if of_entropy:
        raise NotImplementedError("has no entropy")
    with backend():
        return -vocab_parallel_cross_entropy(logits[:, None], targets[:, None]).squeeze(1), None


def megatron_fused(
    logits: Tensor, targets: Tensor, group: ProcessGroup | None, of_entropy: bool
) -> tuple[Tensor, None]:
    """The one of `cross_entropy_loss_fusion`, for which torch compiles what `megatron` does one by
    one, if it may. Its gradient is rounded to bfloat16 whatever the logits are."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    if of_entropy:
        raise NotImplementedError("has no entropy")
    tp_group = group or get_tensor_model_parallel_group()
    return -fused_vocab_parallel_cross_entropy(logits[:, None], targets[:, None], tp_group).squeeze(
        1
    ), None


BASELINES: dict[str, Baseline] = {
    "float32": float32,
    "cross_entropy": cross_entropy,
    "megatron": megatron,
    "megatron_fused": megatron_fused,
}


class _SplitLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
        d, e, total = _split_softmax(x, group)
        start = group.rank() * x.shape[1]
        here = (targets >= start) & (targets < start + x.shape[1])
        local = (targets - start).clamp(0, x.shape[1] - 1)
        of_target = torch.where(here, d.gather(1, local[:, None]).squeeze(1), 0.0)
        dist.all_reduce(of_target, group=group)
        ctx.save_for_backward(e.div_(total[:, None]), here, local)
        return of_target - total.log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, here, local = ctx.saved_tensors
        out = p.mul_(-grad[:, None])
        rows = torch.arange(len(local), device=local.device)
        out[rows, local] += torch.where(here, grad, 0.0)
        return out, None, None


class _SplitEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        d, e, total = _split_softmax(x, group)
        p = e.div_(total[:, None])
        mean = torch.linalg.vecdot(p, d)
        dist.all_reduce(mean, group=group)
        entropy = total.log() - mean
        ctx.save_for_backward(p, d, mean)
        return entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, d, mean = ctx.saved_tensors
        return d.sub_(mean[:, None]).mul_(p).mul_(-grad[:, None]), None


def _split_softmax(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """x less the maximum over all ranks, its exp, and that one's sum over all ranks."""
    m = x.amax(1)
    dist.all_reduce(m, dist.ReduceOp.MAX, group=group)
    d = x - m[:, None]
    e = d.exp()
    total = e.sum(1)
    dist.all_reduce(total, group=group)
    return d, e, total
