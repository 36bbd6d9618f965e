"""What is asked of a mixture of experts and cannot be, named before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models import save_model

from megatron_stare.config.moe_rules import REFUSED, check_moe
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.models import read_shape
from megatron_stare.rollout.engines.replicas import check_engine


def config(path: Path, **sections: Any) -> Config:
    return Config.model_validate({"model": {"path": str(path)}, **sections})


@pytest.mark.parametrize(
    ("family", "sections", "where", "message"),
    [
        ("qwen3", {"moe": {"router_dtype": "float64"}}, "moe.router_dtype", "the model has no experts"),
        ("qwen3", {"moe": {"balance": "aux_loss"}}, "moe.balance", "the model has no experts"),
        ("qwen3", {"moe": {"routing_replay": True}}, "moe.routing_replay", "the model has no experts"),
        ("qwen3_moe", {"moe": {"balance": "aux_loss"}}, "moe.balance", "in a micro-batch"),
        ("qwen3_moe", {"moe": {"balance": "seq_aux_loss"}}, "moe.balance", "a row of the micro-batch"),
        ("qwen3_moe", {"moe": {"balance": "global_aux_loss"}}, "moe.balance", "micro-batches so far"),
        ("qwen3_moe", {"moe": {"balance": "expert_bias"}}, "moe.balance", "engines would choose experts without it"),
    ],
)
def test_refused(tmp_path: Path, family: str, sections: dict[str, Any], where: str, message: str) -> None:
    save_model(tmp_path, family)
    with pytest.raises(ConfigError, match=message) as error:
        check_moe(config(tmp_path, **sections), read_shape(tmp_path))
    assert error.value.where == where


def test_every_balance_but_none_has_its_reason(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3_moe")
    for dtype in ("model", "float32", "float64"):
        check_moe(config(tmp_path, moe={"router_dtype": dtype}), read_shape(tmp_path))
    assert len(REFUSED) == 4


def test_an_engine_in_process_names_no_experts(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3_moe")
    asked = config(tmp_path, moe={"routing_replay": True})
    with pytest.raises(ConfigError, match="does not name them") as error:
        check_engine(asked, read_shape(tmp_path))
    assert error.value.where == "moe.routing_replay"
