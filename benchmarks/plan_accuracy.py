"""Compares `megatron-stare plan` with CPU runs: bytes of tensors in many layouts, seconds in a few.

Predictions come first and are committed before anything they speak of is run; `measure` adds what
the runs took and never changes a prediction. Memory: the fullest rank's tensors in the update
(`plan/update_mb` and `memory/update_live_mb`).
Seconds: medians of a step's, in configurations that the coefficients were not fitted to; the fit is
of one other run, or of two of other widths. Responses all have the longest length, so that
micro-batches are full, as the plan's are.

    python benchmarks/plan_accuracy.py predict          # runs those that coefficients are fitted to
    git add benchmarks/results/plan_accuracy.json && git commit
    python benchmarks/plan_accuracy.py measure          # resumable

A target that is missed stays in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from machine import machine
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_stare.config.load import load_config
from megatron_stare.config.resolved import resolve_run
from megatron_stare.planning.own_plan import predicted
from megatron_stare.run_dir.json_lines import read_jsonl

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/plan_accuracy.json"
ADDER = ROOT / "assets/tiny-adder"
# tokens of every prompt; the end token, which the models never draw; the vocabulary
PROMPT, END, WORDS = 9, 1, 16
MEMORY_WITHIN, SECONDS_WITHIN = 0.10, 0.25
STEPS, LEFT_OUT = {"memory": 3, "seconds": 23}, 3

Run = dict[str, Any]


def run_of(
    response: int = 39, sequences: int = 16, hidden: int = 128, layers: int = 4, **settings: Any
) -> Run:
    """Settings of a run whose micro-batches hold so many sequences of `PROMPT + response` tokens,
    full."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    tokens = sequences * (PROMPT + response)
    return {
        "model": {"hidden": hidden, "layers": layers},
        "settings": {
            "algorithm": "grpo",
            "batch.prompts": 8,
            "batch.micro_batch_tokens": tokens,
            "rollout.max_prompt_tokens": PROMPT,
            "rollout.max_new_tokens": response,
            "plan.response_tokens": response,
            "performance.share_prompts": False,
            "performance.keep_graph": False,
            "parallel.tensor": 1,
            **named,
        },
    }


