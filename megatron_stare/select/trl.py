"""Runs STARE inside TRL, with a GRPOTrainer that multiplies the advantage of each token by a
weight.

This module imports trl, which this project does not install. Only users of TRL import this module.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_stare.errors import ConfigError
from megatron_stare.select.selector import Selector
from megatron_stare.select.upstream import (
    expect,
    load_state,
    missing,
    refuse,
    save_state,
    upstream_of,
)

try:
    from trl import GRPOTrainer
except ImportError as error:
    raise ConfigError(
        f"cannot import trl: {error}", fix="pip install trl==1.16.0, in an environment of its own"
    ) from error

RELEASE = "1.16.0"
# losses that are linear in a token's advantage, so that weighing the advantage weighs the loss
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")
# parameters that the adapter passes, by method of GRPOTrainer
CALLED = {
    "_generate_and_score_completions": ("inputs",),
    "_get_per_token_logps_and_entropies": (
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
    ),
    "_compute_loss": ("model", "inputs"),
    "_save_checkpoint": ("model", "trial"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
}


def probe(trainer: type = GRPOTrainer) -> str | None:
    """Returns a message about the first method or parameter that the adapter needs but `trainer`
    lacks. Returns None if nothing is missing."""
    return missing(trainer, CALLED)


class StareGRPOTrainer(GRPOTrainer):
    """GRPOTrainer that multiplies advantages by the token weights that a Selector computes.

    Args:
        stare: settings of the selector, such as `{"entropy_target": 0.3}`. The setting `method`
            selects a method other than STARE.
        fresh_state: True: a resume from a checkpoint of plain TRL begins with a new selector.
        trust_upstream: True: if TRL's methods or their results changed, the trainer warns and
            trains. False: the trainer raises UpstreamChangedError.

    Raises:
        ConfigError: a setting of GRPOConfig makes the selection inexact.
        UpstreamChangedError: TRL's methods or their results changed.
    """

    _metrics: Any  # GRPOTrainer's lists by mode and name

    def __init__(
        self,
        *args: Any,
        stare: Mapping[str, Any] | None = None,
        trust_upstream: bool = False,
        fresh_state: bool = False,
        **kwargs: Any,
    ) -> None:
        self._trusts, self._proven, self._may_begin = trust_upstream, False, fresh_state
        self._expect(probe(upstream_of(type(self), StareGRPOTrainer)))
        super().__init__(*args, **kwargs)
        settings = dict(stare or {})
        check(self, settings)
        group = torch.distributed.group.WORLD if self.accelerator.num_processes > 1 else None
        self.selector = Selector(settings.pop("method", "stare"), group=group, **settings)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return batch
        if "num_images" in batch or "pixel_values" in batch:
            raise ConfigError("the adapter passes no images", fix="train on text")
        started = time.perf_counter()
        log_probs, entropies = self._stare_pass(batch)
        seconds = time.perf_counter() - started
        if not self._proven:
            self._expect(self._changed(batch, log_probs, entropies))
            self._proven = True
        mask = batch["completion_mask"]
        mask = mask if batch.get("tool_mask") is None else mask * batch["tool_mask"]
        found = self.selector.update(log_probs, entropies, batch["advantages"], mask)
        batch["advantages"] = found.advantages.to(batch["advantages"].dtype)
        self.stare_selected = found
        for name, value in {**found.metrics, "stare/pass_seconds": seconds}.items():
            self._metrics["train"][name].append(value)
        return batch

    def _stare_pass(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns the log-probs and entropies [B, T] of the batch's completion tokens. The method
        must run before the first update on the batch, because the model is then still the policy
        that sampled the completions."""
        with torch.no_grad():
            log_probs, entropies, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
                torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
                batch["completion_ids"].shape[1],
                batch_size=self.args.per_device_train_batch_size,
                compute_entropy=True,
            )
        return log_probs, entropies

    def _changed(
        self, batch: Mapping[str, Any], log_probs: Tensor, entropies: Tensor
    ) -> str | None:
        """Checks that the adapter can use TRL's results for a batch. The check of TRL's loss uses
        at most two rows of the batch. Returns a message about the first problem, or None if there
        is no problem."""
        shape = batch["completion_ids"].shape
        if batch["advantages"].shape != shape[:1]:
            return f"advantages have shape {tuple(batch['advantages'].shape)}, not [B]"
        if log_probs.shape != shape or entropies.shape != shape:
            return "log-probs or entropies have another shape than the completions"
        kept = batch["completion_mask"].bool()
        if (log_probs[kept] > 1e-4).any() or (entropies[kept] < -1e-4).any():
            return "log-probs lie above 0, or entropies below"
        if batch.get("tool_mask") is not None:
            kept = kept & batch["tool_mask"].bool()
        # TRL gives no loss to responses that were cut or that an engine sampled too differently
        rows = kept.sum(1).argsort(descending=True, stable=True)[:2]
        few = {
            name: value[rows] if isinstance(value, Tensor) and value.dim() else value
            for name, value in batch.items()
        }
        if "importance_sampling_ratio" in few:
            few["importance_sampling_ratio"] = torch.ones_like(few["importance_sampling_ratio"])
        few["old_per_token_logps"] = log_probs[rows]
        ones = torch.ones_like(few["completion_mask"], dtype=log_probs.dtype)
        per_row, per_token, doubled = (
            self._loss_of(few, advantages) for advantages in (ones[:, 0], ones, 2 * ones)
        )
        none = self._loss_of(few, 0 * ones)
        if not kept[rows].any():
            return None  # after the losses, because they have collectives of all ranks
        if not torch.allclose(per_row, per_token, rtol=1e-4, atol=1e-6):
            return "_compute_loss takes [B, T] advantages otherwise than [B]"
        if not torch.allclose(doubled - none, 2 * (per_token - none), rtol=1e-4, atol=1e-6):
            return "_compute_loss is not linear in the advantages"
        if torch.equal(per_token, none):
            return "_compute_loss ignores the advantages"
        return None

    def _loss_of(self, batch: Mapping[str, Any], advantages: Tensor) -> Tensor:
        """Returns TRL's loss. Leaves TRL's recorded metrics unchanged, and leaves the model in
        training mode."""
        kept, self._metrics = self._metrics, copy.deepcopy(self._metrics)
        self.model.eval()
        try:
            with torch.no_grad():
                return self._compute_loss(self.model, {**batch, "advantages": advantages})
        finally:
            self.model.train()
            self._metrics = kept

    def _expect(self, changed: str | None) -> None:
        expect(changed, "trl", RELEASE, self._trusts)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
            save_state(self.selector, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_state(self.selector, Path(checkpoint), "StareGRPOTrainer", self._may_begin)


def check(trainer: Any, settings: Mapping[str, Any]) -> None:
    """Raises ConfigError if the trainer's settings make the selection inexact."""
    args = trainer.args
    steps, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
    if steps != accumulated:
        raise ConfigError(
            f"is {steps}, and gradient_accumulation_steps {accumulated}: one generation batch would"
            " not be one update, and the selection is over one generation batch",
            where="steps_per_generation",
            fix=f"set it to {accumulated}, or leave it out",
        )
    faults = {
        "num_iterations": (
            args.num_iterations != 1,
            "later iterations would use weights of an older policy; set it to 1",
        ),
        "loss_type": (
            args.loss_type not in LOSSES,
            f"is not known to be linear in a token's advantage; one of {', '.join(LOSSES)}",
        ),
        "importance_sampling_level": (
            args.importance_sampling_level != "token",
            "a ratio of the whole sequence has no weight for a token; set it to 'token'",
        ),
        "top_entropy_quantile": (
            args.top_entropy_quantile < 1,
            "it drops tokens after the selection, by a quantile per micro-batch; set it to 1.0, or"
            " use method twenty_entropy",
        ),
        "off_policy_mask_threshold": (
            args.off_policy_mask_threshold is not None,
            "it drops sequences after the selection; leave it out",
        ),
        "use_adaptive_entropy": (
            args.use_adaptive_entropy,
            "two controllers would steer one entropy; set it to False",
        ),
        "use_liger_kernel": (
            args.use_liger_kernel,
            "its loss is not tested with advantages of single tokens; set it to False",
        ),
    }
    told = {n: (wrong, f"{getattr(args, n)!r}: {why}") for n, (wrong, why) in faults.items()}
    refuse(told, settings, "TRL")
