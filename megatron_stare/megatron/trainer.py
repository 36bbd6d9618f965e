"""One rank of the trainer: a plain class that runners place in this process or in an actor of its own.

A step on every rank: `score` (log-prob pass) -> `measure` (statistics of the rollout batch, the method's state) ->
`update`, once a mini-batch (gradient, clip, optimizer step). The weight stream hands the new weights to the engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_stare.batch import MicroBatchPlan, RolloutBatch
from megatron_stare.config.schema import Config
from megatron_stare.megatron import checkpoint, layout
from megatron_stare.megatron.cpu_backend import device
from megatron_stare.megatron.dump import write_step, write_tensors
from megatron_stare.megatron.export import PolicyStream, export_hf
from megatron_stare.megatron.forecast import forecast, measured_change
from megatron_stare.megatron.head import Head
from megatron_stare.megatron.head_choice import HeadChoice, choose_head, free_memory, largest_logits
from megatron_stare.megatron.measured import Measured, complete, measure_batch
from megatron_stare.megatron.microbatch import MicroBatch, RankBatch
from megatron_stare.megatron.model import build_policy
from megatron_stare.megatron.objective import Objective, make_objective
from megatron_stare.megatron.optimizer import build_optimizer, take_step
from megatron_stare.megatron.passes import accumulate_gradients, score
from megatron_stare.megatron.reference import Reference
from megatron_stare.megatron.start import load_start
from megatron_stare.methods import build_method
from megatron_stare.ops.statistics import answer
from megatron_stare.statistics import scalar
from megatron_stare.weights.shape import read_shape
from megatron_stare.weights.stream_plan import BucketLayout


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
        load_start(self.model, config.model.path, self.shape, self.layout)
        # built after the weights are in, because it copies them into float32 masters
        self.optimizer, self.scheduler = build_optimizer(
            self.model, config.optimizer, config.model.dtype, config.run.steps * config.batch.updates
        )
        self.reference = Reference(config, self.shape, self.layout) if self.method.needs_reference else None
        self._head_choice = self._choose_head()
        self.head = Head(
            self.shape.vocab_size,
            config.rollout.temperature,
            self.layout,
            self.method.needs_entropy_gradient,
            self._head_choice.mode,
            config.model.head_chunk_tokens,
        )
        self.stream = PolicyStream(self.model, self.shape, self.layout, config.rollout.sync_bucket_mb * 2**20)
        self._batch: RankBatch | None = None
        self._measured: Measured | None = None  # on the last pipeline stage only
        self._objective: Objective | None = None  # of the update at hand; likewise

    def _choose_head(self) -> HeadChoice:
        """All ranks make the same choice, and once: both passes must take the same way."""
        asked = self.config.model.head
        if asked != "auto":
            return HeadChoice(asked, "")
        return choose_head(self.method.coupling, largest_logits(self.config, self.shape), free_memory())

    def notes(self) -> list[str]:
        """What was decided here, for the person who started the run; a line each."""
        choice = self._head_choice
        return [f"model.head: {choice.mode}, because {choice.reason}"] if choice.reason else []

    @property
    def _group(self) -> torch.distributed.ProcessGroup | None:
        return self.layout.dp_group if self.layout.dp > 1 else None

    def _share_of(self, batch: RolloutBatch, plan: MicroBatchPlan) -> RankBatch:
        return RankBatch(
            batch,
            plan,
            self.layout.dp_rank,
            device(),
            packed=self.config.batch.packed,
            multiple=self.layout.tp if self.config.parallel.sequence else 1,
            uniform=self.config.parallel.virtual_pipeline > 1,
        )

    def score(self, batch: RolloutBatch, plan: MicroBatchPlan) -> None:
        """The forward-only pass: log-prob and entropy of every response token under the current policy.

        Where the configuration skips it, both are NaN until the training pass has given them.
        """
        self._batch = self._share_of(batch, plan)
        moments: list[Tensor] = []
        if self.config.skips_log_prob_pass:
            log_prob = entropy = torch.full(self._batch.index.shape, torch.nan, device=device())
        else:
            log_prob, entropy, *moments = score(
                self.model, self._batch, self.head, second_moment=self.config.observability.entropy_forecast
            )
        reference = self.reference.score(self._batch, self.head) if self.reference is not None else None
        if self.layout.last_stage:
            carries_loss, shaped = self.method.carries_loss(batch), self.method.shaped_rewards(batch)
            tokens = self._batch.token_batch(log_prob, entropy, carries_loss, shaped)
            sum_p2, sum_p2_log_p = moments or (None, None)
            from_rollout = self.config.statistics.surprisal == "rollout"
            self._measured = Measured(
                replace(
                    tokens,
                    reference_log_prob=reference,
                    selection_log_prob=tokens.rollout_log_prob if from_rollout else None,
                    sum_p2=sum_p2,
                    sum_p2_log_p=sum_p2_log_p,
                )
            )

    def scored(self) -> tuple[Tensor, Tensor] | None:
        """Canonical numbers and log-probs [n] of the response positions that `score` found here; None on ranks whose
        positions the first of their tensor-parallel group reports."""
        if self._measured is None or self.layout.tp_rank != 0:
            return None
        return self._measured.tokens.index.cpu(), self._measured.tokens.old_log_prob.cpu()

    def rescore(self, batch: RolloutBatch, plan: MicroBatchPlan, temperature: float) -> tuple[Tensor, Tensor] | None:
        """As `scored`, of any batch and at any temperature, and leaves the batch of the step alone."""
        here = self._share_of(batch, plan)
        log_prob, *_ = score(self.model, here, replace(self.head, temperature=temperature))
        if not self.layout.last_stage or self.layout.tp_rank != 0:
            return None
        return here.index.cpu(), log_prob.cpu()

    @torch.no_grad()
    def measure(self, state: dict[str, float]) -> None:
        """The method's statistics over the rollout batch, and its state for this step: it moves once a batch."""
        if self._measured is None or self._batch is None:
            return
        before = {name: torch.tensor(x, dtype=torch.float64, device=device()) for name, x in state.items()}
        lagged, tokens = self.config.skips_log_prob_pass, self._measured.tokens
        self._measured = measure_batch(self.method, tokens, before, self._group, lagged=lagged)
        self._objective = self._make_objective(0)
        if tokens.sum_p2 is not None and (first := self._objective) is not None:
            # of several updates the first: only its policy is the one that was scored
            micro_batches, temperature = self._batch.mini_batch(0).micro_batches, self.head.temperature
            found = forecast(first.tokens, micro_batches, first.loss, temperature, self._group)
            self._measured = replace(self._measured, forecast=found)

    def update(self, number: int = 0, dump_to: str | None = None) -> tuple[dict[str, float], dict[str, float]] | None:
        """Forward, backward, clip, optimizer step on one mini-batch.

        Args:
            number: of the update, from 0; mini-batches are taken in order, and in every epoch again.
            dump_to: folder to write the first update's mini-batch, weights before, loss and gradients to, or None.

        Returns:
            On the reporting rank the update's metrics, the first's with those of the rollout batch, and the method's
            state for the next step; elsewhere None. `update/finite` 0 among the metrics says that the gradient was not
            finite and no step was taken.
        """
        if self._batch is None:
            raise RuntimeError("update() before score()")
        part = self._batch.mini_batch(number % len(self._batch.plan.mini_batches))
        if number > 0:  # `measure` made the first
            self._objective = self._make_objective(number)
        # The last step left every parameter's grad pointing into the gradient buffer: autograd would add to the buffer
        # through it, and Megatron's hook would then add the buffer to itself.
        self.optimizer.zero_grad()
        weights_before = self.export() if dump_to else {}
        logged = accumulate_gradients(self.model, part, self.head, self._loss)
        if self.config.skips_log_prob_pass and self._measured is not None:
            self._measured = complete(self._measured, logged, self.method, self._group)
        metrics = self._metrics(logged, with_batch=number == 0)
        if dump_to:
            gradients = export_hf(self.model, self.shape, self.layout, of=main_grad)
            if self.layout.rank == 0:  # which has all tensors, as the last stage has the loss
                write_tensors(Path(dump_to), weights_before, gradients)
            if self.layout.speaks:
                loss = float(metrics["loss/policy"])
                batch = self._batch.batch.first(len(self._batch.plan.samples(0)))
                write_step(Path(dump_to), batch, loss, self.config)
        grad_norm, finite = take_step(self.optimizer, self.scheduler, self.config.optimizer.clip_grad)
        if finite and number == 0 and self._measures_entropy(self._batch.batch.step):
            scored = self._objective.tokens.select(self._objective.rows) if self._objective is not None else None
            metrics = {**metrics, **measured_change(self.model, part, self.head, scored, self._group)}
        if self._measured is None or not self.layout.speaks:
            return None
        rates = {
            "optimizer/grad_norm": grad_norm,
            "optimizer/lr": float(self.optimizer.param_groups[0]["lr"]),
            "update/finite": float(finite),
        }
        state = {name: float(x) for name, x in self._measured.next_state.items()}
        return {**{name: float(x) for name, x in metrics.items()}, **rates}, state

    @torch.no_grad()
    def _make_objective(self, number: int) -> Objective | None:
        """What an update minimises; None but on the last pipeline stage. All ranks must call it for updates after the
        first, before which `statistics.surprisal: current` scores the mini-batch again."""
        assert self._batch is not None
        mini_batch = number % len(self._batch.plan.mini_batches)
        part, rescored = self._batch.mini_batch(mini_batch), None
        if self.config.statistics.surprisal == "current" and number > 0:
            rescored, _ = score(self.model, part, self.head)
        if self._measured is None:
            return None
        measured = self._measured
        tokens = self._batch.tokens_of(mini_batch, measured.tokens, self.method.carries_loss(self._batch.batch))
        if rescored is not None:
            selected_by = tokens.old_log_prob.clone()
            selected_by[part.span] = rescored
            tokens = replace(tokens, selection_log_prob=selected_by)
        whole = len(self._batch.plan.mini_batches) == 1
        return make_objective(
            self.method,
            part,
            tokens,
            measured.state,
            self._group,
            by_micro_batch=self.config.statistics.scope == "micro_batch",
            scores=self.config.skips_log_prob_pass,
            known=measured.statistics if whole and rescored is None else None,
        )

    def _loss(self, log_prob: Tensor, entropy: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert self._objective is not None  # Megatron calls it on the last stage
        return self._objective.loss(log_prob, entropy, micro)

    @torch.no_grad()
    def _metrics(self, logged: Mapping[str, Tensor], *, with_batch: bool) -> Mapping[str, Tensor | float]:
        """Everything that is logged of an update, and `with_batch` of the rollout batch; 0-dim tensors."""
        if self._measured is None or self._objective is None:
            return {}
        objective = self._objective
        of_batch = self._measured.requests() if with_batch else {}
        answers = answer({**of_batch, **objective.requests(logged)}, self._group)
        asked = {name: scalar(answers, name) for name in answers}
        forecast = self._measured.forecast if with_batch else {}
        return {**asked, **forecast, **self.method.metrics(objective.statistics, objective.state)}

    def _measures_entropy(self, step: int) -> bool:
        """Whether the entropy is measured again after this step: only where it was forecast."""
        watched = self.config.observability
        if not watched.entropy_forecast or self.config.skips_log_prob_pass or watched.measured_every == 0:
            return False
        return step % watched.measured_every == 0

    def refresh_reference(self) -> None:
        """Makes the policy as it is now the reference policy."""
        if self.reference is None:
            raise RuntimeError("there is no reference policy")
        self.reference.refresh(self.model)

    def export(self) -> dict[str, Tensor]:
        """The whole policy by Hugging Face name on the first rank, nothing elsewhere; if one process can hold it."""
        return export_hf(self.model, self.shape, self.layout)

    def bucket_layouts(self) -> tuple[BucketLayout, ...]:
        """What the buckets of the weight stream hold."""
        return self.stream.layouts

    def begin_weight_stream(self) -> None:
        """Starts to stream the policy. All ranks must call it, then `next_bucket` once a bucket, then the end."""
        self.stream.begin()

    def next_bucket(self) -> Tensor | None:
        """The next bucket of whole tensors, flat, on the first rank; None elsewhere."""
        return self.stream.next()

    def end_weight_stream(self) -> dict[str, str]:
        """Checksums of the tensors that were streamed, by name, on the first rank."""
        return self.stream.end()

    @property
    def _moving_reference(self) -> list[nn.Module]:
        """The reference's chunks where they change, and so belong into checkpoints; else none."""
        moves = self.reference is not None and self.config.model.reference_refresh_every is not None
        return self.reference.model if self.reference is not None and moves else []

    def save(self, folder: str) -> None:
        """Writes this rank's part of a checkpoint into an existing, empty folder. All ranks must call it."""
        checkpoint.save(folder, self.model, self.optimizer, self.scheduler, self.layout, self._moving_reference)

    def load(self, folder: str) -> None:
        """Continues from a checkpoint folder. All ranks must call it."""
        checkpoint.load(folder, self.model, self.optimizer, self.scheduler, self.layout, self._moving_reference)

    def close(self) -> None:
        """Leaves the process groups."""
        layout.leave()


def main_grad(parameter: nn.Parameter) -> Tensor:
    """The gradient that Megatron's buffers hold for a parameter."""
    return parameter.main_grad.view_as(parameter)  # type: ignore[attr-defined]
