"""Megatron's last hidden states on their way to log-probs and entropies: only the rows that predict a response token go
through the output layer, on every tensor-parallel rank for its own columns.

Shape legend: b rows and s positions of a micro-batch, n response positions of it, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.batching.microbatch import MicroBatch
from megatron_stare.ops.linear_head import LinearHead, Mode
from megatron_stare.ops.vocab_parallel import Problem

# [n] log-probs, entropies and the micro-batch they belong to -> scalar loss, and detached [n] tensors to log
LossFunction = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Head:
    """How hidden states become log-probs and entropies.

    entropy_gradient: whether entropies carry gradient; without it they cost nothing in backward.
    mode, chunk: see ops/linear_head.py.
    """

    vocab_size: int
    temperature: float
    layout: Layout
    entropy_gradient: bool = False
    mode: Mode = "materialised"
    chunk: int = 1024

    def compute_log_probs(
        self, model: GPTModel, hidden: Tensor, micro: MicroBatch, *, second_moment: bool = False
    ) -> tuple[Tensor, ...]:
        """hidden [s, b, H], or this rank's part of s under sequence parallelism -> log-prob and entropy [n] of the
        micro-batch's response positions, and with `second_moment` the sums [n] of the entropy sensitivity."""
        linear = self._linear
        if second_moment:
            linear = replace(linear, problem=replace(linear.problem, second_moment=True))
        return linear.compute_log_probs(rows_of(hidden, micro), output_weight(model), micro.targets)

    def loss(
        self, model: GPTModel, hidden: Tensor, micro: MicroBatch, loss_of: LossFunction
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, with gradient, and what it logs; see LinearHead.loss."""
        weight = output_weight(model)
        # Megatron's own buffer, which its hook leaves as it is where the gradient is said to be there already
        buffer = getattr(weight, "main_grad", None)
        loss, logged = self._linear.loss(
            rows_of(hidden, micro),
            weight,
            micro.targets,
            lambda log_prob, entropy: loss_of(log_prob, entropy, micro),
            buffer,
        )
        if self.mode != "materialised" and buffer is not None and not _is_embedding(model) and loss.requires_grad:
            loss.register_hook(lambda _: _announce(weight))
        return loss, logged

    @property
    def _linear(self) -> LinearHead:
        group = self.layout.tp_group if self.layout.tp > 1 else None
        problem = Problem(self.vocab_size, self.temperature, group, self.entropy_gradient)
        return LinearHead(problem, self.mode, self.chunk)


def _is_embedding(model: GPTModel) -> bool:
    """Whether the output weight is this chunk's embedding too, through which autograd brings it a gradient."""
    return model.share_embeddings_and_output_weights and model.pre_process


def _announce(weight: Tensor) -> None:
    """Says before backward that a weight has its gradient, for Megatron's hook to count it: it asserts that there is
    one where gradients are reduced during backward. A zero without memory of its own stands in for it."""
    weight.grad = weight.detach().new_zeros(()).expand_as(weight)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def output_weight(model: GPTModel) -> Tensor:
    """[V of this rank, H] of the output layer, which tied models share with the embedding."""
    # the head stands in for the layer's forward, before which Megatron waits for parameters that are being gathered
    for hook in model.output_layer._forward_pre_hooks.values():
        hook(model.output_layer, ())
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def rows_of(hidden: Tensor, micro: MicroBatch) -> Tensor:
    """[n, H] hidden states of the response positions, on every tensor-parallel rank; backward sums over the ranks, each
    of which adds the part of its columns."""
    return micro.layout.rows(hidden, micro.rows)
