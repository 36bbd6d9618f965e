"""Megatron's last hidden states on their way to log-probs and entropies.

Only the rows that predict a response token go through the output layer, on every tensor-parallel
rank for its own columns. Where the configuration leaves open which way they go, the memory at hand
decides (`choose_head`).

Shape legend: b rows and s positions of a micro-batch, n response positions of it, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import psutil
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_stare.config.schema import Config
from megatron_stare.megatron.backend.cpu_backend import device
from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.batching.microbatch import MicroBatch
from megatron_stare.models.shape import ModelShape
from megatron_stare.ops.linear_head import LinearHead, Mode
from megatron_stare.ops.vocab_parallel import Problem

# Logits are taken whole up to this share of the free memory. The rest is for activations, which
# live at the same time, and for the optimizer's moments, which come with the first step.
SHARE = 1 / 8
# [n] log-probs, entropies and the micro-batch they belong to -> scalar loss, and detached [n]
# tensors to log
LossFunction = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class HeadChoice:
    """A way through the output layer (ops/linear_head.py), and why, for the person who started the
    run."""

    mode: Mode
    reason: str


def choose_head(
    coupling: Literal["token", "sequence"], logits_bytes: int, free_bytes: int
) -> HeadChoice:
    """Whole logits where they fit, else chunks; of these the one that computes logits once where
    the loss allows it.

    Args:
        coupling: of the method; see algorithms/method.py.
        logits_bytes: of the largest micro-batch on one rank.
        free_bytes: on the rank that has least.
    """
    size = (
        f"a micro-batch's logits take up to {logits_bytes / 1e9:.3g} GB a rank,"
        f" {free_bytes / 1e9:.3g} GB are free"
    )
    if logits_bytes <= SHARE * free_bytes:
        return HeadChoice("materialised", size)
    if coupling == "token":
        return HeadChoice(
            "gradient_in_forward", f"{size}, and a token's loss depends on its own log-prob alone"
        )
    return HeadChoice("recompute", f"{size}, and the loss couples the tokens of a response")


def largest_logits(config: Config, shape: ModelShape) -> int:
    """Bytes of the logits [micro_batch_tokens of one rank, V of one rank], as if every token were
    predicted."""
    columns = shape.padded_vocab(config.parallel.tensor) // config.parallel.tensor
    rows = -(-config.batch.micro_batch_tokens // config.parallel.context)
    return rows * columns * (4 if config.model.dtype == "float32" else 2)


def free_memory() -> int:
    """Bytes that the rank with least of them could still take. All ranks must call it; ranks on
    CPUs are taken to share one machine."""
    if torch.cuda.is_available():
        free = (
            torch.cuda.mem_get_info()[0]
            + torch.cuda.memory_reserved()
            - torch.cuda.memory_allocated()
        )
    else:
        free = psutil.virtual_memory().available // dist.get_world_size()
    least = torch.tensor(free, dtype=torch.int64, device=device())
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


@dataclass(frozen=True)
class Head:
    """The way from hidden states to log-probs and entropies.

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
        """hidden [s, b, H], or this rank's part of s under sequence parallelism -> log-prob and
        entropy [n] of the micro-batch's response positions, and with `second_moment` the sums [n]
        of the entropy sensitivity."""
        linear = self._linear
        if second_moment:
            linear = replace(linear, problem=replace(linear.problem, second_moment=True))
        return linear.compute_log_probs(rows_of(hidden, micro), output_weight(model), micro.targets)

    def loss(
        self, model: GPTModel, hidden: Tensor, micro: MicroBatch, loss_of: LossFunction
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, with gradient, and what it logs; see LinearHead.loss."""
        weight = output_weight(model)
        # Megatron's own gradient buffer; its hook leaves a gradient there alone
        buffer = getattr(weight, "main_grad", None)
        loss, logged = self._linear.loss(
            rows_of(hidden, micro),
            weight,
            micro.targets,
            lambda log_prob, entropy: loss_of(log_prob, entropy, micro),
            buffer,
        )
        if (
            self.mode != "materialised"
            and buffer is not None
            and not _is_embedding(model)
            and loss.requires_grad
        ):
            loss.register_hook(lambda _: _announce(weight))
        return loss, logged

    @property
    def _linear(self) -> LinearHead:
        group = self.layout.tp_group if self.layout.tp > 1 else None
        problem = Problem(self.vocab_size, self.temperature, group, self.entropy_gradient)
        return LinearHead(problem, self.mode, self.chunk)


def _is_embedding(model: GPTModel) -> bool:
    """Says whether the output weight is this chunk's embedding too, through which autograd brings
    it a gradient."""
    return model.share_embeddings_and_output_weights and model.pre_process


def _announce(weight: Tensor) -> None:
    """Says before backward that a weight has its gradient, for Megatron's hook to count it: it
    asserts that there is one where gradients are reduced during backward. A zero without memory of
    its own stands in for it."""
    weight.grad = weight.detach().new_zeros(()).expand_as(weight)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def output_weight(model: GPTModel) -> Tensor:
    """[V of this rank, H] of the output layer, which tied models share with the embedding."""
    # the head stands in for the layer's forward, before which Megatron waits for parameters that
    # are being gathered
    for hook in model.output_layer._forward_pre_hooks.values():
        hook(model.output_layer, ())
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def rows_of(hidden: Tensor, micro: MicroBatch) -> Tensor:
    """[n, H] hidden states of the response positions, on every tensor-parallel rank; backward sums
    over the ranks, each of which adds the part of its columns."""
    return micro.layout.rows(hidden, micro.rows)
