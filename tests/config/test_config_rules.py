"""Untrainable configurations are refused by name: experts before anything starts, devices where
they are known."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import save_model
from support.runs import ROOT

from megatron_stare.cli import main
from megatron_stare.config.load import load_config
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.rules import REFUSED, check_device, check_moe
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.models import read_shape
from megatron_stare.planning.preflight import check
from megatron_stare.rollout.engines.replicas import check_engine

QUICKSTART = str(ROOT / "configs/quickstart.yaml")
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

CUDA_CANNOT = [
    (
        "qwen3_moe",
        "optimizer.distributed=false",
        "model.path: on CUDA mixture-of-experts models need Transformer Engine",
    ),
    (
        "qwen2",
        "parallel.context=2",
        "parallel.context: on CUDA context parallelism needs Transformer Engine's",
    ),
]


def config(path: Path, **sections: Any) -> Config:
    return Config.model_validate({"model": {"path": str(path)}, **sections})


@pytest.mark.parametrize(
    ("family", "sections", "where", "message"),
    [
        (
            "qwen3",
            {"moe": {"router_dtype": "float64"}},
            "moe.router_dtype",
            "the model has no experts",
        ),
        ("qwen3", {"moe": {"balance": "aux_loss"}}, "moe.balance", "the model has no experts"),
        (
            "qwen3",
            {"moe": {"routing_replay": True}},
            "moe.routing_replay",
            "the model has no experts",
        ),
        ("qwen3_moe", {"moe": {"balance": "aux_loss"}}, "moe.balance", "in a micro-batch"),
        (
            "qwen3_moe",
            {"moe": {"balance": "seq_aux_loss"}},
            "moe.balance",
            "a row of the micro-batch",
        ),
        (
            "qwen3_moe",
            {"moe": {"balance": "global_aux_loss"}},
            "moe.balance",
            "micro-batches so far",
        ),
        ("qwen3_moe", {"moe": {"balance": "expert_bias"}}, "moe.balance", "stays as it was loaded"),
    ],
)
def test_refused(
    tmp_path: Path, family: str, sections: dict[str, Any], where: str, message: str
) -> None:
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


@on_a_cpu
@pytest.mark.parametrize(("family", "override", "message"), CUDA_CANNOT)
def test_what_is_wrong_on_cuda_is_refused_there_alone(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    family: str,
    override: str,
    message: str,
) -> None:
    save_model(tmp_path, family)
    config = load_config(QUICKSTART, [f"model.path={tmp_path}", "parallel.tensor=1", override])
    assert not torch.cuda.is_available()
    check_device(config, experts=read_shape(str(tmp_path)).experts > 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    capsys.readouterr()
    assert (
        main(
            [
                "train",
                QUICKSTART,
                f"model.path={tmp_path}",
                "parallel.tensor=1",
                override,
                "--dry-run",
            ]
        )
        == 2
    )
    assert f"error: {message}" in capsys.readouterr().err
    # of a cluster to be joined nothing is known here: the rank that finds CUDA says so, before it
    # meets the others
    elsewhere = ("runtime.runner=ray", "runtime.ray_address=far:6379")
    joining = load_config(
        QUICKSTART, [f"model.path={tmp_path}", "parallel.tensor=1", override, *elsewhere]
    )
    check(joining)
    with pytest.raises(ConfigError, match=message.partition(": ")[2]):
        Trainer(resolve_run(joining), 0, f"file://{tmp_path}/ranks")
    assert not torch.distributed.is_initialized()


@on_a_cpu
def test_the_distributed_optimizer_trains_on_cuda_whatever_adam_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_config(QUICKSTART, ["optimizer.distributed=true"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_device(config, experts=False)


@on_a_cpu
def test_context_ranks_of_cuda_attend_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # all is installed
    layout = ["parallel.tensor=1", "parallel.context=2", "optimizer.distributed=true"]
    check_device(load_config(QUICKSTART, [*layout, "model.dtype=bfloat16"]), experts=False)
    with pytest.raises(ConfigError, match="takes 16 bits only"):
        check_device(load_config(QUICKSTART, layout), experts=False)


@on_a_cpu
@pytest.mark.parametrize("name", ["transformer_engine", "apex"])
def test_experts_run_on_cuda_with_transformer_engine_alone(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = load_config(QUICKSTART, ["optimizer.distributed=true"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda asked: found("torch" if asked == name else asked)
    )
    refused = (
        pytest.raises(ConfigError, match="need Transformer Engine")
        if name == "apex"
        else nullcontext()
    )
    with refused:
        check_device(config, experts=True)


@on_a_cpu
def test_a_rank_without_cuda_says_what_it_cannot(tmp_path: Path) -> None:
    elsewhere = ("runtime.runner=ray", "runtime.ray_address=far:6379")
    config = load_config(
        QUICKSTART,
        [f"model.path={ROOT / 'assets/tiny-adder'}", *elsewhere, "performance.batched_p2p=true"],
    )
    with pytest.raises(ConfigError, match="CUDA"):
        Trainer(resolve_run(config), 0, f"file://{tmp_path}/ranks")
    assert not torch.distributed.is_initialized()
