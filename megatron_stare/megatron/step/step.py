"""Processes a rollout batch on one rank of the trainer, from the log-prob pass to the last
optimizer step.

For each rollout batch, the caller calls `compute_log_probs` once and then `measure` once. After
these two calls, the caller calls `update` once for each mini-batch of each epoch. `measure`
computes the statistics of the rollout batch, and then computes the method's state for this step.
`update` computes and clips the gradient and takes an optimizer step. Only the last pipeline stage
holds log-probs, statistics and losses. All other pipeline stages only run forward and backward
passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_stare.algorithms.method import Method
from megatron_stare.config.performance import keeps_graph
from megatron_stare.config.schema import Config
from megatron_stare.megatron.backend.cpu_backend import device
from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.batching.microbatch import MicroBatch, RankBatch
from megatron_stare.megatron.export.export import export_gradients, export_hf
from megatron_stare.megatron.model.head import Head
from megatron_stare.megatron.model.model import finish_gather
from megatron_stare.megatron.model.routing_replay import routing_metrics
from megatron_stare.megatron.optimizer.optimizer import loss_scale_of, take_step
from megatron_stare.megatron.step.diagnostics import (
    forecast,
    measured_change,
    token_norms,
    token_numbers,
)
from megatron_stare.megatron.step.dump import write_step, write_tensors
from megatron_stare.megatron.step.measured import Measured, complete, measure_batch
from megatron_stare.megatron.step.objective import Objective, make_objective
from megatron_stare.megatron.step.passes import Reference, accumulate_gradients, compute_log_probs
from megatron_stare.models.shape import ModelShape
from megatron_stare.ops.statistics_executor import answer
from megatron_stare.records.batch_statistics import scalar
from megatron_stare.records.metric import Metric
from megatron_stare.records.token_numbers import TokenNumbers

METRICS = (
    Metric(
        "optimizer/grad_norm",
        "norm",
        "norm of the gradient over all parameters, before clipping",
        "within ten times the median of the last 50 steps (alert above)",
    ),
    Metric("optimizer/lr", "rate", "learning rate of the step", "follows optimizer.schedule"),
    Metric(
        "optimizer/loss_scale",
        "factor",
        "factor of the loss for backward; float16 only",
        "a power of 2 that halves now and then; at optimizer.min_loss_scale gradients are broken",
    ),
)


@dataclass(frozen=True)
class Policy:
    """A rank's part of the policy, with the optimizer and the reference policy.

    `reference`: the reference policy in the KL term, or None if the method has no KL term.
    """

    model: list[nn.Module]
    shape: ModelShape
    layout: Layout
    head: Head
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    reference: Reference | None


class Step:
    """Training step on one rollout batch, on this rank.

    `measured`: the tokens that this rank holds, with the statistics of the whole rollout batch.
        `measured` is None on all pipeline stages but the last.
    `group`: group of the ranks over which the batch's tokens are divided, or None if this rank
        holds all tokens.
    """

    def __init__(self, config: Config, method: Method, policy: Policy, batch: RankBatch) -> None:
        self._config = config
        self._method = method
        self._policy = policy
        self.batch = batch
        self.group: ProcessGroup | None = batch.layout.group
        self.measured: Measured | None = None
        # objective of the current update; None on all but the last stage
        self._objective: Objective | None = None
        # [k] samples whose loss was not finite in the last update that was not taken
        self.lost: Tensor | None = None
        self._numbers: list[TokenNumbers] = []  # of watched tokens, one entry per update
        self._kept: list[Tensor] | None = (
            [] if keeps_graph(config, batch.plan.micro_batches) else None
        )
        # agreement of the log-prob pass's routers with the engine's
        self._routing: dict[str, Tensor] = {}

    def compute_log_probs(self) -> None:
        """Computes log-prob and entropy of every response token under the current policy, without a
        backward pass.

        If the configuration skips the log-prob pass, log-probs and entropies are NaN until the
        training pass provides their values.
        """
        config, policy, batch = self._config, self._policy, self.batch
        moments: list[Tensor] = []
        if config.skips_log_prob_pass:
            log_prob = entropy = torch.full(batch.index.shape, torch.nan, device=device())
        else:
            with_moments = config.observability.entropy_forecast or self._method.needs_second_moment
            log_prob, entropy, *moments = compute_log_probs(
                policy.model, batch, policy.head, second_moment=with_moments, keep=self._kept
            )
            if config.moe.routing_replay:
                self._routing = routing_metrics(policy.model, device())
        reference = (
            policy.reference.compute_log_probs(batch, policy.head)
            if policy.reference is not None
            else None
        )
        if not policy.layout.last_stage:
            return
        tokens = batch.token_batch(log_prob, entropy)
        sum_p2, sum_p2_log_p = moments or (None, None)
        from_rollout = config.statistics.surprisal == "rollout"
        self.measured = Measured(
            replace(
                tokens,
                reference_log_prob=reference,
                selection_log_prob=tokens.rollout_log_prob if from_rollout else None,
                sum_p2=sum_p2,
                sum_p2_log_p=sum_p2_log_p,
            )
        )

    @torch.no_grad()
    def measure(self, state: dict[str, float]) -> None:
        """Computes the training method's statistics over the rollout batch, and the training
        method's state for this step."""
        if self.measured is None:
            return
        before = {
            name: torch.tensor(x, dtype=torch.float64, device=device()) for name, x in state.items()
        }
        lagged, tokens = self._config.skips_log_prob_pass, self.measured.tokens
        self.measured = measure_batch(self._method, tokens, before, self.group, lagged=lagged)
        self._objective = self._make_objective(0)
        watched = self._config.observability.entropy_forecast
        if watched and tokens.sum_p2 is not None and (first := self._objective) is not None:
            # the first of several updates: only its policy is the one of the log-prob pass
            found = forecast(
                first, self.batch.mini_batch(0).micro_batches, self._policy.head, self.group
            )
            if self._is_due(self._config.observability.measured_every):
                found |= token_norms(tokens, self.group)
            self.measured = replace(self.measured, forecast=found)

    def update(
        self,
        number: int,
        dump_to: str | None,
        watched: Sequence[int] = (),
        norm_limit: float = math.inf,
    ) -> tuple[dict[str, float], dict[str, float]] | None:
        """Trains on one mini-batch: runs the forward pass and the backward pass, clips the
        gradient, and takes an optimizer step. See Trainer.update."""
        policy = self._policy
        part = self.batch.mini_batch(self._mini_batch(number))
        if number > 0:  # `measure` made the first
            self._objective = self._make_objective(number)
        # The last step left every parameter's grad pointing into the gradient buffer. Autograd
        # would add to the buffer through it, and Megatron's hook would then add the buffer to
        # itself.
        policy.optimizer.zero_grad()
        if dump_to:
            finish_gather(policy.model)
        weights_before = export_hf(policy.model, policy.shape, policy.layout) if dump_to else {}
        scale = loss_scale_of(policy.optimizer)
        loss_scale = scale.factor if scale is not None else None
        logged = accumulate_gradients(
            policy.model, part, policy.head, self._loss, loss_scale, self._kept
        )
        if self._config.skips_log_prob_pass and self.measured is not None:
            self.measured = complete(self.measured, logged, self._method, self.group)
        # in the first epoch only
        if watched and self.measured is not None and number < len(self.batch.plan.mini_batches):
            assert self._objective is not None
            self._numbers.append(
                token_numbers(self._objective, self.measured.tokens, part, watched)
            )
        metrics = self._metrics(logged, with_batch=number == 0)
        if number == 0:
            metrics = {**metrics, **self._routing}
        if dump_to:
            self._dump(Path(dump_to), weights_before, metrics, loss_scale)
        outcome = take_step(
            policy.optimizer,
            policy.scheduler,
            self._config.optimizer.clip_grad,
            empty=self._method.empty(self._objective.statistics)
            if self._objective is not None
            else None,
            loss_not_finite=~logged["loss/policy"].isfinite().all()
            if self._objective is not None
            else None,
            norm_limit=norm_limit,
        )
        if not outcome.finite and self._objective is not None:
            samples = self._objective.tokens.sequence[self._objective.rows]
            self.lost = samples[~logged["loss/policy"].isfinite()].unique()
        if number == 0 and not self._config.skips_log_prob_pass:
            metrics = {**metrics, **self._observe(part, taken=outcome.taken)}
        if self.measured is None or not policy.layout.is_reporting_rank:
            return None
        rates = {
            "optimizer/grad_norm": outcome.grad_norm,
            "optimizer/lr": float(policy.optimizer.param_groups[0]["lr"]),
            "update/finite": float(outcome.finite),
            "update/empty": float(outcome.empty),
        }
        if norm_limit < math.inf:
            rates["update/held"] = float(outcome.held)
        if loss_scale is not None:
            rates |= {
                "update/skipped": float(outcome.skipped),
                "optimizer/loss_scale": float(loss_scale),
            }
        state = {name: float(x) for name, x in self.measured.next_state.items()}
        return {**{name: float(x) for name, x in metrics.items()}, **rates}, state

    def token_numbers(self) -> list[TokenNumbers]:
        """Returns a list with one TokenNumbers for each update of the first epoch. Each
        TokenNumbers in the list contains values for this rank's tokens in the update's mini-batch.
        Only tokens of watched samples are included. The argument `watched` of `update` lists the
        watched samples. If `watched` is empty, `update` adds no TokenNumbers to the list. Waits for
        the device.

        Returns an empty list on all ranks except the first rank of each tensor-parallel group of
        the last pipeline stage.
        """
        mine = self._numbers if self._policy.layout.tp_rank == 0 else []
        return [part.to_host() for part in mine]

    def _mini_batch(self, number: int) -> int:
        """Returns the index of the mini-batch that an update trains on. Every epoch takes the
        mini-batches in the same order."""
        return number % len(self.batch.plan.mini_batches)

    @torch.no_grad()
    def _make_objective(self, number: int) -> Objective | None:
        """Returns the objective of an update if this rank is on the last pipeline stage. On all
        other pipeline stages, returns None.

        For every update after the first, all ranks must call `_make_objective`, because the call
        may run a forward pass. If `statistics.surprisal` is `current`, a forward pass recomputes
        the surprisals of the update's mini-batch.
        """
        mini_batch = self._mini_batch(number)
        part, renewed = self.batch.mini_batch(mini_batch), None
        if self._config.statistics.surprisal == "current" and number > 0:
            renewed = compute_log_probs(self._policy.model, part, self._policy.head)
        if self.measured is None:
            return None
        tokens = self.batch.tokens_of(mini_batch, self.measured.tokens)
        if renewed is not None:
            selected_by, entropy = tokens.old_log_prob.clone(), tokens.entropy.clone()
            selected_by[part.span], entropy[part.span] = renewed
            tokens = replace(tokens, selection_log_prob=selected_by, selection_entropy=entropy)
        whole = len(self.batch.plan.mini_batches) == 1
        return make_objective(
            self._method,
            part,
            tokens,
            self.measured.state,
            self.group,
            by_micro_batch=self._config.statistics.scope == "micro_batch",
            is_log_prob_pass=self._config.skips_log_prob_pass,
            known=self.measured.statistics if whole and renewed is None else None,
        )

    def _loss(
        self, log_prob: Tensor, entropy: Tensor, micro: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert self._objective is not None  # Megatron calls it on the last stage
        return self._objective.loss(log_prob, entropy, micro)

    @torch.no_grad()
    def _metrics(
        self, logged: Mapping[str, Tensor], *, with_batch: bool
    ) -> Mapping[str, Tensor | float]:
        """Returns all metrics of an update if this rank is on the last pipeline stage. On all other
        pipeline stages, returns {}. If `with_batch` is True, the metrics of the rollout batch are
        included."""
        if self.measured is None or self._objective is None:
            return {}
        objective = self._objective
        sampled = not self._method.supervised
        of_batch = self.measured.requests(sampled=sampled) if with_batch else {}
        answers = answer({**of_batch, **objective.requests(logged)}, self.group)
        asked = {name: scalar(answers, name) for name in answers}
        forecast = self.measured.forecast if with_batch else {}
        return {**asked, **forecast, **self._method.metrics(objective.statistics, objective.state)}

    def _observe(self, part: RankBatch, *, taken: bool) -> dict[str, Tensor]:
        """Measures how much the first update changed the mean entropy of the mini-batch's tokens.
        The method's `measures_every` and the setting `observability.measured_every` determine in
        which steps the change is measured. If the optimizer step was not taken, the change is not
        measured.

        If the method's `measures_every` asks for a measurement in this step, `_observe` passes the
        change to the method's `observe`. If the optimizer step was not taken, `_observe` passes
        None to the method's `observe`.

        All ranks must call `_observe`. Returns a dict with the metric `forecast/measured_change`.
        The dict is empty if the change was not measured, and on all pipeline stages but the last.
        """
        policy, change = self._policy, dict[str, Tensor]()
        watched, due = self._config.observability, self._is_due(self._method.measures_every)
        measures = due or (watched.entropy_forecast and self._is_due(watched.measured_every))
        if taken and measures:
            tokens = (
                self._objective.tokens.select(self._objective.rows)
                if self._objective is not None
                else None
            )
            exact = self._method.measures_every > 0
            change = measured_change(
                policy.model, part, policy.head, tokens, self.group, exact=exact
            )
        if self.measured is not None and (due or not taken):
            after = self._method.observe(
                self.measured.next_state, change.get("forecast/measured_change")
            )
            self.measured = replace(self.measured, next_state=after)
        return change

    def _is_due(self, every: int) -> bool:
        """Returns True if the step's number is a multiple of `every`. Returns False if `every` is
        0."""
        return every > 0 and self.batch.share.step % every == 0

    def _dump(
        self,
        folder: Path,
        weights: Mapping[str, Tensor],
        metrics: Mapping[str, Tensor | float],
        loss_scale: Tensor | None,
    ) -> None:
        """Writes the loss and the gradients of the first update, and the weights before this
        update. All ranks must call `_dump`. The driver, and not `_dump`, writes the mini-batch into
        `folder`, because only the driver holds the whole mini-batch."""
        policy = self._policy
        gradients = export_gradients(policy.model, policy.shape, policy.layout, loss_scale)
        if policy.layout.rank == 0:  # it has all tensors, as the last stage has the loss
            write_tensors(folder, weights, gradients)
        if policy.layout.is_reporting_rank:
            write_step(folder, float(metrics["loss/policy"]), self._config)
