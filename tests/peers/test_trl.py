"""TRL's loss beside ours, from its installed package: what docs/from_trl.md says is equal, and what
differs.

pip install --no-deps trl==1.16.0        and what its import asks for, in an environment of its own
"""

from __future__ import annotations

import re
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from support.peer_batches import Padded, advantages, assert_equal, our_loss, padded, row_of
from torch import Tensor

pytestmark = pytest.mark.slow
trainer = pytest.importorskip("trl.trainer.grpo_trainer")
GRPOConfig = pytest.importorskip("trl").GRPOConfig

IMPORTANCE = row_of("from_trl.md", "vllm_importance_sampling_mode")[2]
LENGTH_NORM = 13  # of the batch's padding


def their_loss(
    batch: Padded, advantage: Tensor, tmp: str, ratio: Tensor | None = None, **settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """TRL's loss of one micro-batch and its leaves, log-probs and entropies, which a model would
    give it.

    Args:
        ratio: of the correction, [B, T] or [B, 1]; None: without vLLM.
    """
    args = GRPOConfig(output_dir=tmp, report_to=[], bf16=False, **settings)
    now, entropy = (x.clone().requires_grad_() for x in (batch.now, batch.entropy))
    holder = SimpleNamespace(
        args=args,
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, **_: x,
        ),
        model=SimpleNamespace(training=True),
        _get_per_token_logps_and_entropies=lambda *_, **__: (now, entropy, None),
        _metrics={"train": defaultdict(list)},
        aux_loss_enabled=False,
        beta=args.beta,
        current_gradient_accumulation_steps=args.steps_per_generation,
        entropy_coef=args.entropy_coef,
        _entropy_bonus_enabled=args.entropy_coef != 0,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        importance_sampling_level=args.importance_sampling_level,
        loss_type=args.loss_type,
        max_completion_length=LENGTH_NORM,
        off_policy_mask_threshold=args.off_policy_mask_threshold,
        top_entropy_quantile=args.top_entropy_quantile,
        use_adaptive_entropy=False,
        use_vllm=ratio is not None,
        vllm_importance_sampling_correction=ratio is not None,
        get_off_policy_mask=trainer.GRPOTrainer.get_off_policy_mask,
    )
    holder.get_high_entropy_mask = lambda *given: trainer.GRPOTrainer.get_high_entropy_mask(
        holder, *given
    )
    empty = torch.zeros(len(batch.now), 0)
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": torch.zeros_like(batch.now),
        "completion_mask": batch.mask,
        "advantages": advantage.double(),
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.reference,
        "sampling_per_token_logps": batch.rollout,
        "importance_sampling_ratio": ratio,
        "num_items_in_batch": batch.mask.sum(),
    }
    loss = trainer.GRPOTrainer._compute_loss(holder, holder.model, inputs)
    # one micro-batch stands for all of its accumulation window
    return (
        loss * (1 if args.loss_type in ("dapo", "cispo") else args.steps_per_generation),
        now,
        entropy,
    )


@pytest.mark.parametrize(
    ("loss_type", "ours"),
    [
        ("grpo", {"aggregation": "sequence_mean"}),
        ("dapo", {"aggregation": "token_mean"}),
        ("dr_grpo", {"aggregation": "dr_grpo", "length_norm": LENGTH_NORM}),
        ("bnpo", {"aggregation": "micro_batch_mean"}),  # of a batch that is one micro-batch
    ],
)
@pytest.mark.parametrize("width", [0.8, 3.0])
def test_loss_types(tmp_path: Any, loss_type: str, ours: dict[str, Any], width: float) -> None:
    batch = padded(width)
    settings = {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28} | ours
    loss, now, _ = their_loss(
        batch,
        advantages(settings, batch),
        str(tmp_path),
        loss_type=loss_type,
        epsilon=0.2,
        epsilon_high=0.28,
    )
    assert_equal(our_loss(settings, batch), loss, now)


def test_sequence_level_is_gspo(tmp_path: Any) -> None:
    batch = padded(0.05)
    settings = {"name": "gspo", "clip_low": 3e-3, "clip_high": 4e-3}
    loss, now, _ = their_loss(
        batch,
        advantages(settings, batch),
        str(tmp_path),
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=3e-3,
        epsilon_high=4e-3,
    )
    assert_equal(our_loss(settings, batch), loss, now)


def test_cispo(tmp_path: Any) -> None:
    """Its `epsilon_high` is the bound itself, 1 + clip_high here."""
    batch = padded(1.5)
    settings = {"name": "cispo", "clip_low": 1.0, "clip_high": 0.3}
    loss, now, _ = their_loss(
        batch, advantages(settings, batch), str(tmp_path), loss_type="cispo", epsilon_high=1.3
    )
    assert_equal(our_loss(settings, batch), loss, now)


