"""Configuration files, overrides and the page about them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT

from megatron_stare.config.load import dump_yaml, load_config
from megatron_stare.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_overrides_win_and_keep_their_types(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: here}\noptimizer: {lr: 1.0e-3}\n")
    config = load_config(path, ["optimizer.lr=1e-6", "run.seed=3", "optimizer.distributed=true", "run.dir=a=b"])
    assert config.optimizer.lr == 1e-6
    assert (config.run.seed, config.optimizer.distributed, config.run.dir) == (3, True, "a=b")


def test_naming_another_method_drops_the_settings_of_the_first(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: here}\nalgorithm: {name: stare, amplify: 2}\n")
    assert load_config(path).algorithm == {"name": "stare", "amplify": 2}
    assert load_config(path, ["algorithm=grpo"]).algorithm == {"name": "grpo"}
    assert load_config(path, ["algorithm.amplify=3"]).algorithm == {"name": "stare", "amplify": 3}
    short = write(tmp_path, "model: {path: here}\nalgorithm: stare\n")
    assert load_config(short, ["algorithm.share=0.2"]).algorithm == {"name": "stare", "share": 0.2}


def test_the_resolved_configuration_reads_back_the_same(tmp_path: Path) -> None:
    config = load_config(ROOT / "configs/quickstart.yaml", ["run.seed=5"])
    assert load_config(write(tmp_path, dump_yaml(config))) == config


def test_the_first_error_names_file_and_key(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: here}\nrollout: {temperatur: 1}\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: rollout\.temperatur.*\n.*did you mean 'temperature'"):
        load_config(path)


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda f: f.name)
def test_every_shipped_configuration_is_valid(file: Path) -> None:
    load_config(file)


def test_the_page_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools/make_config_docs.py"), "--check"])
    assert done.returncode == 0, "run python tools/make_config_docs.py"
