"""Trains the tiny model of `digits.py` with every method, and writes what each run came to.

    python benchmarks/laboratory/trained.py --out benchmarks/results/laboratory_trained.json

The runs are those of `preregistration.yaml`, which was committed before them: first a sweep with
seeds of its own, the same number of tries for every method and task, then the best try of each with
the seeds of the evaluation. Run again, it makes only the runs that the file lacks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from digits import COMMON, RARE
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

sys.path.append(str(Path(__file__).parents[1]))
from machine import machine

from megatron_stare import run

HERE = Path(__file__).parent
PLAN = HERE / "preregistration.yaml"
WORDS = ("<pad>", "<eos>", *"0123456789:")
EOS, ZERO, COLON = 1, 2, 12
# in the starting model of `rare`: of the rare first digit, and of a right digit after it
RARE_SHARE, RIGHT_SHARE = 0.05, 0.2
# Not in the plan: the sweep chose the lowest of GRPO's learning rates on `changing`, so lower ones
# were run with the seeds of the evaluation.
LOWER = ("changing", "grpo", (1.25e-4, 6.25e-5))


# --- the model that every run starts from -----------------------------------------------------


def next_digits(task: str, prompts: Tensor, said: Tensor) -> Tensor:
    """Returns the probabilities of the digits at the places of a response, before training.

    Args:
        prompts: [n, 2] digits.
        said: [n, 3] digits of the responses.

    Returns:
        [n, 3, 10].
    """
    a, b = prompts.unbind(1)

    def mostly(digit: Tensor, share: float) -> Tensor:
        return torch.full((len(digit), 10), (1 - share) / 9).scatter(1, digit[:, None], share)

    if task == "changing":
        return torch.stack([mostly(digit, 0.3) for digit in (a, b, a)], 1)
    rare = (said[:, 0] == RARE)[:, None]
    first = torch.full((len(prompts), 10), (1 - 0.5 - RARE_SHARE) / 8)
    first[:, COMMON], first[:, RARE] = 0.5, RARE_SHARE
    others = [
        torch.where(rare, mostly(right, RIGHT_SHARE), mostly(a, 0.4)) for right in (9 - b, 9 - a)
    ]
    return torch.stack((first, *others), 1)


def write_model(folder: Path, task: str, steps: int = 2000) -> float:
    """Writes the model that starts at `next_digits`, as a Hugging Face folder; returns its mean
    divergence from them, nats a digit."""
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - step / steps)
        prompts, said = torch.randint(10, (256, 2)), torch.randint(10, (256, 3))
        said[: len(said) // 2, 0] = RARE  # else what follows it is hardly seen
        wanted = torch.zeros(256, 4, 16)
        wanted[:, :3, ZERO : ZERO + 10] = next_digits(task, prompts, said)
        wanted[:, 3, EOS] = 1.0
        colon = torch.full((256, 1), COLON)
        tokens = torch.cat((prompts + ZERO, colon, said + ZERO), 1)
        logits = model(tokens).logits[:, 2:]
        loss = (
            torch.nn.functional.kl_div(logits.log_softmax(-1), wanted, reduction="sum")
            / wanted[..., 0].numel()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    return float(loss)


# --- the runs of the plan ---------------------------------------------------------------------


def figures(folder: Path, changed: int | None) -> dict[str, Any]:
    """Returns what a run came to, of the files that it wrote.

    Args:
        changed: number of steps before the reward changed.
    """
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    reward, entropy = ([row[name] for row in rows] for name in ("reward/mean", "entropy/mean"))

    def by_five(values: list[float]) -> list[float]:
        return [round(sum(values[at : at + 5]) / 5, 3) for at in range(0, len(values), 5)]

    last = json.loads((folder / "eval.jsonl").read_text().splitlines()[-1])
    assert last["weights"] == "trained"
    told: dict[str, Any] = {
        "pass@1": round(last["results"]["pass@1"]["value"], 4),
        "pass@16": round(last["results"]["pass@16"]["value"], 4),
        "entropy": round(sum(entropy[-20:]) / 20, 4),
        "reward by 5 steps": by_five(reward),
        "entropy by 5 steps": by_five(entropy),
    }
    if changed is not None:
        level = 0.9 * sum(reward[changed - 10 : changed]) / 10
        after = by_five(reward[changed:])
        again = [at for at, value in enumerate(after) if value >= level]
        told["steps to recover"] = 5 * (again[0] + 1) if again else None
    return told


def configuration(
    plan: dict[str, Any], task: str, seed: int, settings: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """Returns the configuration of a run; `settings` are a try's, by dotted name."""
    told = plan["tasks"][task]
    source = {"name": f"{HERE / 'digits.py'}:Digits", "task": task}
    if "changes_after" in told:
        source["changes_at"] = told["changes_after"] * plan["batch"]["prompts"]
    config: dict[str, Any] = {
        "run": {
            "dir": str(folder / "run"),
            "seed": seed,
            "steps": told["steps"],
            "checkpoint_every": 0,
            "rollouts_every": 10_000,
        },
        "model": {"path": str(folder.parent / task)},
        "runtime": {"runner": "inline"},
        "batch": dict(plan["batch"]),
        "rollout": {"max_prompt_tokens": 4, "max_new_tokens": 4, "threads": 1},
        "data": {"source": source},
        "reward": {"verifier": f"{HERE / 'digits.py'}:verify"},
        "algorithm": {},
        "optimizer": dict(plan["optimizer"]),
        "eval": {"prompts": 100, "samples": 16},
    }
    for name, value in settings.items():
        section, _, key = name.partition(".")
        config[section][key] = value
    return config


