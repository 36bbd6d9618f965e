"""Trains a model to add in TRL with STARE: `python example_trl.py MODEL_FOLDER [STEPS]`.

MODEL_FOLDER may be assets/tiny-adder of megatron-stare, which takes a second a step on one core.
"""

from __future__ import annotations

import random
import sys

from datasets import Dataset
from stare_select.trl import StareGRPOTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig


def correct(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Returns 1.0 if a completion ends in '=' and the sum, else 0.0."""
    ends = (each.replace(" ", "").rpartition("=")[2] for each in completions)
    return [float(end == right) for end, right in zip(ends, answer, strict=True)]


def main(model: str, steps: int) -> None:
    source = random.Random(1)
    sums = [[source.randrange(10, 100) for _ in range(3)] for _ in range(1024)]
    rows = [{"prompt": "+".join(map(str, each)) + "=", "answer": str(sum(each))} for each in sums]
    trainer = StareGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=correct,
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir="out",
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=32,
            max_steps=steps,
            learning_rate=4.5e-4,
            loss_type="dapo",
            epsilon_high=0.28,
            logging_steps=1,
            bf16=False,
            report_to=[],
        ),
        stare={"variant": "C2", "amplify": 2.0, "attenuate": 0.3, "entropy_target": 0.12},
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 50)
