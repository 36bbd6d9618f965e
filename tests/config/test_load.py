"""Configuration files, overrides and the page about them."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import ROOT

from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.method import Method
from megatron_stare.algorithms.stare import Stare
from megatron_stare.config.load import dump_yaml, load_config
from megatron_stare.config.rollout_sections import (
    DataConfig,
    EvalTask,
    MixtureFile,
    RewardConfig,
    SGLangConfig,
)
from megatron_stare.config.schema import PlanConfig, RunConfig
from megatron_stare.config.training_sections import ModelConfig
from megatron_stare.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_a_config_that_ships_works_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/quickstart.yaml").model.path == str(ROOT / "assets/tiny-adder")
    assert load_config(ROOT / "configs/quickstart.yaml").model.path == str(
        ROOT / "assets/tiny-adder"
    )
    # of the user: a path given beside it, and a file that only looks as if it shipped
    assert (
        load_config("configs/quickstart.yaml", ["model.path=assets/tiny-adder"]).model.path
        == "assets/tiny-adder"
    )
    assert (
        load_config(write(tmp_path, "model: {path: assets/tiny-adder}\n")).model.path
        == "assets/tiny-adder"
    )
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config("pyproject.toml")  # lies beside configs/, and is none
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/quickstart.yaml").write_text(
        "model: {path: assets/tiny-adder}\nrun: {name: mine}\n"
    )
    mine = load_config("configs/quickstart.yaml")
    assert (mine.run.name, mine.model.path) == ("mine", "assets/tiny-adder")


def test_overrides_win_and_keep_their_types(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: here}\noptimizer: {lr: 1.0e-3}\n")
    config = load_config(
        path, ["optimizer.lr=1e-6", "run.seed=3", "optimizer.distributed=true", "run.dir=a=b"]
    )
    assert config.optimizer.lr == 1e-6
    assert (config.run.seed, config.optimizer.distributed, config.run.dir) == (3, True, "a=b")


def test_naming_another_method_drops_the_settings_of_the_first(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: here}\nalgorithm: {name: stare, amplify: 2}\n")

    def method(path: Path, *overrides: str) -> Method:
        return load_config(path, overrides).algorithm.method

    assert method(path) == Stare(amplify=2.0)
    assert method(path, "algorithm=grpo") == method(path, "algorithm.name=grpo") == Grpo()
    assert method(path, "algorithm={name: grpo}") == Grpo()
    assert method(path, "algorithm.amplify=3") == method(
        path, "algorithm.name=stare", "algorithm.amplify=3"
    )
    assert method(path, "algorithm.amplify=3") == Stare(amplify=3.0)
    mine = Grpo(clip_high=0.3)
    for named in ("algorithm=grpo", "algorithm.name=grpo", "algorithm={name: grpo}"):
        assert method(path, "algorithm.clip_high=0.3", named) == mine
        assert method(path, named, "algorithm.clip_high=0.3") == mine
    assert method(path, "algorithm=stare", "algorithm.name=grpo") == Grpo()  # the last holds
    with pytest.raises(ConfigError, match=r"algorithm\.share"):
        method(path, "algorithm.share=0.2", "algorithm=grpo")
    short = write(tmp_path, "model: {path: here}\nalgorithm: stare\n")
    assert method(short, "algorithm.share=0.2") == Stare(share=0.2)


def test_a_setting_holds_on_either_side_of_its_extension_or_section(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: here}\nreward: {verifier: arithmetic}\n")
    given = ["reward.workers=3", "reward={verifier: math}"]
    for overrides in itertools.permutations(["rollout.engine.x=1", "rollout.engine=a.B"]):
        assert load_config(path, overrides).rollout.engine.settings == {"x": 1}
    for overrides in itertools.permutations(given):
        reward = load_config(path, overrides).reward
        assert (reward.verifier.name, reward.workers) == ("math", 3)


def test_a_path_may_begin_with_the_home_folder_and_with_no_variable() -> None:
    made = [
        RunConfig(dir="~/0").dir,
        ModelConfig(path="~/1").path,
        ModelConfig(path="b", reference_path="~/2").reference_path,
        SGLangConfig(python="~/3").python,
        SGLangConfig(sync_folder="~/4").sync_folder,
        RewardConfig(known_answers="~/5").known_answers,
        DataConfig(path="~/6").path,
        DataConfig(eval_path="~/7").eval_path,
        *DataConfig(decontaminate=["~/8", "~/9"]).decontaminate,
        MixtureFile(path="~/10").path,
        EvalTask(name="a", path="~/11").path,
        PlanConfig(coefficients="~/12").coefficients,
    ]
    assert made == [str(Path.home() / str(n)) for n in range(13)]
    kept = load_config(ROOT / "configs/quickstart.yaml", ["model.path=a/~b", "data.path=hf:a/b"])
    assert (kept.model.path, kept.data.path) == ("a/~b", "hf:a/b")
    for setting in ("run.dir=$SCRATCH/x", "data.path=${HOME}/x", "model.path=$A"):
        with pytest.raises(ConfigError, match="variables are not replaced here"):
            load_config(ROOT / "configs/quickstart.yaml", [setting])


def test_the_resolved_configuration_reads_back_the_same(tmp_path: Path) -> None:
    config = load_config(ROOT / "configs/quickstart.yaml", ["run.seed=5"])
    assert load_config(write(tmp_path, dump_yaml(config))) == config


def test_the_first_error_names_file_and_key(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: here}\nrollout: {temperatur: 1}\n")
    with pytest.raises(
        ConfigError, match=r"config\.yaml: rollout\.temperatur.*\n.*did you mean 'temperature'"
    ):
        load_config(path)


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda f: f.name)
def test_every_shipped_configuration_is_valid(file: Path) -> None:
    load_config(file)


def test_the_page_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools/make_config_docs.py"), "--check"])
    assert done.returncode == 0, "run python tools/make_config_docs.py"
