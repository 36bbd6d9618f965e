"""Every recipe is what was published of it, passes preflight on a model of its size, and fits the
GPUs it names. A variant is its recipe but for what it names."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.hollow import hollow_model
from support.runs import ROOT

from megatron_stare.cli import main
from megatron_stare.commands.recipes import _fitted, _listed, _row
from megatron_stare.config.load import load_config
from megatron_stare.config.recipes import published, recipes, refused, sources, value_of
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.models import read_shape
from megatron_stare.planning import memory
from megatron_stare.planning.memory import check_memory
from megatron_stare.planning.preflight import check
from megatron_stare.rewards.verifier import make_verifier
from megatron_stare.tasks.task import evaluation_tasks
from megatron_stare.weights.files.check import expected

FOLDER = ROOT / "configs/recipes"
RECIPES = list(recipes())
ABLATIONS = [name for name in RECIPES if name.startswith("ablation_")]
LAYERS = [*sorted(FOLDER.glob("*/*.yaml")), FOLDER / "index.yaml"]
ARCHITECTURES = ROOT / "assets/architectures"
# parameters as published in the index of each model's weights
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,  # whose embedding is tied and counts once
    "qwen2.5-math-7b": 7_615_616_512,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b-instruct": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "r1-distill-qwen-1.5b": 1_777_088_000,
    "qwen3-8b-base": 8_190_735_360,
    "qwen3-1.7b-base": 1_720_574_976,  # likewise
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
STARE = (
    "short_cot_qwen2.5_math_7b",
    "short_cot_qwen2.5_14b",
    "short_cot_qwen2.5_32b",
    "long_cot_r1_distill_1.5b",
)
STARE += ("long_cot_qwen3_8b",)
STAPO = ("stapo_qwen3_1.7b", "stapo_qwen3_8b", "stapo_qwen3_14b")
GTPO = ("gtpo_qwen2.5_7b", "gtpo_qwen2.5_32b")
SIX = {"aime24": 32, "aime25": 32, "amc23": 32, "math500": 4, "minerva": 4, "olympiadbench": 4}
W = (1.01, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 4.0)
# STARE's ablations: what differs from the recipe of Qwen2.5-Math-7B
ABLATED: dict[str, dict[str, Any]] = {
    **{
        f"operator_{name.lower()}": {"variant": name}
        for name in ("O1", "O2", "O3", "O4", "C1", "C2", "C3", "C4")
    },
    "gate_sample": {"gate": "sample"},
    "gate_token": {"gate": "token"},
    "fixed_threshold": {"rare_below": 0.1},
    "adaptive": {"adaptive": True},
    **{f"w_{w:g}": {"amplify": w} for w in W},
    **{f"w_{w:g}_no_gate": {"amplify": w, "entropy_target": None} for w in W},
    **{f"p_{p:g}": {"share": p} for p in (0.05, 0.1, 0.2, 0.4)},
    **{f"target_{target:g}": {"entropy_target": target} for target in (0.2, 0.3, 0.4)},
}


@functools.cache
def loaded(name: str) -> Config:
    return load_config(f"recipes/{name}")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models of the recipes, under their names."""
    folder = tmp_path_factory.mktemp("models")
    for name, architecture in ARCHITECTURE.items():
        hollow_model(ARCHITECTURES / architecture, folder / name)
    return folder


@pytest.fixture(autouse=True, scope="module")
def planned_once() -> Iterator[None]:
    """Recipes of one model and layout have the same ranks, each of which takes 0.3 s to build."""
    plan_rank, plans = memory.plan_rank, {}

    def planned(*asked: Any) -> Any:
        if (key := repr(asked)) not in plans:
            plans[key] = plan_rank(*asked)
        return plans[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "plan_rank", planned)
        yield


def on(models: Path, config: Config) -> list[str]:
    """A recipe's model in this folder, and a Python for its servers, which are not started."""
    return [
        f"model.path={models / Path(config.model.path).name}",
        f"sglang.python={sys.executable}",
    ]


@pytest.mark.parametrize("name", PARAMETERS)
def test_an_architecture_has_the_published_parameters(name: str) -> None:
    shape = read_shape(ARCHITECTURES / name)
    assert sum(math.prod(sizes) for sizes in expected(shape).values()) == PARAMETERS[name]