def test_forks_with_the_settings_of_the_page(tmp_path: Any) -> None:
    found = re.search(r"`(\{[^}]*\})`", row_of("from_trl.md", "top_entropy_quantile")[2])
    assert found, "the page names no settings"
    batch = padded()
    settings = {"name": "twenty_entropy", "share": 0.3, "dual_clip": None} | yaml.safe_load(
        found[1]
    )
    loss, now, _ = their_loss(
        batch,
        advantages(settings, batch),
        str(tmp_path),
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        top_entropy_quantile=0.3,
    )
    ours = our_loss(settings, batch)
    assert 0.2 < (ours[1] != 0).sum() / batch.mask.sum() < 0.4
    assert_equal(ours, loss, now)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize(
    "mode", ["sequence_mask", "token_mask", "sequence_truncate", "token_truncate"]
)
def test_importance_correction_with_the_settings_of_the_page(
    tmp_path: Any, mode: str, loss_type: str
) -> None:
    """The ratio, which TRL makes while it generates, is written out by GRPOConfig's description of
    the modes."""
    found = re.search(mode + r"[^`]*`(\{[^}]*\})`", IMPORTANCE)
    assert found, f"the page names no settings of {mode}"
    batch = padded(3.0)
    log_ratio = (batch.old - batch.rollout) * batch.mask
    ratio = (log_ratio.sum(1, keepdim=True) if mode.startswith("sequence") else log_ratio).exp()
    most = GRPOConfig(output_dir=str(tmp_path), bf16=False).vllm_importance_sampling_clip_max
    beyond = ratio > most
    ratio = torch.where(beyond, 0.0, ratio) if mode.endswith("mask") else ratio.clamp(max=most)
    assert 0 < beyond.sum() < beyond.numel()
    settings = {
        "name": "grpo",
        "aggregation": {"grpo": "sequence_mean", "dapo": "token_mean"}[loss_type],
        "correction": yaml.safe_load(found[1]),
    }
    loss, now, _ = their_loss(
        batch, advantages(settings, batch), str(tmp_path), ratio, loss_type=loss_type
    )
    assert_equal(our_loss(settings, batch), loss, now)
    if mode.endswith("mask"):  # where the old page said it was
        shrunk = our_loss(
            settings | {"correction": settings["correction"] | {"mode": "mask"}}, batch
        )
        assert not torch.allclose(shrunk[0], loss.double(), rtol=1e-2)


def test_the_pages_default_is_trls(tmp_path: Any) -> None:
    default = GRPOConfig(output_dir=str(tmp_path), bf16=False)
    assert default.vllm_importance_sampling_mode == "sequence_mask"
    assert default.vllm_importance_sampling_clip_max == 3
    assert default.vllm_importance_sampling_clip_min is None
    assert (
        "TRL's default, sequence_mask up to 3: `{level: sequence, mode: icepop, low: 0, high: 3}`"
        in IMPORTANCE
    )


def test_fields_of_the_page_are_trls(tmp_path: Any) -> None:
    """None is deprecated: a field that TRL means to remove warns when it is set."""
    known = vars(GRPOConfig(output_dir=str(tmp_path), bf16=False))
    named = set(
        re.findall(
            r"vllm_importance_sampling_\w+|use_\w+_kl|entropy_\w+|off_policy_\w+",
            str(
                [
                    row_of("from_trl.md", key)[0]
                    for key in (
                        "vllm_importance_sampling_mode",
                        "use_bias_correction_kl",
                        "entropy_coef",
                        "off_policy_mask_threshold",
                        "use_adaptive_entropy",
                    )
                ]
            ),
        )
    )
    assert len(named) == 11
    assert named <= known.keys()
    assert "vllm_importance_sampling_cap" not in named


@pytest.mark.parametrize("corrected", [False, True])
def test_kl_to_a_reference(tmp_path: Any, corrected: bool) -> None:
    """Equal where `use_bias_correction_kl` is off; it is on by default."""
    batch = padded()
    settings = {"name": "grpo", "aggregation": "token_mean", "reference_kl": {"coef": 0.3}}
    loss, now, _ = their_loss(
        batch,
        advantages(settings, batch),
        str(tmp_path),
        loss_type="dapo",
        beta=0.3,
        use_bias_correction_kl=corrected,
    )
    ours = our_loss(settings, batch)
    if not corrected:
        assert_equal(ours, loss, now)
    else:
        assert not torch.allclose(ours[1], torch.autograd.grad(loss, now)[0], rtol=1e-2)
        assert GRPOConfig(output_dir=str(tmp_path), bf16=False).use_bias_correction_kl


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_entropy_bonus_is_equal_with_token_mean_alone(tmp_path: Any, loss_type: str) -> None:
    batch = padded()
    aggregation = {"grpo": "sequence_mean", "dapo": "token_mean"}[loss_type]
    settings = {"name": "grpo", "aggregation": aggregation, "entropy_bonus": {"coef": 0.07}}
    loss, now, entropy = their_loss(
        batch, advantages(settings, batch), str(tmp_path), loss_type=loss_type, entropy_coef=0.07
    )
    ours = our_loss(settings, batch)
    if loss_type == "dapo":
        # of dapo TRL divides the bonus, not the policy's loss, by the window's micro-batches
        assert_equal(ours, loss, now, entropy)
    else:
        slope = torch.autograd.grad(loss, entropy)[0]
        assert not torch.allclose(ours[2], slope, rtol=1e-2)


def test_the_off_policy_mask_has_no_counterpart(tmp_path: Any) -> None:
    batch = padded(3.0)
    settings = {"name": "grpo", "aggregation": "token_mean"}
    given = {"loss_type": "dapo", "off_policy_mask_threshold": 0.05}
    loss, now, _ = their_loss(batch, advantages(settings, batch), str(tmp_path), **given)
    ours = our_loss(settings, batch)
    slope = torch.autograd.grad(loss, now)[0]
    drift = ((batch.rollout - batch.now) * batch.mask).sum(1) / batch.lengths
    dropped = (drift > 0.05) & (advantages(settings, batch) < 0)
    assert 0 < dropped.sum() < len(dropped)
    assert (slope[dropped] == 0).all()
    torch.testing.assert_close(slope[~dropped], ours[1][~dropped], rtol=1e-4, atol=1e-7)
