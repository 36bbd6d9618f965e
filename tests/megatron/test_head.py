"""Which way a run goes through the output layer, what goes through it, and that every method learns
the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import log_prob_pass as log_prob_pass_on
from torch import Tensor

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config, ModelConfig, ParallelConfig
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.backend.cpu_backend import device
from megatron_stare.megatron.batching.microbatch import RankBatch
from megatron_stare.megatron.batching.sequence_layout import WholeSequences
from megatron_stare.megatron.export.export import main_grad
from megatron_stare.megatron.model.head import Head, choose_head, largest_logits
from megatron_stare.megatron.model.model import build_policy, load_hf
from megatron_stare.megatron.step.passes import accumulate_gradients, compute_log_probs
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.models import cost_of, read_shape
from megatron_stare.ops import linear_head, vocab_parallel
from megatron_stare.ops.linear_head import Mode
from megatron_stare.ops.plan import PlanRules, plan_micro_batches
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.weights.files.hf_folder import HfFolder

MODES = ["materialised", "gradient_in_forward", "recompute"]


@pytest.mark.parametrize(
    ("coupling", "logits", "free", "mode"),
    [
        ("token", 1, 8, "materialised"),
        ("sequence", 1, 8, "materialised"),
        ("token", 9, 64, "gradient_in_forward"),
        ("sequence", 9, 64, "recompute"),
        ("token", 1, 0, "gradient_in_forward"),
    ],
)
def test_the_choice_by_memory(coupling: Any, logits: int, free: int, mode: Mode) -> None:
    choice = choose_head(coupling, logits * 10**9, free * 10**9)
    assert choice.mode == mode
    assert f"{logits} GB" in choice.reason and f"{free} GB are free" in choice.reason


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_the_size_of_the_logits(tmp_path: Path, dtype: Any, size: int) -> None:
    save_model(tmp_path, "qwen2")
    config = Config(
        model=ModelConfig(path=str(tmp_path), dtype=dtype), parallel=ParallelConfig(tensor=2)
    )
    # 37 columns in two ranks of 128
    assert largest_logits(config, read_shape(tmp_path)) == 8192 * 128 * size
    split = config.model_copy(update={"parallel": ParallelConfig(tensor=2, context=3)})
    # of each sequence a third
    assert largest_logits(split, read_shape(tmp_path)) == 2731 * 128 * size


def with_observations(batch: RolloutBatch) -> RolloutBatch:
    """Every third token of a response was not sampled."""
    return replace(batch, loss_mask=torch.arange(len(batch.loss_mask)) % 3 != 1)


def _seen(rank: int, init: str, path: str, mode: Mode, dtype: Any) -> dict[str, Any]:
    """Collects what reaches the operator, the log-probs of both passes, and the gradient of the
    output layer."""
    shape, parallel = read_shape(path), ParallelConfig()
    layout = parallel_layout.join(parallel, rank, init, seed=1, timeout_s=60)
    model = build_policy(
        shape, ModelConfig(path=path, dtype=dtype), parallel, layout, distributed_optimizer=False
    )
    load_hf(model, HfFolder(path), shape, layout)
    batch = with_observations(random_batch(4))
    plan = plan_micro_batches(
        batch.lengths.tolist(),
        PlanRules(data_parallel=1, budget=40, packed=True, cost=cost_of(shape)),
    )
    rank_batch = RankBatch(
        batch.share(plan.branches_of(0)), plan, 0, device(), WholeSequences(packed=True)
    )
    head = Head(shape.vocab_size, 1.0, layout, mode=mode, chunk=4)
    met: list[Tensor] = []

    def watched(logits: Tensor, *rest: Any) -> Any:
        met.append(logits)
        return measure(logits, *rest)

    measure = vocab_parallel.measure
    linear_head.measure = vocab_parallel.measure = watched  # type: ignore[assignment]
    try:
        log_prob, _ = compute_log_probs(model, rank_batch, head)
        scored = sum(len(logits) for logits in met)
        logged = accumulate_gradients(
            model, rank_batch, head, lambda lp, *_: (lp.sum(), {"lp": lp.detach()})
        )
    finally:
        linear_head.measure = vocab_parallel.measure = measure
        parallel_layout.leave()
    (weight,) = [
        p for m in model for name, p in m.named_parameters() if name.endswith("output_layer.weight")
    ]
    return {
        "scored": scored,
        "trained": sum(len(logits) for logits in met) - scored,
        "largest": max(len(logits) for logits in met),
        "dtypes": {logits.dtype for logits in met},
        "ratio_is_one": torch.equal(log_prob, logged["lp"]),
        "sampled": int(batch.loss_mask.sum()),
        "index": rank_batch.index,
        "gradient": main_grad(weight).clone(),
    }


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_goes_through_the_output_layer(ranks: RankPool, tmp_path: Path, dtype: str) -> None:
    save_model(tmp_path, "qwen2")
    gradients = []
    for mode in MODES:
        (seen,) = ranks.run(_seen, 1, str(tmp_path), mode, dtype)
        # no prompt, no tool observation, no padding
        assert seen["scored"] == seen["trained"] == seen["sampled"]
        assert len(seen["index"].unique()) == seen["sampled"]
        assert seen["dtypes"] == {getattr(torch, dtype)}  # no float32 copy
        assert (seen["largest"] > 4) == (mode == "materialised")
        assert seen["ratio_is_one"]
        gradients.append(seen["gradient"])
    assert gradients[0].dtype == torch.float32
    near = 1e-6 if dtype == "float32" else 1e-2
    for gradient in gradients[1:]:
        torch.testing.assert_close(
            gradient, gradients[0], rtol=near, atol=near * float(gradients[0].abs().max())
        )


METHODS: dict[str, dict[str, Any]] = {
    "stare": {"variant": "C2", "entropy_target": None},
    "grpo": {
        "entropy_bonus": {"coef": 0.1},
        "reference_kl": {"coef": 0.2},
        "correction": {"mode": "truncate"},
    },
    "dapo": {},
    "cispo": {},
    "gtpo": {},
    "clip_cov": {},
    "kl_cov": {},
    "stapo": {},
    "twenty_entropy": {},
    "gspo": {},
    "grpo_s": {},
}


def _gradients(rank: int, init: str, config: Config) -> tuple[dict[str, Tensor], list[str]]:
    """Gradients of two updates, of which the second one's ratios are not 1; and the trainer's
    notes."""
    trainer = Trainer(resolve_run(config), rank, init)
    batch = random_batch(8, 8)
    log_prob_pass_on(trainer, batch)
    trainer.measure(trainer.method.initial_state())
    gradients = {}
    for number in range(2):
        trainer.update(number)
        for m in trainer.policy.model:
            gradients |= {
                f"{number} {name}": main_grad(p).clone() for name, p in m.named_parameters()
            }
    notes = trainer.notes()
    trainer.close()
    return gradients, notes


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_the_same_from_all_heads(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    save_model(tmp_path, "qwen2_tied")
    found = {}
    for mode in ["auto", *MODES]:
        if mode == "gradient_in_forward" and name in ("gspo", "grpo_s"):
            continue  # refused before anything starts
        config = Config.model_validate(
            {
                "model": {"path": str(tmp_path), "head": mode, "head_chunk_tokens": 5},
                "batch": {
                    "prompts": 4,
                    "samples_per_prompt": 2,
                    "epochs": 2,
                    "micro_batch_tokens": 64,
                },
                "algorithm": {"name": name, **METHODS[name]},
                "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "clip_grad": 1e9},
                "observability": {"entropy_forecast": False},
            }
        )
        ((found[mode], notes),) = ranks.run(_gradients, 1, config)
        *notes, optimizer = notes
        assert optimizer == "optimizer: SGD of torch"
        assert [line.split(",")[0] for line in notes] == (
            ["model.head: materialised"] if mode == "auto" else []
        )
    wanted = found.pop("materialised")
    assert any(gradient.any() for gradient in wanted.values())
    for gradients in found.values():
        for key, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, wanted[key], rtol=1e-4, atol=1e-5 * float(wanted[key].abs().max())
            )
