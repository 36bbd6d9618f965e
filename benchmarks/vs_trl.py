"""Ours (one process, `runner: inline`) beside TRL's GRPOTrainer, by turns, on two threads and the
same model and batch.

Two tasks: the quickstart's, 32 prompts x 8 short responses, and a ragged one, whose lengths are
log-normal up to 512 tokens. First TRL's settings are swept, and its quickest are what ours are
measured against; one that is hopeless on the quickstart is not tried on the other task. A turn
starts a process of each, one after the other; the first steps are left out. Memory is the largest
Pss of the process and its children.

    python3.11 -m venv .venv-trl
    .venv-trl/bin/pip install -c constraints.txt torch trl==1.16.0 accelerate datasets safetensors
    python benchmarks/vs_trl.py --trl-python .venv-trl/bin/python  # speed, rewards of three seeds

Resumable: what results/vs_trl.json has is not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from machine import machine
from safetensors.torch import load_file, save_file
from vs_trl_task import LONGEST, MODEL, ROOT, SILENT

RESULT = ROOT / "benchmarks/results/vs_trl.json"
HERE = Path(__file__).parent
TARGETS = {
    "quickstart": {"grpo": 1.2, "stare": 1.0},
    "ragged": {"grpo": 1.5, "stare": 1.0},
}  # of TRL's samples a second
MEMORY_TARGET = 1.2  # of TRL's peak, at most
LEFT_OUT = 3  # steps at a process's start
# a setting so many times slower than TRL's quickest on the quickstart is not tried on the other
# task
HOPELESS = 5

# TRL's settings by name; every one is tried on both tasks
SWEEP: dict[str, dict[str, Any]] = {
    "plain": {"gradient_checkpointing": False},
    "checkpointing": {"gradient_checkpointing": True},
    "half batches": {"gradient_checkpointing": False, "per_device_train_batch_size": 128},
    "quarter batches": {"gradient_checkpointing": False, "per_device_train_batch_size": 64},
    "eager attention": {"gradient_checkpointing": False, "attention": "eager"},
    "fused adam": {"gradient_checkpointing": False, "optim": "adamw_torch_fused"},
    "static cache": {"gradient_checkpointing": False, "cache_implementation": "static"},
    "continuous batching": {
        "gradient_checkpointing": False,
        "use_transformers_continuous_batching": True,
    },
}
# the quickstart's own, as scripts/quickstart.sh starts them
METHODS = {
    "grpo": [
        "algorithm=grpo",
        "algorithm.aggregation=token_mean",
        "algorithm.clip_high=0.28",
        "algorithm.dual_clip=10",
    ],
    "stare": [],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trl-python", type=Path, required=True, help="of an environment with TRL 1.16"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, nargs=2, default=[20, 6], help="measured in a turn, of each task"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=[1, 2, 3], help="of the reward curves"
    )
    parser.add_argument("--curve-steps", type=int, default=150)
    parser.add_argument("--tasks", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    results: dict[str, Any] = (
        json.loads(args.out.read_text()) if args.out.exists() else {"machine": machine()}
    )

    def keep() -> None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        models = {"quickstart": MODEL, "ragged": ragged_model(Path(folder) / "ragged")}
        runner = Runner(args.trl_python, models, Path(folder))
        for task, steps in zip(TARGETS, args.steps, strict=True):
            if task not in args.tasks:
                continue
            found = results.setdefault(task, {"sweep": {}, "turns": []})
            for name in [each for each in SWEEP if each not in found["sweep"]]:
                if hopeless(name, results.get("quickstart", {}).get("sweep", {})):
                    found["sweep"][name] = {
                        "left_out": f"{HOPELESS} times slower than the quickest on the quickstart"
                    }
                else:
                    found["sweep"][name] = brief(runner.trl(task, steps, 1, SWEEP[name]))
                keep()
            best = max(SWEEP, key=lambda name: found["sweep"][name].get("samples_per_s", 0.0))
            found["trl"] = {"settings": best, **SWEEP[best]}
            for turn in range(len(found["turns"]), args.turns):
                measured = {"trl": brief(runner.trl(task, steps, turn + 1, SWEEP[best]))}
                for method in METHODS:
                    measured[method] = brief(runner.ours(task, method, steps, turn + 1))
                found["turns"].append(measured)
                keep()
            found["verdict"] = verdict(found["turns"], TARGETS[task])
            keep()
            print(task, json.dumps(found["verdict"]), flush=True)
        curves = results.setdefault("rewards", {})
        best = results.get("quickstart", {}).get("trl", {}).get("settings", "plain")
        for seed in args.seeds:
            for who in ("trl", *METHODS):
                if f"{who}-{seed}" in curves:
                    continue
                if who == "trl":
                    lines = runner.trl("quickstart", args.curve_steps, seed, SWEEP[best])
                else:
                    lines = runner.ours("quickstart", who, args.curve_steps, seed)
                curves[f"{who}-{seed}"] = [
                    round(line["reward"], 4) for line in lines.get("steps", [])
                ]
                keep()
        if curves:
            results["rewards_verdict"] = reward_verdict(curves)
            keep()
            print("rewards", json.dumps(results["rewards_verdict"]))


class Runner:
    """Starts one process at a time, and reads its clock and its memory."""

    def __init__(self, trl_python: Path, models: dict[str, Path], folder: Path) -> None:
        self._trl_python, self._models, self._folder = trl_python.absolute(), models, folder

    def trl(self, task: str, steps: int, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
        """`steps` after those that are left out; `error` where TRL cannot run with these
        settings."""
        fields = {name: value for name, value in settings.items() if name != "attention"}
        command = [
            self._trl_python,
            HERE / "vs_trl_peer.py",
            "--task",
            task,
            "--model",
            self._models[task],
        ]
        command += ["--steps", steps + LEFT_OUT, "--seed", seed, "--settings", json.dumps(fields)]
        command += ["--attention", settings.get("attention", "sdpa")]
        return self._run(command)

    def ours(self, task: str, method: str, steps: int, seed: int) -> dict[str, Any]:
        """Runs our trainer as a user does, with a clock among its sinks. Nothing is evaluated, and
        no weights are written before the end."""
        command = [
            sys.executable,
            "-m",
            "megatron_stare.cli",
            "train",
            ROOT / "configs/quickstart.yaml",
        ]
        command += [
            *METHODS[method],
            "runtime.runner=inline",
            "parallel.tensor=1",
            f"model.path={self._models[task]}",
        ]
        command += [
            f"run.steps={steps + LEFT_OUT}",
            f"run.seed={seed}",
            "run.checkpoint_every=0",
            "eval.prompts=0",
        ]
        command += ["observability.sinks=[jsonl,vs_trl_ours.Clock]"]
        if task == "ragged":
            command += [
                f"rollout.max_new_tokens={LONGEST}",
                "rollout.environment=vs_trl_ours.Ragged",
            ]
            command += ["reward.verifier=vs_trl_task.mostly_even", "batch.micro_batch_tokens=65536"]
        return self._run(command, "run.dir=")

    def _run(self, command: list[Any], folder_option: str | None = None) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            clock = Path(folder) / "clock.jsonl"
            out = f"{folder_option}{folder}/run" if folder_option else ["--folder", f"{folder}/run"]
            words = [str(word) for word in (*command, *([out] if isinstance(out, str) else out))]
            environment = {
                **os.environ,
                "VS_TRL_CLOCK": str(clock),
                "PYTHONPATH": f"{ROOT}:{HERE}",
                "OMP_NUM_THREADS": "2",
                "TOKENIZERS_PARALLELISM": "false",
                "HF_HUB_OFFLINE": "1",
            }
            with (Path(folder) / "log").open("w") as log:
                process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
                peak = watch(process)
            if process.returncode:
                return {"error": (Path(folder) / "log").read_text().strip().splitlines()[-1][:200]}
            steps = [json.loads(line) for line in clock.read_text().splitlines()]
            return {"steps": steps, "pss_gb": peak}


def watch(process: subprocess.Popen[Any]) -> float:
    """Waits for its end; the largest Pss of it and all that it started, 10^9 bytes."""
    peak, root = 0.0, psutil.Process(process.pid)
    while process.poll() is None:
        try:
            family = [root, *root.children(recursive=True)]
            peak = max(peak, sum(each.memory_full_info().pss for each in family) / 1e9)
        except psutil.Error:
            pass
        time.sleep(0.25)
    return round(peak, 3)


def brief(run: dict[str, Any]) -> dict[str, Any]:
    """Seconds a step by the median, samples a second, and memory."""
    if "error" in run:
        return run
    ends = [line["at"] for line in run["steps"]][LEFT_OUT - 1 :]
    seconds = statistics.median(after - before for before, after in itertools.pairwise(ends))
    lengths = [line["tokens"] for line in run["steps"]][LEFT_OUT:]
    return {
        "step_s": round(seconds, 4),
        "samples_per_s": round(256 / seconds, 1),
        "response_tokens": round(statistics.mean(lengths), 1),
        "pss_gb": run["pss_gb"],
    }


def hopeless(name: str, sweep: dict[str, dict[str, Any]]) -> bool:
    """Checks if a setting was out of the race on the quickstart: its step took more than HOPELESS
    times the fastest."""
    mine = sweep.get(name, {}).get("step_s")
    return mine is not None and mine > HOPELESS * min(
        each["step_s"] for each in sweep.values() if "step_s" in each
    )


def verdict(turns: list[dict[str, Any]], targets: dict[str, float]) -> dict[str, Any]:
    """Medians over the turns of each method's samples a second and memory, as ratios to TRL's of
    the same turn."""
    found: dict[str, Any] = {}
    for method, target in targets.items():
        speed = statistics.median(
            turn[method]["samples_per_s"] / turn["trl"]["samples_per_s"] for turn in turns
        )
        memory = statistics.median(turn[method]["pss_gb"] / turn["trl"]["pss_gb"] for turn in turns)
        met = speed >= target and memory <= MEMORY_TARGET
        found[method] = {
            "speed": round(speed, 3),
            "target": target,
            "memory": round(memory, 3),
            "met": met,
        }
    return found


def reward_verdict(curves: dict[str, list[float]]) -> dict[str, Any]:
    """Mean reward of the last third of the steps, a seed each, and how far the methods' are from
    TRL's."""
    late: dict[str, list[float]] = {}
    for name, rewards in curves.items():
        who = name.rsplit("-", 1)[0]
        late.setdefault(who, []).append(round(statistics.mean(rewards[-len(rewards) // 3 :]), 4))
    found: dict[str, Any] = {"late_reward": late}
    for method in METHODS:
        if len(late.get(method, [])) < 2 or len(late.get("trl", [])) < 2:
            continue
        spread = statistics.variance(late[method]) / len(late[method]) + statistics.variance(
            late["trl"]
        ) / len(late["trl"])
        apart = statistics.mean(late[method]) - statistics.mean(late["trl"])
        found[method] = {"minus_trl": round(apart, 4), "standard_error": round(spread**0.5, 4)}
    return found


def ragged_model(folder: Path) -> Path:
    """The quickstart's model, roomier, and such that it never draws its end token: a channel of the
    last hidden state is made large, and the end token's row of the output layer looks at that
    channel alone."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": 1024}, indent=2) + "\n"
    )
    tensors = load_file(folder / "model.safetensors")
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    norm = tensors["model.norm.weight"]
    embedding[:, 0] = 4 * embedding.abs().amax() * embedding.shape[1] ** 0.5
    head[:, 0] = 0.0
    head[SILENT] = 0.0
    head[SILENT, 0] = -100.0 / norm[0].abs().clamp_min(0.1) * torch.sign(norm[0])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    main()
