"""Every recipe is what was published of it, passes preflight on a model of its size, and fits the GPUs it names. An
ablation is a recipe but for a setting of its method."""

from __future__ import annotations

import functools
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.hollow import hollow_model
from support.runs import ROOT

from megatron_stare.config.load import load_config
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.models import read_shape
from megatron_stare.run.memory_check import check_memory
from megatron_stare.run.preflight import check
from megatron_stare.tasks.task import evaluation_tasks
from megatron_stare.weights.check import expected

FOLDER, ABLATIONS = ROOT / "configs/recipes", ROOT / "configs/ablations"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
CELLS = sorted(path.stem for path in ABLATIONS.glob("*.yaml"))
LAYERS = sorted(FOLDER.glob("*/*.yaml"))
ARCHITECTURES = ROOT / "assets/architectures"
# parameters as published in the index of each model's weights
PARAMETERS = {
    "qwen2.5-math-7b": 7_615_616_512,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b-instruct": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "r1-distill-qwen-1.5b": 1_777_088_000,
    "qwen3-8b-base": 8_190_735_360,
    "qwen3-1.7b-base": 1_720_574_976,  # whose embedding is tied and counts once
    "qwen3-14b-base": 14_768_307_200,
}
ARCHITECTURE = {
    "Qwen2.5-Math-7B": "qwen2.5-math-7b",
    "Qwen2.5-7B": "qwen2.5-7b",
    "Qwen2.5-14B-Instruct": "qwen2.5-14b-instruct",
    "Qwen2.5-32B": "qwen2.5-32b",
    "DeepSeek-R1-Distill-Qwen-1.5B": "r1-distill-qwen-1.5b",
    "Qwen3-8B-Base": "qwen3-8b-base",
    "Qwen3-1.7B-Base": "qwen3-1.7b-base",
    "Qwen3-14B-Base": "qwen3-14b-base",
}
# prompts a round, prompts, prompts an optimizer step, samples, prompt tokens, response tokens, warm-up in optimizer
# steps, dtype, GPUs
STARE = (192, 64, None, 8)
PUBLISHED = {
    "short_cot_qwen2.5_math_7b": (*STARE, 1024, 3070, 0, "float16", 16),
    "short_cot_qwen2.5_14b": (*STARE, 1024, 7168, 0, "float16", 16),
    "short_cot_qwen2.5_32b": (*STARE, 1024, 7168, 0, "float16", 32),
    "long_cot_r1_distill_1.5b": (*STARE, 1024, 15360, 0, "float16", 16),
    "long_cot_qwen3_8b": (*STARE, 1024, 15360, 0, "float16", 16),
    "stapo_qwen3_1.7b": (None, 256, 64, 8, 1024, 15360, 40, "bfloat16", 16),
    "stapo_qwen3_14b": (None, 256, 64, 8, 1024, 15360, 40, "bfloat16", 16),
    "justrl_r1_distill_1.5b": (None, 256, 64, 8, 1024, 15360, 40, "bfloat16", 32),
    "dapo_qwen2.5_32b": (1536, 512, 32, 16, 2048, 20480, 160, "bfloat16", 32),
    "twenty_entropy_qwen3_14b": (1536, 512, 32, 16, 2048, 20480, 160, "bfloat16", 16),
    "kl_cov_qwen2.5_7b": (768, 256, 32, 8, 2048, 8192, 0, "bfloat16", 16),
    "gtpo_qwen2.5_32b": (None, 128, None, 16, 2048, 4096, 0, "bfloat16", 32),
    "stapo_qwen3_8b": (None, 256, 64, 8, 1024, 15360, 40, "bfloat16", 16),
    "gtpo_qwen2.5_7b": (None, 128, None, 16, 2048, 4096, 0, "bfloat16", 16),
}
WEIGHTS = {  # STARE's W and M, steps
    "short_cot_qwen2.5_math_7b": (1.1, 0.9, 5500),
    "short_cot_qwen2.5_14b": (1.05, 0.95, 1500),
    "short_cot_qwen2.5_32b": (1.05, 0.95, 1500),
    "long_cot_r1_distill_1.5b": (1.1, 0.9, 5000),
    "long_cot_qwen3_8b": (1.1, 0.9, 5000),
}


