"""Turns Megatron's last hidden states into log-probs and entropies.

The output layer processes only the hidden states that predict a response token. Every
tensor-parallel rank computes its own columns of the logits. If the configuration does not set the
mode of the output layer, `choose_head` chooses the mode that suits the free memory.

Shape legend: b = rows of a micro-batch, s = positions in each row, n = response positions of a
micro-batch, as in microbatch.py, H = hidden size, V = vocabulary size with padding.
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

# Logits are materialised up to this share of the free memory. The rest is for activations, which
# live at the same time, and for the optimizer's moments, which the first step allocates.
SHARE = 1 / 8
# ([n] log-probs, [n] entropies, their micro-batch) -> (scalar loss, detached [n] tensors to log)
LossFunction = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class HeadChoice:
    """A mode of the output layer (ops/linear_head.py) and the reason for this mode, which is shown
    to the user."""

    mode: Mode
    reason: str


def choose_head(
    coupling: Literal["token", "sequence"], logits_bytes: int, free_bytes: int
) -> HeadChoice:
    """Chooses the mode of the output layer: all logits at once if they fit in memory, otherwise
    chunks of logits. If chunks are used and a token's loss depends on the log-probs of other
    tokens, backward computes the logits a second time.

    Args:
        coupling: coupling of the method's loss; see algorithms/method.py.
        logits_bytes: size of the largest micro-batch's logits on one rank.
        free_bytes: free memory, in bytes, of the rank that has the least free memory.
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
    """Returns the size in bytes of one rank's logits for a full micro-batch, assuming that logits
    are computed at every position. The shape of the logits is [tokens, columns]. A full micro-batch
    has `tokens` tokens on one rank, and the rank holds `columns` columns of the vocabulary."""
    columns = shape.padded_vocab(config.parallel.tensor) // config.parallel.tensor
    rows = -(-config.batch.micro_batch_tokens // config.parallel.context)
    return rows * columns * (4 if config.model.dtype == "float32" else 2)


def free_memory() -> int:
    """Returns the free bytes of the rank that has the least free memory. All ranks must call
    `free_memory`. Ranks on CPUs are assumed to share one machine."""
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
    """Computes log-probs and entropies from hidden states.

    `entropy_gradient`: whether entropies carry a gradient. Entropies without a gradient cost
        nothing in backward.
    `mode`, `chunk`: see ops/linear_head.py.
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
        """Returns log-probs [n] and entropies [n] of the micro-batch's response positions, computed
        from the hidden states `hidden` [s, b, H].

        Under sequence parallelism, `hidden` contains the hidden states of this rank's positions
        only. If `second_moment` is True, the method also returns two tensors [n] for the entropy
        sensitivity. The two tensors contain the sums of p^2 and of p^2 ln p over the vocabulary,
        where p is a token's probability.
        """
        linear = self._linear
        if second_moment:
            linear = replace(linear, problem=replace(linear.problem, second_moment=True))
        return linear.compute_log_probs(rows_of(hidden, micro), output_weight(model), micro.targets)

    def loss(
        self, model: GPTModel, hidden: Tensor, micro: MicroBatch, loss_of: LossFunction
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns a micro-batch's loss, which carries a gradient, and the tensors to log; see
        LinearHead.loss."""
        weight = output_weight(model)
        # Megatron's own gradient buffer; Megatron's hook does not touch a gradient already in it,
        # but needs one in its own place: a stand-in. An embedding's comes through the embedding.
        buffer = getattr(weight, "main_grad", None)
        stand_in = self.mode != "materialised" and buffer is not None and not _is_embedding(model)
        loss, logged = self._linear.loss(
            rows_of(hidden, micro),
            weight,
            micro.targets,
            lambda log_prob, entropy: loss_of(log_prob, entropy, micro),
            buffer,
            stand_in,
        )
        if stand_in and loss.requires_grad:
            loss.register_hook(lambda _: setattr(weight, "grad_added_to_main_grad", True))
        return loss, logged

    @property
    def _linear(self) -> LinearHead:
        group = self.layout.tp_group if self.layout.tp > 1 else None
        problem = Problem(self.vocab_size, self.temperature, group, self.entropy_gradient)
        return LinearHead(problem, self.mode, self.chunk)


def _is_embedding(model: GPTModel) -> bool:
    """Returns True if this model chunk contains the embedding, and the embedding shares its weight
    with the output layer. If the weight is shared, autograd also computes the weight's gradient
    from the embedding lookup."""
    return model.share_embeddings_and_output_weights and model.pre_process


def output_weight(model: GPTModel) -> Tensor:
    """Returns the output layer's weight [V of this rank, H], which tied models share with the
    embedding."""
    # The head replaces the layer's forward, so it calls the hooks that wait for parameters being
    # gathered.
    for hook in model.output_layer._forward_pre_hooks.values():
        hook(model.output_layer, ())
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def rows_of(hidden: Tensor, micro: MicroBatch) -> Tensor:
    """Returns hidden states [n, H] of the response positions, on every tensor-parallel rank.

    Backward sums gradients over the tensor-parallel ranks. Each rank contributes the gradient from
    its columns of the output layer.
    """
    return micro.layout.rows(hidden, micro.rows)
