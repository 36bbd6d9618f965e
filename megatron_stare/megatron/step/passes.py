"""Runs the log-prob pass and the training pass over a batch. The log-prob pass computes log-probs
and entropies, and runs only the model's forward pass. The training pass computes the gradient, and
normally runs the model's forward pass and backward pass. If the log-prob pass kept the last hidden
states, the training pass starts from these hidden states, and does not run the model's forward pass
again.

The two passes run Megatron's pipeline schedule over the same micro-batches. On-policy ratios are
therefore 1. `Reference` is the reference policy in the KL term. The reference policy's log-probs
also come from a forward-only pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from megatron_stare.config.schema import Config
from megatron_stare.megatron.backend.cpu_backend import backend, device, has_transformer_engine
from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.batching.microbatch import MicroBatch, RankBatch
from megatron_stare.megatron.checkpoint.checkpoint import load_start
from megatron_stare.megatron.model.head import Head, LossFunction
from megatron_stare.megatron.model.model import build_model, hidden_states, unwrap
from megatron_stare.megatron.model.routing_replay import begin_pass, give_experts
from megatron_stare.models.shape import ModelShape
from megatron_stare.run_dir.heartbeat import tell_progress


def compute_log_probs(
    model: list[nn.Module],
    batch: RankBatch,
    head: Head,
    *,
    second_moment: bool = False,
    keep: list[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Returns log-probs and entropies [N] of this rank's response positions. The returned tensors
    are empty on all pipeline stages except the last stage.

    Args:
        second_moment: whether to return two more tensors [N]: sum p^2 and sum p^2 ln p, over the
            vocabulary.
        keep: list to fill with the last hidden states of each micro-batch and their autograd graph.
            `accumulate_gradients` continues from these hidden states. A model with several pipeline
            stages does not support `keep`.
    """

    def collect(chunk: nn.Module, hidden: Tensor, micro: MicroBatch) -> tuple[Tensor, ...]:
        if keep is not None:
            keep.append(hidden)
        with torch.no_grad():
            return head.compute_log_probs(unwrap(chunk), hidden, micro, second_moment=second_moment)

    with torch.set_grad_enabled(keep is not None):
        passed = _run(model, batch, collect, forward_only=True)
    empty = torch.zeros(0, device=batch.device)
    columns = zip(*passed, strict=True) if passed else [()] * (4 if second_moment else 2)
    return tuple(torch.cat([empty, *column]) for column in columns)


