"""Runs STARE inside verl. This module registers subclasses of verl's v1 trainers. The subclasses
multiply the advantage of each token by a weight.

    VERL_USE_EXTERNAL_MODULES=stare_select.verl python -m verl.trainer.main_ppo \\
        trainer.v1.trainer_mode=stare_sync +stare.entropy_target=0.3 ...

In every process that has the environment variable VERL_USE_EXTERNAL_MODULES, verl imports this
module, and stops if the import fails. If this module were a package's entry point, a failed import
would stay silent, because verl logs the failure only at level DEBUG. This module imports verl,
which this project does not install. Only users of verl import this module.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
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
    import transfer_queue as tq
    from omegaconf import OmegaConf, open_dict
    from tensordict import TensorDict
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
    from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
    from verl.utils.config import omega_conf_to_dataclass
except ImportError as error:
    raise ConfigError(
        f"cannot import verl's v1 trainer: {error}",
        fix="pip install verl==0.9.1 TransferQueue==0.1.11, in an environment of its own",
    ) from error

RELEASE = "0.9.1"
PREFIX = "stare_"  # of the names that the trainers are registered under
ESTIMATORS = ("grpo",)
# losses that are linear in a token's advantage, so that weighing the advantage weighs the loss
LOSSES = ("vanilla", "gpg", "cispo")
# parameters that the adapter passes or takes
CALLED = {
    "_compute_advantage": ("batch", "metrics"),
    "_compute_old_log_prob": ("batch", "metrics"),
    "_save_checkpoint": (),
    "_load_checkpoint": (),
}
QUEUE = {
    "kv_batch_get": ("keys", "partition_id", "select_fields"),
    "kv_batch_put": ("keys", "partition_id", "fields"),
}


def probe(trainer: type = PPOTrainer) -> str | None:
    """Returns a message about the first function or parameter that the adapter needs but `trainer`
    or TransferQueue lacks. Returns None if `trainer` and TransferQueue have every function and
    parameter that the adapter needs."""
    return missing(trainer, CALLED) or missing(tq, QUEUE)


def check(config: Any, settings: Mapping[str, Any]) -> None:
    """Raises ConfigError if settings of verl prevent an exact selection of tokens. An exact
    selection has three requirements:

    - verl computes log-probs and entropies of the trained policy.
    - A session of verl can have several rows. All rows of a session have the same score.
    - The loss is linear in the advantage of each token.

    Also raises ConfigError if the method would remove tokens from the denominator of the loss,
    because verl's denominator counts all tokens.
    """
    correction = config.algorithm.get("rollout_correction") or {}
    loss = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    faults = {
        "algorithm.rollout_correction.bypass_mode": (
            correction.get("bypass_mode", False),
            "True: verl then computes neither log-probs nor entropies of the trained policy; set it"
            " to False",
        ),
        "algorithm.adv_estimator": (
            config.algorithm.adv_estimator not in ESTIMATORS,
            f"{config.algorithm.adv_estimator!r}: verl shares one score among the rows of a session"
            f" for {', '.join(ESTIMATORS)} only",
        ),
        "actor_rollout_ref.actor.policy_loss.loss_mode": (
            loss not in LOSSES,
            f"{loss!r}: is not known to be linear in a token's advantage; one of"
            f" {', '.join(LOSSES)}",
        ),
    }
    refuse(faults, settings, "verl")


def loss_changed(config: Any) -> str | None:
    """Tests verl's policy loss on a small generated batch. The loss must be linear in the
    advantages. The loss must also change if the advantage of a single token changes. Returns a
    message about the first requirement that the loss does not meet, or None if the loss meets both
    requirements."""
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    loss = get_policy_loss_fn(actor.policy_loss.get("loss_mode", "vanilla"))
    source = torch.Generator().manual_seed(0)
    old, ones = torch.rand(2, 4, generator=source) - 2.0, torch.ones(2, 4)
    log_probs = old + 0.1 * torch.rand(2, 4, generator=source)
    one = ones.clone()
    one[0, 1] = 3.0

    def of(advantages: Tensor) -> Tensor:
        return loss(
            old_log_prob=old,
            log_prob=log_probs,
            advantages=advantages,
            response_mask=ones,
            loss_agg_mode=actor.loss_agg_mode,
            config=actor,
        )[0]

    if not torch.allclose(of(2 * ones), 2 * of(ones), rtol=1e-4, atol=1e-6):
        return "the loss is not linear in the advantages"
    if torch.equal(of(one), of(ones)):
        return "the loss ignores the advantage of a single token"
    return None


def numbered(keys: Sequence[str], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns two tensors [N] with one entry for each token. For each token, the first tensor
    contains the index of the token's session, and the second tensor contains the token's index in
    the batch.

    Sessions and rows are numbered in the sorted order of the rows' keys. The indices, and the
    choice among tokens of equal surprisal, therefore do not depend on how verl balances the rows.

    Args:
        keys: `{uid}_{session}_{row of the session}` of each row.
        lengths: number of response tokens of each row.
    """
    parts = [key.rsplit("_", 2) for key in keys]
    rows = [(uid, int(session), int(row)) for uid, session, row in parts]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    sessions = {each: number for number, each in enumerate(sorted({row[:2] for row in rows}))}
    first, begins = 0, [0] * len(rows)
    for row in order:
        begins[row], first = first, first + lengths[row]
    of_rows = torch.tensor([sessions[row[:2]] for row in rows])
    sequence = of_rows.repeat_interleave(torch.tensor(lengths))
    columns = [begin + torch.arange(length) for begin, length in zip(begins, lengths, strict=True)]
    return sequence, torch.cat(columns)


