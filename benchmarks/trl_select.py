"""Trains the tiny adder in real TRL, plain and with STARE, from several seeds, and writes every
step's entropy.

    python benchmarks/trl_select.py --seeds 4 --steps 150 --out benchmarks/results/trl_select.json

Runs that the file already holds are not repeated, so that an interrupted benchmark goes on.
Needs the environment of scripts/setup_other_trainer.sh trl.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
import time
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from megatron_stare.select.trl import StareGRPOTrainer

MODEL = Path(__file__).resolve().parents[1] / "assets" / "tiny-adder"


def problems(seed: int, number: int = 4096) -> Dataset:
    """Returns sums of three two-digit numbers, in the quickstart's format."""
    source = random.Random(seed)
    operands = [[source.randrange(10, 100) for _ in range(3)] for _ in range(number)]
    return Dataset.from_list(
        [{"prompt": "+".join(map(str, each)) + "=", "answer": str(sum(each))} for each in operands]
    )


def correct(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Returns 1.0 if a completion ends in '=' and the sum, else 0.0."""
    ends = (each.replace(" ", "").rpartition("=")[2] for each in completions)
    return [float(end == right) for end, right in zip(ends, answer, strict=True)]


def trained(kind: str, seed: int, given: argparse.Namespace, folder: str) -> dict:
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=64,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_completion_length=32,
        max_steps=given.steps,
        learning_rate=given.rate,
        lr_scheduler_type="constant_with_warmup",
        epsilon_high=0.28,
        loss_type="dapo",
        temperature=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        seed=seed,
        weight_decay=0.0,
        warmup_steps=10,
        use_cpu=True,
        bf16=False,
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    parts = {
        "model": model,
        "reward_funcs": correct,
        "args": config,
        "train_dataset": problems(seed),
        "processing_class": tokenizer,
    }
    if kind == "grpo":
        trainer = GRPOTrainer(**parts)
    else:
        settings = {
            "variant": "C2",
            "share": given.share,
            "amplify": given.amplify,
            "attenuate": given.attenuate,
            "entropy_target": given.target,
        }
        trainer = StareGRPOTrainer(**parts, stare=settings)
    started = time.perf_counter()
    trainer.train()
    log = [each for each in trainer.state.log_history if "entropy" in each]
    result = {
        "seconds": round(time.perf_counter() - started, 1),
        "entropy": [round(each["entropy"], 5) for each in log],
        "reward": [round(each["reward"], 4) for each in log],
        "step_seconds": round(sum(each.get("step_time", 0) for each in log), 2),
    }
    if kind == "stare":
        result["settings"] = settings
        result["pass_seconds"] = round(sum(each["stare/pass_seconds"] for each in log), 2)
        result["gate"] = [each["stare/gate"] for each in log]
    return result


def summary(runs: dict, target: float) -> dict:
    """Returns, by run, the share of the last 50 steps within 25 % of the target, and below it."""
    found = {}
    for name, run in runs.items():
        last = run["entropy"][-50:]
        found[name] = {
            "within": sum(abs(each - target) <= 0.25 * target for each in last) / len(last),
            "below": sum(each < 0.75 * target for each in last) / len(last),
            "mean_entropy": round(sum(last) / len(last), 5),
            "mean_reward": round(sum(run["reward"][-50:]) / len(last), 4),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--target", type=float, default=0.12)
    parser.add_argument("--rate", type=float, default=4.5e-4)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--amplify", type=float, default=2.0)
    parser.add_argument("--attenuate", type=float, default=0.3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    settings = {name: value for name, value in vars(given).items() if name not in ("out", "seeds")}
    done = json.loads(given.out.read_text()) if given.out.exists() else {"runs": {}}
    if done["runs"] and done["settings"] != settings:
        raise SystemExit(f"{given.out} holds runs of other settings: {done['settings']}")
    for seed in range(given.seeds):
        for kind in ("grpo", "stare"):
            if f"{kind}/{seed}" in done["runs"]:
                continue
            with tempfile.TemporaryDirectory() as folder:
                done["runs"][f"{kind}/{seed}"] = trained(kind, seed, given, folder)
            done |= {
                "settings": settings,
                "versions": {
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "trl": trl.__version__,
                },
                "summary": summary(done["runs"], given.target),
            }
            given.out.write_text(json.dumps(done, indent=1) + "\n")
            print(kind, seed, done["summary"][f"{kind}/{seed}"], flush=True)


if __name__ == "__main__":
    main()
