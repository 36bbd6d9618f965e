"""Whole runs in layouts whose trainers and engine hold the model in quite different shapes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.models import FAMILIES
from support.runs import ROOT, metrics, train
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.distributed
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
VOCABULARY = 16


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("qwen3_moe", {"data": 2, "expert": 2}, id="ep2"),
        pytest.param(
            "qwen2_tied",
            {"pipeline": 2, "virtual_pipeline": 2},
            marks=pytest.mark.slow,
            id="pp2-vpp2",
        ),
        pytest.param("qwen2_tied", {"context": 2}, marks=pytest.mark.slow, id="cp2"),
        *(
            pytest.param(family, {"tensor": 2, "sequence": True}, marks=pytest.mark.slow, id=family)
            for family in FAMILIES
        ),
    ],
)
def test_a_run_trains_what_its_engine_samples(
    tmp_path: Path, family: str, layout: dict[str, Any]
) -> None:
    config = FAMILIES[family]()
    config.vocab_size = VOCABULARY  # that of the shipped tokenizer
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    for name in TOKENIZER:
        shutil.copy(ROOT / "assets/tiny-adder" / name, base)
    settings = {f"parallel.{key}": value for key, value in {"tensor": 1, **layout}.items()}
    arguments = [f"model.path={base}", f"run.dir={tmp_path / 'run'}"]
    # the model answers nothing right, so that only the bonus moves it
    bonus = {
        "algorithm.entropy_bonus": "{coef: 0.01}",
        "optimizer.warmup_steps": 0,
        "eval.prompts": 0,
    }
    done = train(*arguments, cwd=tmp_path, **settings, **bonus)
    assert done.returncode == 0, done.stderr
    for row in metrics(tmp_path / "run"):
        assert row["optimizer/grad_norm"] > 0
        assert row["ratio/max_abs_log"] == 0.0
        # every weight arrived where it belongs, after each step
        assert row["rollout/logprob_diff_max"] < 1e-4
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf")
    assert exported.config.model_type == config.model_type
