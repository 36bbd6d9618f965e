"""Rebuilding the house moves no number: the last commit before it and the working tree run side by
side here.

Every metric but those of the clock, every evaluation and every exported weight is the same, bit for
bit. What moves on purpose is a commit of its own, which moves BASELINE too and says why. Both sides
run with megatron-core 0.16.1, as the baseline knows no other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.models import FAMILIES
from support.releases import python_of
from transformers import AutoModelForCausalLM

from megatron_stare.algorithms import METHODS

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

ROOT = Path(__file__).parent.parent
BASELINE = "a8c2584"
EARLIER = "aa99485"  # whose checkpoints both continue
TIMED = ("time/", "perf/", "memory/", "plan/")
# A server's log-probs were seen to differ by up to 5e-7 between two runs of the same code, and so
# does what compares them with the trainer's. Why was not established.
SERVED = ("agreement/", "rollout/logprob_diff")
TIMEOUT_S = 3600

SMALL = ("eval.prompts=16", "batch.prompts=4", "batch.samples_per_prompt=4", "run.steps=3")
INLINE = ("runtime.runner=inline", "parallel.tensor=1")
UPDATES = ("batch.mini_batch_prompts=2", "batch.epochs=2")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The baseline's files."""
    return files_of(BASELINE, tmp_path_factory.mktemp("baseline"))


def files_of(commit: str, folder: Path) -> Path:
    packed = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def environment(root: Path) -> dict[str, str]:
    """In which `megatron_stare` is the one below `root`, and SGLang's environment that of this
    checkout. Servers are started by this checkout's code for both sides: they do not inherit
    PYTHONPATH, and the baseline's dies beside today's torchvision. The baseline's Python is
    therefore a script that knows where the module is now."""
    sglang = os.environ.get("MEGATRON_STARE_SGLANG_PYTHON", str(ROOT / ".venv-sglang/bin/python"))
    if root != ROOT:
        script = root / "sglang_python.sh"
        script.write_text(
            '#!/bin/sh\ncase "$2" in megatron_stare.rollout.sglang.serve)\n'
            'shift 2; set -- -m megatron_stare.rollout.engines.sglang.serve "$@";;\nesac\n'
            f'exec "{sglang}" "$@"\n'
        )
        script.chmod(0o755)
        sglang = str(script)
    return {**os.environ, "PYTHONPATH": str(root), "MEGATRON_STARE_SGLANG_PYTHON": sglang}


