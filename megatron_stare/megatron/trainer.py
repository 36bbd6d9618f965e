"""One rank of the trainer: a plain class that runners place in this process or in an actor of its own.

A step on every rank: `score` (log-prob pass) -> `measure` (statistics of the whole batch, the method's state) ->
`update` (gradient, clip, optimizer step). `export` hands the new weights to the rollout engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor, nn

from megatron_stare.algorithms.method import State
from megatron_stare.batch import MicroBatchPlan, RolloutBatch, TokenBatch
from megatron_stare.config.schema import Config
from megatron_stare.megatron import checkpoint, layout
from megatron_stare.megatron.cpu_backend import backend, device
from megatron_stare.megatron.dump import write_dump
from megatron_stare.megatron.export import export_hf
from megatron_stare.megatron.microbatch import MicroBatch, RankBatch
from megatron_stare.megatron.model import build_policy, load_hf
from megatron_stare.megatron.optimizer import build_optimizer
from megatron_stare.megatron.passes import Head, accumulate_gradients, score
from megatron_stare.megatron.reference import Reference
from megatron_stare.methods import build_method
from megatron_stare.ops.statistics import answer, gather_statistics
from megatron_stare.statistics import Max, Mean, Request, Statistics, Sum, scalar
from megatron_stare.weights.hf_folder import HfFolder
from megatron_stare.weights.shape import read_shape


@dataclass
class Measured:
    """What the last pipeline stage knows of a scored batch: its tokens here, the statistics of all of it."""

    tokens: TokenBatch
    statistics: Statistics = field(default_factory=dict)
    state: State = field(default_factory=dict)


class Trainer:
    """A rank of the Megatron trainer."""

    def __init__(self, config: Config, rank: int, init_method: str) -> None:
        if not torch.cuda.is_available():
            torch.set_num_threads(config.runtime.trainer_threads)
        self.config = config
        self.method = build_method(config.algorithm)
        self.shape = read_shape(config.model.path)
        self.layout = layout.join(config.parallel, rank, init_method, config.run.seed, config.runtime.timeout_s)
        self.model = build_policy(self.shape, config.model, config.parallel, self.layout, config.optimizer.distributed)
        load_hf(self.model, HfFolder(config.model.path), self.shape, self.layout)
        # built after the weights are in, because it copies them into float32 masters
        self.optimizer, self.scheduler = build_optimizer(
            self.model, config.optimizer, config.model.dtype, config.run.steps
        )
        self.head = Head(
            self.shape.vocab_size, config.rollout.temperature, self.layout, self.method.needs_entropy_gradient
        )
        self.reference = Reference(config, self.shape, self.layout) if self.method.needs_reference else None
        self._batch: RankBatch | None = None
        self._measured: Measured | None = None  # on the last pipeline stage only

    @property
    def _group(self) -> torch.distributed.ProcessGroup | None:
        return self.layout.dp_group if self.layout.dp > 1 else None

    def score(self, batch: RolloutBatch, plan: MicroBatchPlan) -> None:
        """The forward-only pass: log-prob and entropy of every response token under the current policy."""
        self._batch = RankBatch(
            batch,
            plan,
            self.layout.dp_rank,
            device(),
            packed=self.config.batch.packed,
            multiple=self.layout.tp if self.config.parallel.sequence else 1,
            uniform=self.config.parallel.virtual_pipeline > 1,
        )
        log_prob, entropy = score(self.model, self._batch, self.head)
        reference = self.reference.score(self._batch, self.head) if self.reference is not None else None
        if self.layout.last_stage:
            carries_loss, shaped = self.method.carries_loss(batch), self.method.shaped_rewards(batch)
            tokens = self._batch.token_batch(log_prob, entropy, carries_loss, shaped)
            self._measured = Measured(replace(tokens, reference_log_prob=reference))

    def scored(self) -> tuple[Tensor, Tensor] | None:
        """Canonical numbers and log-probs [n] of the response positions that `score` found here; None on ranks whose
        positions the first of their tensor-parallel group reports."""
        if self._measured is None or self.layout.tp_rank != 0:
            return None
        return self._measured.tokens.index.cpu(), self._measured.tokens.old_log_prob.cpu()

    def rescore(self, batch: RolloutBatch, plan: MicroBatchPlan, temperature: float) -> tuple[Tensor, Tensor] | None:
        """As `scored`, of any batch and at any temperature, and leaves the batch of the step alone."""
        here = RankBatch(
            batch,
            plan,
            self.layout.dp_rank,
            device(),
            packed=self.config.batch.packed,
            multiple=self.layout.tp if self.config.parallel.sequence else 1,
            uniform=self.config.parallel.virtual_pipeline > 1,
        )
        log_prob, *_ = score(self.model, here, replace(self.head, temperature=temperature))
        if not self.layout.last_stage or self.layout.tp_rank != 0:
            return None
        return here.index, log_prob.cpu()

    @torch.no_grad()
    def measure(self, state: dict[str, float]) -> None:
        """The method's statistics over the whole batch, and its state for this step."""
        if self._measured is None:
            return
        tokens = self._measured.tokens
        statistics = gather_statistics(lambda known: self.method.requests(tokens, known), self._group)
        before = {name: torch.tensor(x, dtype=torch.float64, device=device()) for name, x in state.items()}
        self._measured = Measured(tokens, statistics, self.method.control(before, statistics))

    def update(self, dump_to: str | None = None) -> tuple[dict[str, float], dict[str, float]] | None:
        """Forward, backward, clip, optimizer step.

        Args:
            dump_to: folder to write batch, weights before, loss and gradients to; None: nothing is written.

        Returns:
            On the reporting rank the step's metrics and the method's new state, elsewhere None. `update/finite` 0
            among the metrics says that the gradient was not finite and no step was taken.
        """
        if self._batch is None:
            raise RuntimeError("update() before score()")
        # The last step left every parameter's grad pointing into the gradient buffer: autograd would add to the buffer
        # through it, and Megatron's hook would then add the buffer to itself.
        self.optimizer.zero_grad()
        weights_before = self.export() if dump_to else {}
        logged = accumulate_gradients(self.model, self._batch, self.head, self._loss)
        metrics = self._metrics(logged)
        if dump_to:
            gradients = export_hf(self.model, self.shape, self.layout, of=main_grad)
            if self.layout.speaks:
                loss = float(metrics["loss/policy"])
                write_dump(Path(dump_to), self._batch.batch, weights_before, gradients, loss, self.config)
        grad_norm, finite = self._optimizer_step()
        if self._measured is None or not self.layout.speaks:
            return None
        rates = {
            "optimizer/grad_norm": grad_norm,
            "optimizer/lr": float(self.optimizer.param_groups[0]["lr"]),
            "update/finite": float(finite),
        }
        state = {name: float(x) for name, x in self._measured.state.items()}
        return {**{name: float(x) for name, x in metrics.items()}, **rates}, state

    def _loss(self, log_prob: Tensor, entropy: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert self._measured is not None  # Megatron calls it on the last stage
        statistics, state = self._measured.statistics, self._measured.state
        rows = torch.arange(micro.span.start, micro.span.stop, device=log_prob.device)
        current_entropy = entropy if self.method.needs_entropy_gradient else None
        tokens = replace(self._measured.tokens.select(rows), log_prob=log_prob, current_entropy=current_entropy)
        terms = self.method.token_loss(tokens, statistics, state)
        scale = self.method.coefficients(tokens, statistics)
        # where, not multiplication: a masked position may hold a loss that is not finite
        each = torch.where(scale > 0, scale * terms.loss, 0.0)
        log_ratio = (log_prob.detach() - tokens.old_log_prob).abs()
        return each.sum(), {"loss/policy": each.detach(), "ratio/max_abs_log": log_ratio, **terms.shares}

    @torch.no_grad()
    def _metrics(self, logged: dict[str, Tensor]) -> Mapping[str, Tensor | float]:
        """Everything that is logged of the update, over the whole batch; 0-dim tensors."""
        if self._measured is None:
            return {}
        tokens, statistics = self._measured.tokens, self._measured.statistics
        drift = (tokens.old_log_prob - tokens.rollout_log_prob).abs()
        loss, log_ratio = logged.pop("loss/policy"), logged.pop("ratio/max_abs_log")
        requests: dict[str, Request] = {
            "loss/policy": Sum(loss, tokens.mask),
            "ratio/max_abs_log": Max(log_ratio, tokens.mask),
            "entropy/mean": Mean(tokens.entropy, tokens.mask),
            "surprisal/mean": Mean(tokens.surprisal, tokens.mask),
            "rollout/logprob_diff_mean": Mean(drift, tokens.mask),
            "rollout/logprob_diff_max": Max(drift, tokens.mask),
            **{name: Mean(share, tokens.mask) for name, share in logged.items()},
        }
        answers = answer(requests, self._group)
        asked = {name: scalar(answers, name) for name in answers}
        return {**asked, **self.method.metrics(statistics, self._measured.state)}

    def _optimizer_step(self) -> tuple[float, bool]:
        """Clips and steps. Returns the gradient norm before clipping, and whether it was finite; if not, no step."""
        with backend():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())  # the one value a step reads from the device
            finite = norm < float("inf")  # False for NaN too
            if not finite:
                return norm, False
            self.scheduler.step(1)
            for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):  # experts have their own
                clip_grad_by_total_norm_fp32(part.get_parameters(), self.config.optimizer.clip_grad, norm)
            self.optimizer.step_with_ready_grads()
        return norm, True

    def export(self) -> dict[str, Tensor]:
        """This rank's part of the policy's whole tensors by Hugging Face name; each tensor comes from one rank."""
        return export_hf(self.model, self.shape, self.layout)

    def save(self, folder: str) -> None:
        """Writes this rank's part of a checkpoint into an existing, empty folder. All ranks must call it."""
        checkpoint.save(folder, self.model, self.optimizer, self.scheduler, self.layout)

    def load(self, folder: str) -> None:
        """Continues from a checkpoint folder. All ranks must call it."""
        checkpoint.load(folder, self.model, self.optimizer, self.scheduler, self.layout)

    def close(self) -> None:
        """Leaves the process groups."""
        layout.leave()


def main_grad(parameter: nn.Parameter) -> Tensor:
    """The gradient that Megatron's buffers hold for a parameter."""
    return parameter.main_grad.view_as(parameter)  # type: ignore[attr-defined]
