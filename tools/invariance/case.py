"""Case of the check: a method, a layout and a cut into micro-batches, on a fixed model and a fixed
batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_stare.config.schema import Config
from megatron_stare.planning.preflight import check
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import Branch, sampled_trajectory
from megatron_stare.rollout.sources.ages import Ages

VOCAB, LENGTH = 61, 24
TRAINER = "megatron_stare.megatron.trainer.Trainer"


@dataclass(frozen=True)
class Case:
    """One step.

    algorithm: the section of that name.
    parallel: the section of that name; empty is one rank.
    budget: tokens of a micro-batch.
    packed: packed or padded micro-batches.
    seed: of the batch.
    off_policy: spread of ln(p / p_old): the policy that sampled is off by uniform noise of this
    width. 0: on-policy.
    lr: of the step of SGD.
    trainer: dotted path of the class that is checked.
    stale: the first part of every other response is of older weights, and masked for it.
    branches: long responses are cut into branches, each after all that went before, so that the
    step is the same as uncut.
    """

    algorithm: dict[str, Any]
    parallel: dict[str, Any] = field(default_factory=dict)
    budget: int = 10_000
    packed: bool = True
    seed: int = 1
    off_policy: float = 0.0
    lr: float = 1.0
    trainer: str = TRAINER
    stale: bool = False
    branches: bool = False

    def batch(self) -> RolloutBatch:
        """Batch that the step trains on."""
        return fixed_batch(self.seed, self.stale, self.branches)

    def alone(self) -> Case:
        """The same step on one rank, in one micro-batch, by the project's own trainer."""
        return replace(self, parallel={}, budget=Case.budget, trainer=TRAINER, branches=False)

    def config(self, folder: str) -> Config:
        """The run's configuration, with the model of `folder`. Raises UserError where the layout
        cannot be."""
        tree = {
            "model": {"path": folder},
            "parallel": self.parallel,
            "batch": {"micro_batch_tokens": self.budget, "packed": self.packed},
            "rollout": {"max_prompt_tokens": 8, "max_new_tokens": LENGTH},
            "optimizer": {"name": "sgd", "lr": self.lr, "weight_decay": 0.0, "clip_grad": 1e9},
            "runtime": {"timeout_s": 120.0},
            "algorithm": self.algorithm,
        }
        return check(Config.model_validate(tree)).config


def write_model(folder: Path) -> None:
    """A random Qwen2 whose logits spread widely enough for thresholds to mean something."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)


def fixed_batch(seed: int, stale: bool = False, branches: bool = False) -> RolloutBatch:
    """Four groups of four responses of many lengths; one group is all right, and one answer was not
    verified."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    samples = []
    for i in range(16):
        if i % 4 == 0:  # a group's responses are to one prompt
            prompt = Prompt(
                i // 4, str(i // 4), "", "", tuple(draw(2, VOCAB) for _ in range(3 + i // 4))
            )
        ids = [draw(2, VOCAB) for _ in range(draw(2, LENGTH))]
        sample = sampled_trajectory(
            prompt, i % 4, ids, [-draw(1, 400) / 100 for _ in ids], version=1
        )
        sample.reward, sample.reward_status = (
            float(i // 4 == 3 or i % 3 == 0),
            "crash" if i == 5 else "ok",
        )
        if stale and i % 2:
            sample.versions = ((0, len(ids) // 3), (1, len(ids) - len(ids) // 3))
        if branches and len(ids) > 6:
            cuts = (len(ids) // 3, 2 * len(ids) // 3)
            sample.branches = [Branch(at, (*prompt.token_ids, *ids[:at])) for at in cuts]
        samples.append(sample)
    if stale:
        Ages(masked_from=1).settle(samples, step=2)
    return RolloutBatch.from_trajectories(samples, step=1)