def run(root: Path, run_dir: Path, overrides: tuple[str, ...]) -> None:
    """Trains the quickstart with the code below `root`."""
    found = subprocess.run(
        [python_of(newer=False), "-c", "import megatron_stare; print(megatron_stare.__file__)"],
        cwd=root.parent, env=environment(root), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.startswith(f"{root}/"), (
        "the other side's code would be compared with itself"
    )
    arguments = (
        f"model.path={root}/assets/tiny-adder",
        f"run.dir={run_dir}",
        "run.rollouts_every=1",
        *overrides,
    )
    # an answer that a busy machine is late with is another reward
    arguments = (*arguments, "reward.timeout_s=600")
    train = [python_of(newer=False), "-m", "megatron_stare.cli", "train"]
    done = subprocess.run(
        [*train, f"{root}/configs/quickstart.yaml", *arguments],
        cwd=run_dir.parent,
        env=environment(root),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr


def outcome(
    root: Path, run_dir: Path, overrides: tuple[str, ...], left_out: tuple[str, ...]
) -> dict[str, object]:
    """Trains the quickstart with the code below `root`, and returns what must not differ."""
    run(root, run_dir, overrides)
    rows = list(records(run_dir / "metrics.jsonl"))
    assert rows, "a run without a step proves nothing"
    found = {
        "metrics": [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in rows],
        "evaluations": list(records(run_dir / "eval.jsonl")),
        "rollouts": [
            # which came later
            [{k: v for k, v in row.items() if k != "by_token"} for row in records(file)]
            for file in sorted((run_dir / "rollouts").iterdir())
        ],
        "weights": {  # the file may differ, for its metadata are in no order
            name: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
            for file in sorted((run_dir / "hf").glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        },
    }
    assert found["weights"], "nothing was exported"
    return found


def records(file: Path) -> Iterator[dict[str, object]]:
    return (json.loads(line) for line in file.read_text().splitlines())


def require_same(
    before: Path, folder: Path, *overrides: str, left_out: tuple[str, ...] = TIMED
) -> None:
    """One process a core, at the same time."""
    with ThreadPoolExecutor(2) as sides:
        was = sides.submit(outcome, before, folder / "before", overrides, left_out)
        now = sides.submit(outcome, ROOT, folder / "now", overrides, left_out)
        was, now = was.result(), now.result()
    for name in was:
        assert now[name] == was[name], name


@pytest.mark.parametrize("placed", [INLINE, ()], ids=["inline", "ray_tp2"])
def test_thirty_steps_of_the_quickstart(
    before: Path, tmp_path: Path, placed: tuple[str, ...]
) -> None:
    require_same(
        before, tmp_path, "run.steps=30", "run.checkpoint_every=15", "eval.prompts=64", *placed
    )


LONGER = ("run.steps=6", "eval.prompts=16", "batch.prompts=8", "batch.samples_per_prompt=4")
TRUNCATED = "algorithm.correction={mode: truncate}"


@pytest.mark.parametrize(
    "overrides",
    [
        ("rollout.staleness=0",),
        ("partial.tokens=8", "partial.prompts=12", TRUNCATED),
        ("batch.generate_prompts=12", "rollout.temperature=1.3"),
        ("model.dtype=float16",),
    ],
    ids=["staleness_0", "partial", "dynamic_sampling", "float16"],
)
def test_ways_of_sampling_and_training(
    before: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    require_same(before, tmp_path, *LONGER, *INLINE, *overrides)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2_tied", "{tensor: 1, pipeline: 2}"),
        ("qwen2_tied", "{tensor: 1, pipeline: 2, virtual_pipeline: 2}"),
        ("qwen2_tied", "{tensor: 1, context: 2}"),
        ("qwen3_moe", "{tensor: 1, data: 2, expert: 2}"),
    ],
    ids=["pp2", "vpp2", "cp2", "ep2"],
)
def test_layouts(before: Path, tmp_path: Path, family: str, layout: str) -> None:
    config = FAMILIES[family]()
    config.vocab_size = 16  # that of the shipped tokenizer
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "assets/tiny-adder" / name, tmp_path / "base")
    # the model answers nothing right, so that only the bonus moves it
    bonus = ("algorithm.entropy_bonus={coef: 0.01}", "optimizer.warmup_steps=0")
    require_same(
        before, tmp_path, f"model.path={tmp_path / 'base'}", f"parallel={layout}", *SMALL, *bonus
    )


@pytest.mark.parametrize("begun_by", [EARLIER, BASELINE])
def test_a_run_that_an_earlier_release_began_is_continued_alike(
    before: Path, tmp_path: Path, begun_by: str
) -> None:
    """Both sides continue copies of one run, from the checkpoint of its second step."""
    earlier = files_of(begun_by, tmp_path / "earlier")
    first = (*LONGER, *INLINE, f"model.path={earlier}/assets/tiny-adder", "run.checkpoint_every=2")
    run(earlier, tmp_path / "begun", (*first, "run.steps=4"))
    shutil.rmtree(tmp_path / "begun/checkpoints/step_000004")
    for name in ("before", "now"):
        shutil.copytree(tmp_path / "begun", tmp_path / name)
    require_same(before, tmp_path, *first, "--resume")


LATER = {
    "dg",
    "clip_b",
    "clip_v",
    "entropic",
    "gepo",
    "grpo_dropout",
    "opefo",
    "stare_predictive",
    "repo_r",
    "steer",
}  # no baseline


@pytest.mark.parametrize("method", METHODS.keys() - LATER)
def test_every_method(before: Path, tmp_path: Path, method: str) -> None:
    require_same(before, tmp_path, f"algorithm={method}", *SMALL, *INLINE)


@pytest.mark.parametrize(
    "overrides",
    [
        (*UPDATES, "statistics.surprisal=current"),
        (*UPDATES, "algorithm=kl_cov"),
        (
            (
                "algorithm={name: grpo, correction: {mode: mask, normalise: true}, reference_kl:"
                " {coef: 0.01}}"
            ),
        ),
        ("statistics={surprisal: rollout, gate: lagged}", "observability.entropy_forecast=false"),
    ],
    ids=["updates", "kl_cov_updates", "correction_and_reference", "lagged"],
)
def test_what_methods_are_combined_with(
    before: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    require_same(before, tmp_path, *SMALL, *INLINE, *overrides)


@pytest.mark.sglang
def test_sglang_with_seeds(before: Path, tmp_path: Path) -> None:
    """One response at a time: what a server batches together depends on the clock, and moves the
    last bits."""
    served = (
        "rollout.engine=sglang",
        "sglang.seeds=true",
        "sglang.start_timeout_s=1800",
        "rollout.max_batch=1",
    )
    require_same(before, tmp_path, *SMALL, *INLINE, *served, left_out=(*TIMED, *SERVED))
