"""Computes log-probs and entropies from hidden states, with the output layer in one of three modes.
If the logits of the output layer are already known, ops/vocab_parallel.py computes log-probs and
entropies.

    materialised         computes all logits at once. Backward overwrites the logits with their
                         gradient.
    gradient_in_forward  computes the logits chunk by chunk. Forward also computes a chunk's
                         gradients, before the next chunk overwrites the chunk's logits. These
                         gradients are right only if no token's loss depends on other tokens.
    recompute            computes the logits chunk by chunk. Backward computes every chunk's logits
                         again.

The mode 'materialised' keeps all [n, V] logits in memory. The two chunked modes,
'gradient_in_forward' and 'recompute', keep the logits of only one chunk at a time. Forward and
backward together need 3 matrix products in the modes 'materialised' and 'gradient_in_forward', and
4 in the mode 'recompute'. Each matrix product takes n * H * V multiplications. In the chunked
modes, the gradient of the output layer's weight is summed over the chunks in float32. For the
gradient with respect to the hidden states, this module sums only over this rank's vocabulary
columns. The module megatron/model/head.py then sums the hidden states' gradient over the ranks of
the tensor-parallel group.

Shape legend: n = rows of the hidden states (one row per token), H = hidden size, V = vocabulary
columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_stare.ops.vocab_parallel import (
    Problem,
    Rows,
    log_prob_and_entropy,
    measure,
    write_gradient,
)

Mode = Literal["materialised", "gradient_in_forward", "recompute"]
# log-probs and entropies [n] -> scalar loss, and detached [n] tensors to log
Loss = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]

# largest relative difference of a slope between a chunk and the whole, because sums over a GPU's
# threads have no fixed order
_SAME = 1e-3


@dataclass(frozen=True)
class LinearHead:
    """Output layer that computes log-probs and entropies in the given `mode`.

    `chunk`: number of rows whose logits the chunked modes hold at a time. The chunk size determines
        the shapes of the matrix products and thereby their rounding. Two passes therefore give
        bit-identical results only with the same chunk size.
    """

    problem: Problem
    mode: Mode = "materialised"
    chunk: int = 1024

    def compute_log_probs(
        self, hidden: Tensor, weight: Tensor, targets: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns the log-probs and entropies of the rows, [n] each, without gradient. The returned
        values are bit-identical to the values that `loss` passes to `loss_of`.

        Args:
            hidden: [n, H].
            weight: [V, H] of the output layer.
            targets: [n] int64, indices into the whole vocabulary.
        """
        with torch.no_grad():
            parts = [
                measure(logits, targets[rows], self.problem)[0]
                for rows, logits in self._logits(hidden, weight)
            ]
            return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        loss_of: Loss,
        weight_gradient: Tensor | None = None,
        stand_in: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss, and the tensors that `loss_of` returns for logging. The loss is
        differentiable with respect to `hidden` and `weight`.

        Args:
            loss_of: computes the loss from log-probs and entropies. `loss` calls `loss_of` once. In
                the mode gradient_in_forward, `loss` also calls `loss_of` once per chunk, with 0 for
                the log-probs and entropies of later chunks. Each such call provides the slopes of
                the chunk's own tokens: the derivatives of the loss with respect to these tokens'
                log-probs and entropies. A token's slopes must therefore not depend on other tokens'
                log-probs or entropies.
            weight_gradient: [V, H] float32 buffer to which the chunked modes add the weight's
                gradient. The mode gradient_in_forward adds the gradient in forward. If the buffer
                is given, autograd returns no gradient for the weight. If the buffer is None,
                autograd returns the weight's gradient.
            stand_in: if True, autograd returns uninitialised memory as the weight's gradient
                although weight_gradient is given. Without any gradient for the weight, autograd on
                a GPU would run the weight's hooks in the calling thread, in parallel with the
                thread that runs all other hooks.

        Raises:
            RuntimeError: with gradient_in_forward, the loss couples tokens, or the loss was scaled
                before backward although weight_gradient is given.
        """
        if self.mode == "gradient_in_forward":
            return self._gradient_in_forward(
                hidden, weight, targets, loss_of, weight_gradient, stand_in
            )
        if self.mode == "recompute":
            log_prob, entropy = _Recompute.apply(
                hidden, weight, targets, self, weight_gradient, stand_in
            )
        else:
            logits = torch.nn.functional.linear(hidden, weight)
            log_prob, entropy = log_prob_and_entropy(
                logits,
                targets,
                vocab_size=self.problem.vocab_size,
                temperature=self.problem.temperature,
                group=self.problem.group,
                entropy_gradient=self.problem.entropy_gradient,
                body=self.problem.body,
                overwrite_logits=logits.requires_grad,
            )
        return loss_of(log_prob, entropy)

    def _logits(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yields the row slice and the logits of every chunk. Each chunk's logits overwrite the
        logits of the previous chunk. Yields one empty chunk if there are no rows."""
        n = hidden.shape[0]
        if self.mode == "materialised":
            yield slice(0, n), torch.nn.functional.linear(hidden, weight)
            return
        buffer = hidden.new_empty(min(self.chunk, n), weight.shape[0])
        for start in range(0, max(n, 1), self.chunk):
            rows = slice(start, min(start + self.chunk, n))
            yield rows, torch.mm(hidden[rows], weight.t(), out=buffer[: rows.stop - rows.start])

    @torch.no_grad()
    def _gradient_in_forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        loss_of: Loss,
        weight_gradient: Tensor | None,
        stand_in: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        n, ours = hidden.shape[0], weight_gradient is None
        total = (
            torch.zeros_like(weight, dtype=_wide(weight))
            if weight_gradient is None
            else weight_gradient
        )
        of_hidden = torch.empty_like(hidden)
        log_prob, entropy, *used = (
            torch.zeros(n, dtype=_wide(hidden), device=hidden.device) for _ in range(4)
        )
        for rows, logits in self._logits(hidden, weight):
            (log_prob[rows], entropy[rows]), seen = measure(logits, targets[rows], self.problem)
            slopes = self._slopes(log_prob, entropy, loss_of)[2:]
            for kept, slope in zip(used, slopes, strict=True):
                kept[rows] = slope[rows]
            self._backward(
                logits,
                seen,
                used[0][rows],
                used[1][rows],
                hidden[rows],
                weight,
                of_hidden[rows],
                total,
            )
        loss, logged, *final = self._slopes(log_prob, entropy, loss_of)
        for kept, slope in zip(used, final, strict=True):
            _check_local(kept, slope)
        with torch.enable_grad():
            attached = _Attached.apply(
                hidden, weight, loss, of_hidden, total if ours else None, stand_in
            )
            return attached, logged

    def _slopes(
        self, log_prob: Tensor, entropy: Tensor, loss_of: Loss
    ) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
        """Returns the loss, the tensors that `loss_of` returns for logging, and two tensors [n] of
        slopes. The slopes are the derivatives of the loss with respect to the log-probs (first
        tensor) and with respect to the entropies (second tensor)."""
        log_prob = log_prob.clone().requires_grad_()
        entropy = entropy.clone().requires_grad_(self.problem.entropy_gradient)
        with torch.enable_grad():
            loss, logged = loss_of(log_prob, entropy)
        slopes = [torch.zeros_like(log_prob), torch.zeros_like(entropy)]
        if loss.requires_grad:
            inputs = [log_prob, entropy][: 1 + self.problem.entropy_gradient]
            found = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
            slopes[: len(found)] = found
        return loss.detach(), logged, slopes[0], slopes[1]

    def _backward(
        self,
        logits: Tensor,
        seen: Rows,
        grad_log_prob: Tensor,
        grad_entropy: Tensor,
        hidden: Tensor,
        weight: Tensor,
        of_hidden: Tensor,
        of_weight: Tensor,
    ) -> None:
        """Writes the gradient with respect to a chunk's hidden states into `of_hidden`, and adds
        the gradient with respect to the weight to `of_weight`. Overwrites the logits."""
        of_entropy = grad_entropy if self.problem.entropy_gradient else None
        write_gradient(logits, seen, self.problem, grad_log_prob, of_entropy, out=logits)
        torch.mm(logits, weight, out=of_hidden)
        _add_product(of_weight, logits, hidden)


