"""A run is read once, and is the same wherever it travels."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
from support.models import save_model
from support.runs import ROOT

from megatron_stare.algorithms.stare import Stare
from megatron_stare.cluster.ray import Actor
from megatron_stare.cluster.trainer_group import plan_rules
from megatron_stare.config.load import load_config
from megatron_stare.config.resolved import resolve_run
from megatron_stare.errors import ConfigError
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.models import read_shape
from megatron_stare.planning.preflight import check

QUICKSTART = ROOT / "configs/quickstart.yaml"


def test_a_run_is_what_its_configuration_names(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "phi3")
    config = load_config(QUICKSTART, [f"model.path={tmp_path / 'model'}", "algorithm.share=0.3"])
    run = resolve_run(config)
    assert run.config == config and run.shape == read_shape(tmp_path / "model")
    assert run.method is config.algorithm.method
    assert isinstance(run.method, Stare) and run.method.share == 0.3


def test_it_is_read_once(tmp_path: Path) -> None:
    """After it was checked nothing that plans or watches a run looks at the model's config.json
    again."""
    save_model(tmp_path, "qwen2")
    sizes = ["rollout.max_prompt_tokens=8", "rollout.max_new_tokens=8"]
    run = check(load_config(QUICKSTART, [f"model.path={tmp_path}", "parallel.tensor=1", *sizes]))
    (tmp_path / "config.json").unlink()
    again = pickle.loads(pickle.dumps(run))
    assert again == run
    assert plan_rules(again).cost(7) == plan_rules(run).cost(7) > 7


def test_a_method_that_a_worker_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "here_alone.py"
    module.write_text(
        "from dataclasses import dataclass\n"
        "from megatron_stare.algorithms.grpo import Grpo\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Mine(Grpo):\n"
        "    strength: float = 1.0\n"
    )
    with monkeypatch.context() as here:
        here.syspath_prepend(tmp_path)
        overrides = ["algorithm=here_alone.Mine", "algorithm.strength=2"]
        run = resolve_run(load_config(QUICKSTART, overrides))
        travelling = pickle.dumps((run, 0, "tcp://nowhere:1"))
        assert pickle.loads(travelling)[0] == run
        del sys.modules["here_alone"]
    with pytest.raises(
        ConfigError, match=r"algorithm\.name: cannot import 'here_alone': there is no module"
    ):
        Actor().build(Trainer, travelling, "rank 0")
