"""TRL's GRPOTrainer on a task of vs_trl.py; run by it, in TRL's environment.

Writes a line a step to the file named by VS_TRL_CLOCK: when it ended, its mean reward and the
responses' mean length.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import machine  # noqa: F401 - settles vector maths
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    StoppingCriteria,
    StoppingCriteriaList,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer
from vs_trl_task import LONGEST, Lengths, mostly_even, problems, right


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self._file = open(os.environ["VS_TRL_CLOCK"], "w")  # noqa: SIM115 lives as long as the process
        self._at = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._at = time.monotonic()  # before TRL reports, which is part of the next step

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if logs and "reward" in logs:
            line = {
                "at": self._at,
                "reward": logs["reward"],
                "tokens": logs["completions/mean_length"],
            }
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


class Until(StoppingCriteria):
    """Ends every response at a length that was drawn before it."""

    def __init__(self, prompt: int, lengths: torch.Tensor) -> None:
        self._ends = prompt + lengths

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


def give_lengths(model: Any, seed: int, end: int) -> None:
    """Responses of `model.generate` have given lengths from here on, and end in the end token."""
    generate, drawn = model.generate, Lengths(seed)

    def given(*args: Any, input_ids: torch.Tensor, **settings: Any) -> torch.Tensor:
        rows, prompt = input_ids.shape
        lengths = torch.tensor([drawn.draw() for _ in range(rows)])
        until = StoppingCriteriaList([Until(prompt, lengths)])
        made = generate(*args, input_ids=input_ids, stopping_criteria=until, **settings)
        made[torch.arange(rows), prompt + lengths - 1] = end
        return made

    model.generate = given


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=["quickstart", "ragged"], required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--settings", type=json.loads, default={}, help="fields of GRPOConfig")
    parser.add_argument("--attention", default="sdpa")
    args = parser.parse_args()
    torch.set_num_threads(2)
    samples = 8 * args.prompts
    settings = {"per_device_train_batch_size": samples, **args.settings}
    config = GRPOConfig(
        output_dir=str(args.folder),
        seed=args.seed,
        max_steps=args.steps,
        gradient_accumulation_steps=samples // settings["per_device_train_batch_size"],
        num_generations=8,
        max_completion_length=32 if args.task == "quickstart" else LONGEST,
        learning_rate=4.5e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        weight_decay=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",  # the mean over tokens, as ours
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        shuffle_dataset=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation=args.attention
    )
    if args.task == "ragged":
        give_lengths(model, args.seed, tokenizer.eos_token_id)
    judge = right if args.task == "quickstart" else mostly_even

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [judge(text, known) for text, known in zip(completions, answer, strict=True)]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(problems(args.seed, args.prompts * args.steps)),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