# with the published settings, line by line


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_what_was_published(name: str) -> None:
    """Or differs as published.yaml says that it does, and why."""
    tree = loaded(name).model_dump(mode="json")
    rows = published(recipes()[name])
    assert len(rows) >= (8 if name.startswith("gtpo") else 20)
    for row in rows:
        assert value_of(tree, row.setting) == row.wanted, row.setting
        assert row.source.partition(":")[0] in sources(), row


def test_what_a_recipe_assumes_is_not_shown_as_published() -> None:
    """The index says "assumed" beside a value that was published for another model only."""
    name, told = "", 0
    for line in (FOLDER / "index.yaml").read_text().splitlines():
        if begins := re.match(r"  (\w[\w.]*):$", line):
            name = begins[1]
        elif found := re.match(r" +(\w+): .*# assumed", line):
            rows = [row for row in published(recipes()[name]) if row.setting.endswith(found[1])]
            assert [row.because and "assumed" in row.because for row in rows] == [True], (
                name,
                line,
            )
            told += 1
    assert told == 6


def test_every_mark_in_a_layer_has_its_row() -> None:
    """A value that says where it was published stands in the table under that layer, or under one
    that it goes with."""
    tables = yaml.safe_load((FOLDER / "published.yaml").read_text())["layers"]
    shared = {
        "methods/training",
        *(f"regimes/{path.stem}" for path in (FOLDER / "regimes").glob("*.yaml")),
    }
    mark, missing = re.compile(r"\[[RPTJ8]\]"), []
    for path in sorted((FOLDER / "methods").glob("*.yaml")):
        layer = f"methods/{path.stem}"
        if layer in shared:
            continue
        rows = {row["setting"] for row in tables.get(layer, [])}
        section = ""
        for line in path.read_text().splitlines():
            if found := re.match(r"(\w+):$", line):
                section = found[1]
            elif (
                (found := re.match(r"  (\w+): *[^#\s]", line))
                and mark.search(line)
                and "silent" not in line
            ):
                name = f"{section}.{found[1]}"
                missing += (
                    [f"{layer}: {name}"] if not any(each.startswith(name) for each in rows) else []
                )
    assert missing == []


def test_the_rows_that_the_papers_list() -> None:
    wanted = {
        *(
            f"{name}{suffix}"
            for name in STARE
            for suffix in ("", "_grpo", "_c2", "_mix", "_dapo", "_twenty_entropy")
        ),
        *(f"{name}{suffix}" for name in STARE for suffix in ("_justrl", "_clip_cov", "_kl_cov")),
        *(
            f"{name}{suffix}"
            for name in STAPO
            for suffix in ("", "_v1", "_grpo", "_twenty_entropy", "_justrl")
        ),
        *(
            f"{name}{suffix}"
            for name in GTPO
            for suffix in ("", "_eq6", "_grpo_s", "_grpo", "_dapo", "_dapo_forks")
        ),
        *(
            "tool_use_qwen2.5_7b",
            "tool_use_qwen2.5_7b_grpo",
            "justrl_r1_distill_1.5b",
            "dapo_qwen2.5_32b",
            "twenty_entropy_qwen3_14b",
            "kl_cov_qwen2.5_7b",
        ),
        *(f"ablation_{name}" for name in (*ABLATED, "operator_none")),
    }
    assert set(RECIPES) == wanted