class StareMixin(PPOTrainer):
    """Mixin for the v1 trainers of verl. A Selector computes a weight for each token. The trainer
    multiplies the token's advantage by this weight.

    The driver holds the whole batch, so the selection needs no collective communication. The
    section `stare` of verl's configuration has the selector's settings. The setting `stare.method`
    names the selection method. The default method is STARE. With `trust_upstream: true`, the
    trainer runs even if verl has changed. With `fresh_state: true`, a run can resume with STARE
    from a checkpoint of plain verl.

    Raises:
        ConfigError: a setting of verl prevents an exact selection of tokens; see `check`.
        UpstreamChangedError: verl's functions or their results changed.
    """

    def __init__(self, config: Any) -> None:
        settings = OmegaConf.to_container(config.get("stare") or OmegaConf.create(), resolve=True)
        assert isinstance(settings, dict)
        self._trusts, self._proven = bool(settings.pop("trust_upstream", False)), False
        self._may_begin = bool(settings.pop("fresh_state", False))
        self._expect(probe(upstream_of(type(self), StareMixin)))
        check(config, settings)
        self._expect(loss_changed(config))
        self.selector = Selector(settings.pop("method", "stare"), **settings)
        with open_dict(config):  # verl finds the mode's own settings by this name
            config.trainer.v1.trainer_mode = config.trainer.v1.trainer_mode.removeprefix(PREFIX)
        super().__init__(config)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_advantage(batch, metrics)
        started = time.perf_counter()
        fields = ["old_log_probs", "entropy", "advantages", "response_mask"]
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
        )
        if not self._proven:
            self._expect(changed(data))
            self._proven = True
        offsets = data["response_mask"].offsets()
        lengths = offsets.diff().tolist()
        log_probs, entropies, advantages, mask = (data[name].values() for name in fields)
        real = torch.tensor([not tag.get("is_padding", False) for tag in batch.tags])
        sequence, index = numbered(batch.keys, lengths)
        found = self.selector.update(
            log_probs,
            entropies,
            advantages,
            mask.bool() & real.repeat_interleave(torch.tensor(lengths)),
            sequence=sequence,
            index=index,
        )
        weighted = torch.nested.nested_tensor_from_jagged(
            found.advantages.to(advantages.dtype), offsets
        )
        batch = tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict({"advantages": weighted}, batch_size=len(lengths)),
        )
        self.stare_selected = found
        for name, value in found.metrics.items():
            # verl logs the least of several updates' values of a name with `min` in it
            metrics[name.replace("minus", "negative").replace("plus", "positive")] = value
        metrics["timing_s/stare"] = time.perf_counter() - started
        return batch

    def _save_checkpoint(self) -> None:
        # before verl names this checkpoint the latest
        steps = f"global_step_{self.global_steps}"
        save_state(self.selector, Path(self.config.trainer.default_local_dir, steps))
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        folder = resumed_folder(self.config.trainer)
        if folder is not None:
            load_state(self.selector, Path(folder), type(self).__name__, self._may_begin)
        super()._load_checkpoint()

    def _expect(self, changed: str | None) -> None:
        expect(changed, "verl", RELEASE, self._trusts)


def resumed_folder(trainer: Any) -> str | None:
    """Returns the folder of the checkpoint that verl resumes from, or None."""
    if trainer.resume_mode == "auto":
        return find_latest_ckpt_path(os.path.abspath(trainer.default_local_dir))
    return trainer.resume_from_path if trainer.resume_mode == "resume_path" else None


def changed(data: Any) -> str | None:
    """Checks the log-probs, entropies and advantages that verl has computed and put into its
    transfer queue. Returns a message about the first unusable column (old_log_probs, entropy or
    advantages), or None if all three columns are usable."""
    offsets, kept = data["response_mask"].offsets(), data["response_mask"].values().bool()
    for name in ("old_log_probs", "entropy", "advantages"):
        if not torch.equal(data[name].offsets(), offsets):
            return f"{name} have another shape than the responses"
    if (data["old_log_probs"].values()[kept] > 1e-4).any():
        return "old_log_probs lie above 0"
    if (data["entropy"].values()[kept] < -1e-4).any():
        return "entropies lie below 0"
    return None


@register_trainer(f"{PREFIX}sync")
class StarePPOTrainerSync(StareMixin, PPOTrainerSync):
    """verl's synchronous trainer with weighted advantages."""


@register_trainer(f"{PREFIX}colocate_async")
class StarePPOTrainerColocateAsync(StareMixin, PPOTrainerColocateAsync):
    """verl's colocated trainer with weighted advantages. The trainer uses partial rollouts."""


@register_trainer(f"{PREFIX}separate_async")
class StarePPOTrainerSeparateAsync(StareMixin, PPOTrainerSeparateAsync):
    """verl's asynchronous trainer with weighted advantages. Rollout and training use separate
    GPUs."""
