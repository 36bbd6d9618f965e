"""The two passes over a batch: forward only for log-probs and entropies, forward and backward for the gradient.

Both run Megatron's pipeline schedule over the same micro-batches, so on-policy ratios are 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megatron_stare.megatron.cpu_backend import backend
from megatron_stare.megatron.layout import Layout
from megatron_stare.megatron.microbatch import MicroBatch, RankBatch
from megatron_stare.ops.vocab_parallel import log_prob_and_entropy

# [n] log-probs, entropies and the micro-batch they belong to -> scalar loss, and detached [n] tensors to log
LossFunction = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Head:
    """How logits become log-probs and entropies.

    entropy_gradient: whether entropies carry gradient; without it they cost nothing in backward.
    """

    vocab_size: int
    temperature: float
    layout: Layout
    entropy_gradient: bool = False

    def __call__(self, logits: Tensor, micro: MicroBatch, *, second_moment: bool = False) -> tuple[Tensor, ...]:
        """logits [b, s, V of this rank] -> log-prob and entropy [n] of the micro-batch's response positions, and
        with `second_moment` the sums [n] of the entropy sensitivity."""
        return log_prob_and_entropy(
            logits.flatten(0, 1)[micro.rows],
            micro.targets,
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            group=self.layout.tp_group if self.layout.tp > 1 else None,
            entropy_gradient=self.entropy_gradient,
            second_moment=second_moment,
        )


def score(model: list[nn.Module], batch: RankBatch, head: Head, *, second_moment: bool = False) -> tuple[Tensor, ...]:
    """Log-probs and entropies [N] of this rank's response positions; on the last pipeline stage only, else empty.

    Args:
        second_moment: also give sum p^2 and sum p^2 ln p [N] over the vocabulary.
    """

    def collect(logits: Tensor, micro: MicroBatch, **_: Any) -> tuple[Tensor, ...]:
        return head(logits, micro, second_moment=second_moment)

    with torch.no_grad():
        scored = _run(model, batch, collect, forward_only=True)
    empty = torch.zeros(0, device=batch.device)
    columns = zip(*scored, strict=True) if scored else [()] * (4 if second_moment else 2)
    return tuple(torch.cat([empty, *column]) for column in columns)


def accumulate_gradients(
    model: list[nn.Module], batch: RankBatch, head: Head, loss_of: LossFunction
) -> dict[str, Tensor]:
    """Adds the gradient of the summed loss of all micro-batches to the model's gradient buffers, reduced over ranks.

    Returns:
        The tensors that `loss_of` gave to log, laid end to end: [N] each; empty but on the last stage.
    """

    def loss_function(logits: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        log_prob, entropy = head(logits, micro)
        loss, logged = loss_of(log_prob, entropy, micro)
        # the loss is already scaled by counts over the whole batch: with 0 tokens Megatron divides by nothing
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), logged

    for chunk in model:
        chunk.zero_grad_buffer()  # type: ignore[operator]
    logged = _run(model, batch, loss_function, forward_only=False)
    return {name: torch.cat([each[name] for each in logged]) for name in (logged[0] if logged else ())}


def _run(model: list[nn.Module], batch: RankBatch, after_logits: Callable[..., Any], *, forward_only: bool) -> Any:
    """Megatron's schedule over this rank's micro-batches; `after_logits` turns outputs into what is collected."""

    def forward_step(micro_batches: Any, chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        micro: MicroBatch = next(micro_batches)
        logits = chunk(micro.tokens, micro.positions, None, packed_seq_params=micro.packing)
        return logits, lambda output, non_loss_data=False: after_logits(output, micro)

    with backend():
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batch.micro_batches) for _ in model],
            model=model,
            num_microbatches=len(batch.micro_batches),
            seq_length=batch.micro_batches[0].tokens.shape[1],
            micro_batch_size=batch.micro_batches[0].tokens.shape[0],
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