MEMORY = {
    "one rank": run_of(),
    "one rank, long": run_of(response=119),
    "padded": run_of(batch__packed=False),
    "padded, long": run_of(response=119, batch__packed=False),
    "large micro-batches": run_of(sequences=32),
    "all recomputed": run_of(response=119, model__recompute="full"),
    "attention recomputed": run_of(response=119, model__recompute="selective"),
    "feed-forward recomputed": run_of(
        model__recompute="selective", model__recompute_modules="[mlp]"
    ),
    "tensor 2": run_of(parallel__tensor=2),
    "tensor 2, sequence parallel": run_of(parallel__tensor=2, parallel__sequence=True),
    "data 2": run_of(parallel__data=2),
    "pipeline 2": run_of(parallel__pipeline=2),
    "context 2": run_of(response=119, parallel__context=2),
    "tensor 2, pipeline 2": run_of(hidden=256, parallel__tensor=2, parallel__pipeline=2),
    "pipeline 2 of 2 chunks": run_of(parallel__pipeline=2, parallel__virtual_pipeline=2),
    # predicted after the one above had been measured, which found a wrong count of chunks under way
    "pipeline 2 of 3 chunks": run_of(layers=6, parallel__pipeline=2, parallel__virtual_pipeline=3),
}
WIDE = {
    "twice the prompts": run_of(hidden=256, batch__prompts=16, sequences=32),
    "longer responses": run_of(hidden=256, response=79, sequences=16),
    "a wider model": run_of(hidden=384, sequences=32),
    "a deeper model": run_of(hidden=256, layers=8, sequences=32),
}
# of each the runs that coefficients are fitted to, and those that they then speak of
FITS: dict[str, tuple[list[Run], dict[str, Run]]] = {
    "hidden 128": (
        [run_of(batch__prompts=16, sequences=32)],
        {
            "twice the prompts": run_of(batch__prompts=32, sequences=32),
            "longer responses": run_of(response=79, batch__prompts=16, sequences=16),
            "a wider model": run_of(hidden=192, batch__prompts=16, sequences=32),
            "a deeper model": run_of(layers=8, batch__prompts=16, sequences=32),
        },
    ),
    "hidden 256": ([run_of(hidden=256, sequences=32)], WIDE),
    # this machine's speed moves by a fifth from one minute to another: the run of the middle of
    # three
    "hidden 256, of three runs": ([run_of(hidden=256, sequences=32)], WIDE),
    # what does not grow with a model's products shows in runs of other widths and batches
    "hidden 128 and 256, of three runs each": (
        [run_of(batch__prompts=16, sequences=32), run_of(hidden=256, sequences=32)],
        WIDE,
    ),
}
REPEATS = {"hidden 256, of three runs": 3, "hidden 128 and 256, of three runs each": 3}
PHASES = ("rollout", "log_probs", "update", "sync", "step")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["predict", "measure"])
    parser.add_argument("--only", choices=["memory", "seconds"], help="of what is measured")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found: Run = (
            json.loads(args.out.read_text()) if args.out.exists() else {"machine": machine()}
        )
        if args.stage == "predict":
            predict(found, Path(folder))
        else:
            kinds = {"memory": (MEMORY, found["memory"])}
            kinds |= {fit: (runs, found["fits"][fit]["seconds"]) for fit, (_, runs) in FITS.items()}
            for kind, (runs, known) in kinds.items():
                for name in (
                    runs
                    if args.only is None or (args.only == "memory") == (kind == "memory")
                    else ()
                ):
                    if "measured" not in known[name]:
                        known[name] |= measured(kind, runs[name], Path(folder))
                        found["verdict"] = verdict(found)
                        args.out.write_text(json.dumps(found, indent=1) + "\n")
                        print(kind, name, json.dumps(known[name]), flush=True)
            print(json.dumps(found.get("verdict")))
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def predict(found: Run, folder: Path) -> None:
    """Adds the predictions that are not there yet: coefficients of one run, and what they say of
    all others."""
    found.setdefault("memory", {})
    fits = found.setdefault("fits", {})
    for name, (fitted, runs) in FITS.items():
        if name in fits:
            continue
        coefficients, took, middle = folder / f"{len(fits)}.json", {}, []
        for number, run in enumerate(fitted):
            seconds = {}
            for again in range(REPEATS.get(name, 1)):
                run_dir = folder / f"fitted-{len(fits)}-{number}-{again}"
                rows = train(run, STEPS["seconds"], run_dir)
                seconds[run_dir] = statistics.median(row["time/step_s"] for row in rows[LEFT_OUT:])
            middle.append(sorted(seconds, key=seconds.__getitem__)[len(seconds) // 2])
            took |= seconds
        fit = [
            sys.executable,
            "-m",
            "megatron_stare.cli",
            "plan",
            str(middle[0] / "config.yaml"),
            "--gpu",
            "cpu-core",
        ]
        fit += [word for run_dir in middle for word in ("--calibrate", str(run_dir))]
        fit += ["--coefficients", str(coefficients)]
        subprocess.run(fit, check=True, stdout=subprocess.DEVNULL, env=environment())
        (known,) = json.loads(coefficients.read_text()).values()
        plans = {each: prediction(run, folder, coefficients) for each, run in runs.items()}
        fits[name] = {
            "fitted_step_s": [round(seconds, 4) for seconds in took.values()],
            "coefficients": known["coefficients"],
            "seconds": {
                each: {"predicted": {phase: round(plan[f"plan/{phase}_s"], 4) for phase in PHASES}}
                for each, plan in plans.items()
            },
        }
    for name, run in MEMORY.items():
        if name not in found["memory"]:
            plan = prediction(run, folder, folder / "none.json")
            found["memory"][name] = {"predicted": round(plan["plan/update_mb"], 3)}


def prediction(run: Run, folder: Path, coefficients: Path) -> dict[str, float]:
    options = options_of(run, folder) | {
        "plan.gpu": "cpu-core",
        "plan.coefficients": str(coefficients),
    }
    config = load_config(
        ROOT / "configs/quickstart.yaml", [f"{name}={value}" for name, value in options.items()]
    )
    return predicted(resolve_run(config))


def measured(kind: str, run: Run, folder: Path) -> Run:
    """Trains the run and reports its largest memory, or each phase's median seconds."""
    memory = kind == "memory"
    with tempfile.TemporaryDirectory(dir=folder) as run_dir:
        rows = train(run, STEPS["memory" if memory else "seconds"], Path(run_dir) / "run")
    if memory:
        return {"measured": round(max(row["memory/update_live_mb"] for row in rows), 3)}
    kept = rows[LEFT_OUT:]
    return {
        "measured": {
            phase: round(statistics.median(row[f"time/{phase}_s"] for row in kept), 4)
            for phase in PHASES
        }
    }


def verdict(found: Run) -> Run:
    """Errors, as shares of what was measured, and how many are within the bound; of seconds those
    of a whole step."""
    kinds = {"memory": (found["memory"], MEMORY_WITHIN)}
    kinds |= {name: (fit["seconds"], SECONDS_WITHIN) for name, fit in found["fits"].items()}
    said: Run = {}
    for kind, (known, bound) in kinds.items():
        done = {name: each for name, each in known.items() if "measured" in each}
        errors = {
            name: _whole(each["predicted"]) / _whole(each["measured"]) - 1
            for name, each in done.items()
        }
        within = sum(abs(error) <= bound for error in errors.values())
        said[kind] = {
            "errors": {name: round(error, 4) for name, error in errors.items()},
            "within": within,
        }
        said[kind] |= {"of": len(errors)}
    return said


def _whole(value: Any) -> float:
    return value["step"] if isinstance(value, dict) else value


def train(run: Run, steps: int, run_dir: Path) -> list[dict[str, Any]]:
    """The record of a run, as a user makes it."""
    options = options_of(run, run_dir.parent) | {"run.steps": steps, "run.dir": str(run_dir)}
    command = [
        sys.executable,
        "-m",
        "megatron_stare.cli",
        "train",
        str(ROOT / "configs/quickstart.yaml"),
    ]
    command += [f"{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return read_jsonl(run_dir / "metrics.jsonl")


def options_of(run: Run, folder: Path) -> dict[str, Any]:
    """All settings of a run, its model made on the way."""
    shape = run["model"]
    path = folder / f"model-{shape['hidden']}-{shape['layers']}"
    if not path.exists():
        save_endless(path, **shape)
    ranks = [
        value
        for name, value in run["settings"].items()
        if name.startswith("parallel.") and value is not True
    ]
    alone = {"runtime.runner": "inline"} if max(ranks) == 1 else {}
    off = {"run.checkpoint_every": 0, "eval.prompts": 0, "observability.sinks": "[jsonl]"}
    return {"model.path": str(path), **run["settings"], **alone, **off}


def save_endless(path: Path, hidden: int, layers: int) -> None:
    """A random Qwen2 with the adder's tokenizer that never draws its end token: the first channel
    of its hidden states is 1 in every layer, and the end token's row of the output layer looks at
    that channel alone."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=WORDS,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=END,
        pad_token_id=0,
        bos_token_id=None,
    )
    tensors = dict(Qwen2ForCausalLM(config).state_dict())
    tensors["model.embed_tokens.weight"][:, 0] = 1.0
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0.0
    head = tensors["lm_head.weight"]
    head[:, 0], head[END], head[END, 0] = 0.0, 0.0, -1e4
    path.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(ADDER / name, path)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(path)
    save_file(
        {name: each.contiguous() for name, each in tensors.items()},
        path / "model.safetensors",
        {"format": "pt"},
    )


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0"}


if __name__ == "__main__":
    main()