def accumulate_gradients(
    model: list[nn.Module],
    batch: RankBatch,
    head: Head,
    loss_of: LossFunction,
    loss_scale: Tensor | None = None,
    kept: list[Tensor] | None = None,
) -> dict[str, Tensor]:
    """Computes the gradient of the loss over all micro-batches, reduces the gradient over ranks,
    and leaves the result in the model's gradient buffers.

    Args:
        loss_scale: 0-dim factor of the loss and therefore of the gradient, or None for a factor of
            1.
        kept: hidden states that `compute_log_probs` kept for the same micro-batches and weights.
            With these hidden states, the model's forward does not run again. `accumulate_gradients`
            empties the list.

    Returns:
        The tensors [N] that `loss_of` logged, concatenated over micro-batches. The returned dict is
            empty on all pipeline stages but the last.
    """

    def scaled_loss(
        log_prob: Tensor, entropy: Tensor, micro: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, logged = loss_of(log_prob, entropy, micro)
        return loss if loss_scale is None else loss * loss_scale, logged

    def loss_function(
        chunk: nn.Module, hidden: Tensor, micro: MicroBatch
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        # The loss is scaled before the head sees it, not afterwards by Megatron's grad_scale_func:
        # a head that computes gradients in the forward writes the logits' gradients in float16
        # there.
        loss, logged = head.loss(unwrap(chunk), hidden, micro, scaled_loss)
        # The loss is already divided by counts over the whole batch. With 0 tokens Megatron does
        # not divide again.
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), logged

    for chunk in model:
        chunk.zero_grad_buffer()  # type: ignore[operator]
    logged = _run(model, batch, loss_function, forward_only=False, kept=kept)
    return {
        name: torch.cat([each[name] for each in logged]) for name in (logged[0] if logged else ())
    }


def _run(
    model: list[nn.Module],
    batch: RankBatch,
    after_hidden: Callable[..., Any],
    *,
    forward_only: bool,
    kept: list[Tensor] | None = None,
) -> Any:
    """Runs Megatron's schedule over this rank's micro-batches.

    `after_hidden` computes a micro-batch's results from the last hidden states. If `kept` has
    entries, the hidden states come from `kept`, and no forward pass runs.
    """
    # Megatron expects the length before sequences are split
    split = batch.layout.micro_batch_group

    def forward_step(micro_batches: Any, chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        micro: MicroBatch = next(micro_batches)
        tell_progress()  # a pass over many micro-batches may outlast its phase's hang limit
        if kept:
            hidden = kept.pop(0)
        else:
            give_experts(chunk, micro.experts)
            hidden = hidden_states(chunk, micro.tokens, micro.positions, micro.packing)
        return hidden, lambda output, non_loss_data=False: after_hidden(chunk, output, micro)

    def on_device() -> Iterator[MicroBatch]:
        """Copies each micro-batch to the device when the schedule requests the micro-batch."""
        bounds = has_transformer_engine()
        return (micro.to(batch.device, bounds=bounds) for micro in batch.micro_batches)

    begin_pass(model, trains=not forward_only)
    with backend():
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[on_device() for _ in model],
            model=model,
            num_microbatches=len(batch.micro_batches),
            seq_length=batch.micro_batches[0].tokens.shape[1]
            * (split.size() if split is not None else 1),
            micro_batch_size=batch.micro_batches[0].tokens.shape[0],
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    if not forward_only:
        forget_routes(model)
    return results


def forget_routes(model: list[nn.Module]) -> None:
    """Drops the routing weights that the token dispatchers keep from the last micro-batch.

    The autograd graph of the routing weights leads back to the model through nodes that Python's
    garbage collector does not see. If the routing weights were not dropped, they would keep the
    model and the process groups of a closed trainer in memory.
    """
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, MoELayer):
                module.token_dispatcher.probs = None


class Reference:
    """The reference policy, without gradients, in the trainer's layout. The reference policy's
    weights come from model.reference_path, or from model.path if no reference path is set.

    Args:
        shape: shape of the trained policy. The reference policy has the same shape.
    """

    def __init__(self, config: Config, shape: ModelShape, layout: Layout) -> None:
        self._offload = config.model.reference_offload
        # with the policy's fusions, so that equal weights give equal log-probs; it has no gradients
        performance = config.performance.model_copy(update={"wgrad_fusion": False})
        self.model = build_model(
            shape, config.model, config.parallel, layout, performance, config.moe
        )
        for chunk in self.model:
            chunk.eval().requires_grad_(False)
        load_start(self.model, config.model.reference_path or config.model.path, shape, layout)
        self._move("cpu" if self._offload else str(device()))

    def compute_log_probs(self, batch: RankBatch, head: Head) -> Tensor:
        """Returns the reference policy's log-probs [N] of this rank's response positions. The
        reference policy's pass runs over the same micro-batches as the policy's passes."""
        self._move(str(device()))
        log_prob, _ = compute_log_probs(self.model, batch, head)
        if self._offload:
            self._move("cpu")
        return log_prob

    @torch.no_grad()
    def refresh(self, policy: list[nn.Module]) -> None:
        """Copies the policy's weights into the reference policy, one parameter at a time. The
        reference policy may be stored on the device or in host memory."""
        for mine, other in zip(self.model, policy, strict=True):
            for weight, current in zip(
                unwrap(mine).parameters(), unwrap(other).parameters(), strict=True
            ):
                weight.copy_(current)

    def _move(self, where: str) -> None:
        for chunk in self.model:
            chunk.to(where)