# that it runs


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_preflight_and_fits_its_gpus(name: str, models: Path) -> None:
    run = check(load_config(f"recipes/{name}", on(models, loaded(name))))
    assert run.config.memory.device_gb == 80 and run.config.algorithm == loaded(name).algorithm
    check_memory(run)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_a_plan(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the H100s that it names, without its model; a run that does not fit exits with 1."""
    monkeypatch.chdir(tmp_path)
    for variable in ("CUDA_VISIBLE_DEVICES", "TORCHDYNAMO_DISABLE"):
        # a plan sets them for its process
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    assert main(["plan", f"recipes/{name}", "--json", "plan.json"]) == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["gpu"]["name"] == "h100-80g" and found["not_checked"]


def test_memory_is_looked_at_and_not_only_named(models: Path) -> None:
    """The 32B does not fit without recomputation; were the check empty, it would."""
    name = "short_cot_qwen2.5_32b"
    changes = [*on(models, loaded(name)), "model.recompute=none"]
    with pytest.raises(ConfigError, match=r"a GPU of 80\.0 GB is too small for the phases update"):
        check_memory(check(load_config(f"recipes/{name}", changes)))


def test_several_updates_where_the_method_needs_them() -> None:
    """KL-Cov's gradient is exactly 0 with one update a batch, and Clip-Cov's bound never acts."""
    for name in RECIPES:
        method, batch = loaded(name).algorithm.name, loaded(name).batch
        assert batch.updates > 1 or method not in ("kl_cov", "clip_cov"), name


# how answers are scored


def group_advantages_of(rewards: list[float]) -> list[float]:
    """(r - mean) / std, in float64 and without the package."""
    mean = sum(rewards) / len(rewards)
    spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / spread for r in rewards]


@pytest.mark.parametrize(
    "name", [name for name in RECIPES if "overlong" in str(loaded(name).algorithm.settings())]
)
def test_the_overlong_punishment_weighs_what_it_does_with_rewards_of_minus_and_plus_one(
    name: str,
) -> None:
    """Right and wrong, each with and without the full penalty: 1.162, .387, -.387, -1.162 as in
    DAPO."""
    config = loaded(name)
    overlong = config.algorithm.method.overlong  # type: ignore[attr-defined]
    if overlong is None:
        return
    assert overlong.max_length == config.rollout.max_new_tokens
    right, wrong = (make_verifier(config.reward.verifier)(text, "4") for text in said("4"))
    full = float(overlong.penalty(torch.tensor([overlong.max_length])))
    here = group_advantages_of([right, right + full, wrong, wrong + full])
    assert here == pytest.approx(group_advantages_of([1, 1 - 1, -1, -1 - 1]), abs=1e-12)
    assert here == pytest.approx([1.1619, 0.3873, -0.3873, -1.1619], abs=1e-4)


def said(answer: str) -> tuple[str, str]:
    """A right and a wrong response, in the form that every verifier here reads."""
    return f"Answer: {answer}\n\\boxed{{{answer}}}", f"Answer: 1{answer}\n\\boxed{{1{answer}}}"


def test_verifiers_and_prompts_are_those_of_the_papers() -> None:
    box = "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    for name in RECIPES:
        config = loaded(name)
        own = name.split("_")[0]
        wanted = {"stapo": "dapo_boxed", "justrl": "dapo_boxed", "dapo": "dapo", "twenty": "dapo"}
        verifier = wanted.get(own, "math" if own in ("gtpo", "kl") else "stare")
        assert config.reward.verifier.name == verifier, name
        assert {task.verifier for task in config.eval.tasks} == {None}, name  # the run's own
        assert (config.data.template == box) == (verifier != "dapo"), name
    prompt = loaded("dapo_qwen2.5_32b").data.template.format(prompt="What is 2 + 2?")  # type: ignore[union-attr]
    assert (
        prompt
        == "Solve the following math problem step by step. The last line of your response should be"
        " of the form Answer: $Answer (without quotes) where $Answer is the answer to the"
        " problem.\n\nWhat is 2 + 2?\n\nRemember to put your answer on its own line after"
        ' "Answer:".'
    )


# what is evaluated


@pytest.mark.parametrize("name", STARE)
def test_the_final_evaluation_of_stare(name: str) -> None:
    """avg@32 of the small sets and avg@4 of the large ones; training asks two alone, every ten
    steps."""
    tasks = evaluation_tasks(loaded(name), offline=True)
    assert {task.name: task.samples for task in tasks} == SIX
    assert {
        (task.config.rollout.temperature, task.top_p, task.config.eval.greedy) for task in tasks
    } == {(1, 0.7, False)}
    assert loaded(name).eval.every == 10
    assert [task.name for task in evaluation_tasks(loaded(name))] == ["aime24", "aime25"]


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("stapo")])
def test_stapo_is_judged_by_six_sets_at_both_temperatures(name: str) -> None:
    tasks = evaluation_tasks(loaded(name), offline=True)
    asked = {
        task.name: (
            task.samples,
            task.config.rollout.temperature,
            task.top_p,
            task.config.rollout.max_new_tokens,
        )
        for task in tasks
    }
    assert asked == {
        **{set_: (n, 0.7, 0.9, 20480) for set_, n in SIX.items()},
        **{f"{set_}_t1": (n, 1.0, 1.0, 20480) for set_, n in SIX.items()},
    }
    assert [task.name for task in evaluation_tasks(loaded(name))] == ["aime24", "aime25"]


def test_gtpo_is_judged_by_math500_too_and_all_are_kept_from_training() -> None:
    for name in GTPO:
        tasks = evaluation_tasks(loaded(name), offline=True)
        assert {task.name: task.samples for task in tasks} == {
            "aime24": 32,
            "aime25": 32,
            "math500": 32,
        }
    files = {f"data/{name}.jsonl" for name in SIX}
    for name in RECIPES:
        config = loaded(name)
        assert (
            set(config.data.decontaminate) == files >= {task.path for task in config.eval.tasks}
        ), name


# variants differ in what they name alone


@pytest.mark.parametrize("name", STARE)
def test_the_baseline_differs_in_weights_and_gate_alone(name: str) -> None:
    stare, grpo = loaded(name), loaded(f"{name}_grpo")
    method = stare.algorithm.method
    assert (method.variant, method.share, method.entropy_target) == ("O1", 0.1, 0.3)  # type: ignore[attr-defined]
    one, other = (config.model_dump(mode="json") for config in (stare, grpo))
    assert one.pop("algorithm")["name"] == "stare" and other.pop("algorithm")["name"] == "grpo"
    assert other["run"].pop("name") == one["run"].pop("name") + "-grpo"
    assert one == other
    for setting in (
        "aggregation",
        "clip_low",
        "clip_high",
        "dual_clip",
        "reference_kl",
        "entropy_bonus",
    ):
        assert getattr(method, setting) == getattr(grpo.algorithm.method, setting), setting


@pytest.mark.parametrize(
    "name", [name for name in RECIPES if recipes()[name].over and name not in ABLATIONS]
)
def test_a_variant_keeps_what_is_not_its_methods(name: str) -> None:
    """Model, layout, lengths, scoring, evaluation and optimizer are those of the recipe that it is
    compared with."""
    over = recipes()[name].over
    assert over is not None
    one, other = (loaded(each).model_dump(mode="json") for each in (name, over))
    free = (
        {"algorithm", "statistics", "batch", "data"}
        if name.endswith("_mix")
        else {"algorithm", "statistics", "batch"}
    )
    for section in one.keys() - free:
        if section == "run":
            one[section].pop("name"), other[section].pop("name")
        assert one[section] == other[section], section
    for key in ("prompts", "samples_per_prompt", "epochs"):
        assert one["batch"][key] == other["batch"][key]


@pytest.mark.parametrize("name", ABLATED)
def test_an_ablation_differs_in_what_it_ablates_alone(name: str) -> None:
    each, recipe = (
        loaded(n).model_dump(mode="json") for n in (f"ablation_{name}", "short_cot_qwen2.5_math_7b")
    )
    assert each["run"].pop("name") == f"ablation-{name}".replace("_", "-")
    recipe["run"].pop("name")
    recipe["run"]["steps"] = 4000
    recipe["algorithm"] |= ABLATED[name]
    assert each == recipe


def test_no_operator_is_the_baseline() -> None:
    none, grpo = loaded("ablation_operator_none"), loaded("short_cot_qwen2.5_math_7b_grpo")
    assert none.algorithm == grpo.algorithm and none.run.steps == 4000


def test_methods_that_select_by_the_policy_of_the_update_do() -> None:
    selecting = ("stapo", "twenty_entropy", "kl_cov", "clip_cov")
    for name in RECIPES:
        by_current = loaded(name).algorithm.name in selecting
        assert (loaded(name).statistics.surprisal == "current") == by_current, name


def test_the_mixed_data_are_four_sets_without_repeats() -> None:
    data = loaded("short_cot_qwen2.5_14b_mix").data
    assert [Path(file.path).stem for file in data.mixture] == [
        "deepscaler",
        "skywork_or1",
        "polaris",
        "dapo_math_17k",
    ]
    assert data.path is None and data.deduplicate


# the command


def test_the_command_lists_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(RECIPES)]] == RECIPES
    assert all(
        any(line.startswith(name) for line in lines[-len(refused()) :]) for name in refused()
    )
    assert main(["recipes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["recipes"]] == RECIPES and found["refused"] == refused()


def test_the_command_holds_a_recipe_against_what_was_published(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipes", "dapo_qwen2.5_32b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (factor,) = (line for line in lines if "algorithm.overlong.factor  " in line)
    assert factor.split() == ["*", "algorithm.overlong.factor", "1.0", "0.5", "D:21"]
    assert any("overlong.factor: verifiers here give 0 and 1" in line for line in lines)
    assert any(
        line.startswith("  D: Shenzhi-Wang/Beyond-the-80-20-Rule-RLVR at 6f5dda6") for line in lines
    )
    assert main(["recipes", "--json", "recipes/gtpo_qwen2.5_7b_dapo"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"] == [*recipes()["gtpo_qwen2.5_7b"].layers, "methods/on_gtpo_dapo"]
    assert {row["setting"]: row["here"] for row in found["settings"]}["batch.prompts"] == 128


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("short_cot_qwen25_math_7b", "did you mean short_cot_qwen2.5_math_7b"),
        ("xyz", "megatron-stare recipes lists them"),
        ("stapo_v1_qwen3_8b", "it is called stapo_qwen3_8b_v1 now"),
    ],
)
def test_what_is_not_published_is_refused(
    name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ["recipes", name],
        ["train", f"recipes/{name}", "--dry-run"],
        ["plan", f"configs/recipes/{name}.yaml"],
    ):
        assert main(command) == 2
        said = capsys.readouterr()
        assert words in said.err and said.out == "" and "\n  fix: " in said.err


def test_a_configuration_lies_over_a_recipe(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    for named in (
        "recipes/stapo_qwen3_8b_grpo",
        "recipes/stapo_qwen3_8b_grpo.yaml",
        "configs/recipes/stapo_qwen3_8b_grpo",
    ):
        mine.write_text(f"defaults: [{named}]\nrun: {{steps: 7}}\n")
        config = load_config(mine)
        assert config.run.steps == 7 and config.algorithm == loaded("stapo_qwen3_8b_grpo").algorithm
    mine.write_text("defaults: [recipes/stapo_qwen3_8b_gppo]\n")
    with pytest.raises(ConfigError, match="did you mean"):
        load_config(mine)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/stapo_qwen3_8b_grpo").write_text("run: {steps: 9}\nmodel: {path: x}\n")
    mine.write_text("defaults: [recipes/stapo_qwen3_8b_grpo]\n")
    assert load_config(mine).run.steps == 9  # a file that is there goes before what ships


@pytest.mark.parametrize("path", LAYERS, ids=lambda p: p.stem)
def test_every_value_has_its_source_or_is_said_to_be_ours(path: Path) -> None:
    """On its line, in the comment above it, or for the whole file at its top."""
    mark = re.compile(r"\[[RPTNJ8]\]|silent: our choice|assumed|as above")
    words = ("name", "layers", "reproduces", "result", "layer", "suffix", "over", "settings")
    lines = path.read_text().splitlines()
    if any("very value is our choice" in line for line in lines if line.startswith("#")):
        return
    above = ""
    for line in lines:
        if line.startswith("refused:"):
            return
        value = re.match(r"\s+(?!-|#)([\w.]+): *[^#\s]", line)
        free = path.stem == "index" and value and (value[1] in words or value[1] in RECIPES)
        free = free or (value is not None and value[1] == "name")
        assert (
            value is None or free or mark.search(line) or mark.search(above) or "greedy" in line
        ), line
        above = line if line.strip().startswith("#") else ""


def test_a_recipe_is_layers_of_a_method_a_regime_a_model_and_a_cluster() -> None:
    for recipe in recipes().values():
        kinds = [layer.partition("/")[0] for layer in recipe.layers]
        assert kinds in (
            (["methods"], ["data"], [])
            if recipe.over
            else (["methods", "regimes", "models", "clusters"],)
        )
    named = {layer for recipe in recipes().values() for layer in recipe.layers}
    files = {f"{path.parent.name}/{path.stem}" for path in FOLDER.glob("*/*.yaml")}
    assert files - named == {"methods/training"}


def test_a_terminal_of_80_columns_wraps_the_last_column_under_itself() -> None:
    lines = _listed([_row(recipe) for recipe in recipes().values()])
    fitted = _fitted(lines, 80)
    assert max(map(len, fitted)) <= 80 and len(fitted) > len(lines)
    indent = lines[0].index("reproduces")
    names = {recipe.name for recipe in recipes().values()} | refused().keys()
    assert {line.split()[0] for line in fitted[1:] if line[:1].strip()} >= names
    assert all(not line[:indent].strip() for line in fitted if line.startswith(" "))
    assert " ".join(" ".join(fitted).split()) == " ".join(" ".join(lines).split())
    assert _fitted(lines, None) == lines == _fitted(lines, 60)


def test_the_readme_counts_the_recipes() -> None:
    said = (ROOT / "README.md").read_text()
    counts = re.findall(r"(\d+) recipes of\s+published|published runs as recipes \| (\d+),", said)
    assert [int(one or two) for one, two in counts] == [len(RECIPES)] * 2