def made(asked: tuple[str, dict[str, Any], str, int, dict[str, Any], Path]) -> tuple[str, Any]:
    """Trains; returns the key of the run and its figures. Runs in a process of its own."""
    key, plan, task, seed, settings, models_folder = asked
    with tempfile.TemporaryDirectory(dir=models_folder) as folder:
        begun = time.monotonic()
        run(configuration(plan, task, seed, settings, Path(folder)))
        told = figures(Path(folder) / "run", plan["tasks"][task].get("changes_after"))
    return key, told | {"seconds": round(time.monotonic() - begun, 1)}


def tries(plan: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    """Returns the settings of an arm's tries: its own, with every learning rate."""
    told = plan["arms"][arm]
    return [
        {**told["settings"], **own, "optimizer.lr": lr}
        for own in told["tries"]
        for lr in told["lr"]
    ]


def sweep(plan: dict[str, Any]) -> dict[str, tuple[str, int, dict[str, Any]]]:
    """Returns the runs of the sweep by key: task, seed, settings."""
    return {
        f"sweep, {task}, {arm}, try {number}, seed {seed}": (task, seed, settings)
        for seed in plan["seeds"]["sweep"]
        for number in range(max(len(tries(plan, arm)) for arm in plan["arms"]))
        for task in plan["tasks"]
        for arm in plan["arms"]
        for settings in tries(plan, arm)[number : number + 1]
    }


def chosen(plan: dict[str, Any], runs: dict[str, Any], task: str, arm: str) -> int:
    """Returns the number of the try whose mean pass@1 over the sweep's seeds is highest, of equal
    ones the first."""

    def mean(number: int) -> float:
        seeds = plan["seeds"]["sweep"]
        keys = [f"sweep, {task}, {arm}, try {number}, seed {seed}" for seed in seeds]
        return sum(runs[key]["pass@1"] for key in keys) / len(keys)

    return max(range(len(tries(plan, arm))), key=mean)


def evaluation(
    plan: dict[str, Any], runs: dict[str, Any]
) -> dict[str, tuple[str, int, dict[str, Any]]]:
    """Returns the runs of the evaluation by key, once the sweep is whole."""
    return {
        f"{task}, {arm}, seed {seed}": (
            task,
            seed,
            tries(plan, arm)[chosen(plan, runs, task, arm)],
        )
        for seed in plan["seeds"]["evaluation"]
        for task in plan["tasks"]
        for arm in plan["arms"]
    }


def lower(plan: dict[str, Any]) -> dict[str, tuple[str, int, dict[str, Any]]]:
    """Returns the runs of LOWER by key."""
    task, arm, rates = LOWER
    return {
        f"afterwards, {task}, {arm}, lr {lr:g}, seed {seed}": (
            task,
            seed,
            {**plan["arms"][arm]["settings"], "optimizer.lr": lr},
        )
        for seed in plan["seeds"]["evaluation"]
        for lr in rates
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--models", type=Path, default=Path("build/laboratory"), metavar="FOLDER")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    plan = yaml.safe_load(PLAN.read_text())
    told = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
    told = {"machine": machine(), "plan": plan, "runs": told["runs"]}
    args.models.mkdir(parents=True, exist_ok=True)
    for task in plan["tasks"]:
        if not (args.models / task).exists():
            with tempfile.TemporaryDirectory(dir=args.models) as folder:
                off = write_model(Path(folder) / task, task)
                (Path(folder) / task).rename(args.models / task)
            print(f"{task}: the model starts within {off:.4f} nats a digit", flush=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, context, torch.set_num_threads, (1,)) as pool:
        stages = (sweep, partial(evaluation, runs=told["runs"]), lower)
        for stage in stages:
            left = {key: each for key, each in stage(plan).items() if key not in told["runs"]}
            jobs = [(key, plan, *each, args.models.resolve()) for key, each in left.items()]
            for done in as_completed([pool.submit(made, job) for job in jobs]):
                key, figures_of_run = done.result()
                told["runs"][key] = figures_of_run
                args.out.write_text(json.dumps(told, indent=1) + "\n")
                print(f"{key}: pass@1 {figures_of_run['pass@1']}, {len(jobs)} asked", flush=True)


if __name__ == "__main__":
    main()