class _Attached(torch.autograd.Function):
    """Loss whose gradients were already computed in the forward pass. If `of_weight` is None, the
    weight's gradient is already in the buffer `weight_gradient` of LinearHead.loss. If `of_weight`
    is None, the backward pass returns None or uninitialised memory instead of the weight's gradient
    (see LinearHead.loss)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        loss: Tensor,
        of_hidden: Tensor,
        of_weight: Tensor | None,
        stand_in: bool,
    ) -> Tensor:
        ctx.save_for_backward(of_hidden, of_weight, weight if stand_in else None)
        ctx.dtype = weight.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight, like = ctx.saved_tensors
        if of_weight is not None:
            return (
                grad.to(of_hidden.dtype) * of_hidden,
                (grad * of_weight).to(ctx.dtype),
                *(None,) * 4,
            )
        torch._assert_async(
            grad == 1, "the weight's gradient was added in the forward: its loss must not be scaled"
        )
        return of_hidden, None if like is None else torch.empty_like(like), *(None,) * 4


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        head: LinearHead,
        weight_gradient: Tensor | None,
        stand_in: bool,
    ) -> tuple[Tensor, Tensor]:
        parts = [
            measure(logits, targets[rows], head.problem)
            for rows, logits in head._logits(hidden, weight)
        ]
        log_prob, entropy, *_ = (
            torch.cat(column) for column in zip(*(outputs for outputs, _ in parts), strict=True)
        )
        seen = (
            torch.cat(column) for column in zip(*(rows.tensors() for _, rows in parts), strict=True)
        )
        ctx.save_for_backward(hidden, weight, *seen)
        ctx.head, ctx.weight_gradient, ctx.stand_in = head, weight_gradient, stand_in
        if not head.problem.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, *saved = ctx.saved_tensors
        seen, total = Rows(*saved), ctx.weight_gradient
        if total is None:
            total = torch.zeros_like(weight, dtype=_wide(weight))
        of_hidden = torch.empty_like(hidden)
        for rows, logits in ctx.head._logits(hidden, weight):
            grads = grad_log_prob[rows], grad_entropy[rows]
            ctx.head._backward(
                logits, seen[rows], *grads, hidden[rows], weight, of_hidden[rows], total
            )
        of_weight = total.to(weight.dtype) if ctx.weight_gradient is None else None
        if ctx.stand_in:
            of_weight = torch.empty_like(weight)
        return of_hidden, of_weight, *(None,) * 4


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _add_product(total: Tensor, logits: Tensor, hidden: Tensor) -> None:
    """Multiplies the transpose of `logits` by `hidden`, and adds the product to `total` [V, H]. The
    addition is done in the dtype of `total`."""
    if logits.dtype == total.dtype:
        total.addmm_(logits.t(), hidden)
    elif logits.device.type == "cuda":
        torch.addmm(total, logits.t(), hidden, out_dtype=total.dtype, out=total)
    else:  # CPUs have no product with out_dtype
        total.addmm_(logits.to(total.dtype).t(), hidden.to(total.dtype))


def _check_local(used: Tensor, slope: Tensor) -> None:
    """Checks that the loss of each token is independent of all other tokens. A slope is the
    derivative of the loss with respect to one token's log-prob or entropy. Each token has one slope
    in `used` and one slope in `slope`. The slope in `used` was computed while the log-probs and
    entropies of later chunks were still unknown. The slope stored in `slope` was computed after all
    chunks had been processed. If the loss of each token is independent of other tokens, the two
    slopes of each token are equal up to rounding errors. If the two slopes of a token differ by
    more than a rounding error, the loss couples tokens, and `_check_local` raises RuntimeError. On
    a GPU, the error is raised at the next synchronisation.

    Args:
        used: the slopes that were computed chunk by chunk. The gradient was computed from these
            slopes.
        slope: the slopes that were computed from all chunks together.
    """
    if slope.numel():
        moved = (used - slope).abs() > _SAME * slope.abs().nan_to_num(posinf=0.0).amax()
        message = (
            "this loss couples tokens: set model.head to materialised or recompute, or mend the"
            " method's coupling"
        )
        torch._assert_async(~moved.any(), message)