# STARE's ablations: what differs from the recipe of Qwen2.5-Math-7B
ABLATED: dict[str, dict[str, Any]] = {
    **{f"operator_{name.lower()}": {"variant": name} for name in ("O1", "O2", "O3", "O4", "C1", "C2", "C3", "C4")},
    "gate_sample": {"gate": "sample"},
    "gate_token": {"gate": "token"},
    "fixed_threshold": {"rare_below": 0.1},
    "adaptive": {"adaptive": True},
    "no_gate": {"entropy_target": None},
}


@functools.cache
def loaded(name: str) -> Config:
    return load_config(f"{'ablations' if name in CELLS else 'recipes'}/{name}.yaml", [])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models of the recipes, under their names."""
    folder = tmp_path_factory.mktemp("models")
    for name, architecture in ARCHITECTURE.items():
        hollow_model(ARCHITECTURES / architecture, folder / name)
    return folder


def on(models: Path, config: Config) -> list[str]:
    """A recipe's model in this folder, and a Python for its servers, which are not started."""
    return [f"model.path={models / Path(config.model.path).name}", f"sglang.python={sys.executable}"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_an_architecture_has_the_published_parameters(name: str) -> None:
    shape = read_shape(ARCHITECTURES / name)
    assert sum(math.prod(sizes) for sizes in expected(shape).values()) == PARAMETERS[name]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_preflight_and_fits_its_gpus(name: str, models: Path) -> None:
    run = check(load_config(f"recipes/{name}.yaml", on(models, loaded(name))))
    assert run.config.memory.device_gb == 80
    check_memory(run)


def test_memory_is_looked_at_and_not_only_named(models: Path) -> None:
    """The 32B does not fit without recomputation; were the check empty, it would."""
    name = "short_cot_qwen2.5_32b"
    changes = [*on(models, loaded(name)), "model.recompute=none"]
    with pytest.raises(ConfigError, match=r"a GPU of 80\.0 GB is too small for the phases update"):
        check_memory(check(load_config(f"recipes/{name}.yaml", changes)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_is_what_was_published(name: str) -> None:
    config = loaded(name)
    batch, rollout = config.batch, config.rollout
    said = (batch.generate_prompts, batch.prompts, batch.mini_batch_prompts, batch.samples_per_prompt)
    lengths = (rollout.max_prompt_tokens, rollout.max_new_tokens)
    found = (*said, *lengths, config.optimizer.warmup_steps, config.model.dtype, config.parallel.world_size)
    assert found == PUBLISHED[name]
    assert (config.optimizer.lr, config.optimizer.clip_grad, rollout.temperature) == (1e-6, 1.0, 1.0)
    asked = 1 if config.algorithm.name == "dapo" else 32
    assert {(task.name, task.samples) for task in evaluation_tasks(config)} == {("aime24", asked), ("aime25", asked)}


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_final_evaluation_is_what_was_published(name: str) -> None:
    """avg@32 of the small sets and avg@4 of the large ones, at temperature 1 and top-p 0.7; training asks two alone,
    every ten steps."""
    tasks = evaluation_tasks(loaded(name), offline=True)
    samples = {"aime24": 32, "aime25": 32, "amc23": 32, "math500": 4, "minerva": 4, "olympiadbench": 4}
    assert {task.name: task.samples for task in tasks} == samples
    assert {(task.config.rollout.temperature, task.top_p, task.config.eval.greedy) for task in tasks} == {
        (1, 0.7, False)
    }
    assert loaded(name).eval.every == 10


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_baseline_differs_in_weights_and_gate_alone(name: str) -> None:
    stare, grpo = loaded(name), loaded(f"{name}_grpo")
    method = stare.algorithm.method
    assert (method.amplify, method.attenuate, stare.run.steps) == WEIGHTS[name]  # type: ignore[attr-defined]
    assert (method.variant, method.share, method.entropy_target) == ("O1", 0.1, 0.3)  # type: ignore[attr-defined]
    one, other = (config.model_dump(mode="json") for config in (stare, grpo))
    assert one.pop("algorithm")["name"] == "stare" and other.pop("algorithm")["name"] == "grpo"
    assert other["run"].pop("name") == one["run"].pop("name") + "-grpo"
    assert one == other
    for setting in ("aggregation", "clip_low", "clip_high", "dual_clip", "reference_kl", "entropy_bonus"):
        assert getattr(method, setting) == getattr(grpo.algorithm.method, setting), setting


def test_every_cell_of_the_ablations_has_its_file() -> None:
    assert {*CELLS} == ABLATED.keys() | {"operator_none"}
    none, grpo = loaded("operator_none"), loaded("short_cot_qwen2.5_math_7b_grpo")
    assert none.algorithm == grpo.algorithm and none.run.steps == 4000


@pytest.mark.parametrize("name", ABLATED)
def test_an_ablation_differs_in_what_it_ablates_alone(name: str) -> None:
    cell, recipe = (loaded(each).model_dump(mode="json") for each in (name, "short_cot_qwen2.5_math_7b"))
    assert cell["run"].pop("name") == "ablation-" + name.removeprefix("operator_").replace("_", "-")
    recipe["run"].pop("name")
    recipe["run"]["steps"] = 4000
    recipe["algorithm"] |= ABLATED[name]
    assert cell == recipe


@pytest.mark.parametrize("name", CELLS)
def test_an_ablation_passes_preflight(name: str, models: Path) -> None:
    """Its memory is the recipe's."""
    run = check(load_config(f"ablations/{name}.yaml", on(models, loaded(name))))
    assert run.config.algorithm == loaded(name).algorithm


def test_variants_of_a_recipe_differ_in_what_they_name_alone() -> None:
    for name, of, changed in (
        ("stapo_v1_qwen3_8b", "stapo_qwen3_8b", {"version": "v1", "quantile": 0.8}),
        ("gtpo_qwen2.5_7b_eq6", "gtpo_qwen2.5_7b", {"normalise": "separate"}),
    ):
        one, other = (loaded(each).model_dump(mode="json") for each in (name, of))
        assert other["run"].pop("name") != one["run"].pop("name")
        assert one == {**other, "algorithm": {**other["algorithm"], **changed}}


def test_the_methods_of_the_other_papers() -> None:
    names = ("stapo_qwen3_8b", "gtpo_qwen2.5_7b", "gtpo_qwen2.5_7b_grpo_s")
    stapo, gtpo, grpo_s = (loaded(name).algorithm for name in names)
    assert (stapo.name, gtpo.name, grpo_s.name) == ("stapo", "gtpo", "grpo_s")
    assert (stapo.method.tau_p, stapo.method.quantile) == (0.002, 0.75)  # type: ignore[attr-defined]
    assert (gtpo.method.alpha1, gtpo.method.alpha2) == (1.0, 0.1)  # type: ignore[attr-defined]
    for name in ("justrl_r1_distill_1.5b", "dapo_qwen2.5_32b", "twenty_entropy_qwen3_14b"):
        config = loaded(name)
        method: Any = config.algorithm.method
        assert (method.clip_low, method.clip_high, method.dual_clip) == (0.2, 0.28, 10.0)
        assert config.optimizer.weight_decay == 0.1
        overlong = None if config.algorithm.name == "justrl" else (20480, 4096, 1.0)
        assert overlong == (method.overlong and (*vars(method.overlong).values(),))
    assert loaded("justrl_r1_distill_1.5b").batch.micro_batch_tokens == 32768
    assert loaded("kl_cov_qwen2.5_7b").optimizer.weight_decay == 0.0
    assert loaded("gtpo_qwen2.5_32b_grpo_s").algorithm.name == "grpo_s"


@pytest.mark.parametrize("path", [*LAYERS, *FOLDER.glob("*.yaml"), *ABLATIONS.glob("*.yaml")], ids=lambda p: p.stem)
def test_every_value_has_its_source_or_is_said_to_be_ours(path: Path) -> None:
    """On its line, in the comment above it, or for the whole file at its top."""
    mark = re.compile(r"\[[RPTNJ8]\]|silent: our choice|assumed")
    lines = path.read_text().splitlines()
    if any("very value is our choice" in line for line in lines if line.startswith("#")):
        return
    above = ""
    for line in lines:
        value = re.match(r"\s+(?!name|-|#)(\w+): *[^#\s]", line)
        assert value is None or mark.search(line) or mark.search(above) or "greedy" in line, line
        above = line if line.strip().startswith("#") else ""


def test_a_recipe_is_layers_of_a_method_a_regime_a_model_and_a_cluster() -> None:
    for name in RECIPES:
        layers = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["defaults"]
        kinds = [Path(layer).parent.name for layer in layers]
        assert kinds in (["methods", "regimes", "models", "clusters"], ["recipes", "methods"]), name
