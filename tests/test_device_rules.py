"""What a device cannot train is refused: where it is known by preflight, else by the rank that finds it."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.models import save_model
from support.runs import ROOT

from megatron_stare.cli import main
from megatron_stare.config.device_rules import check_device
from megatron_stare.config.load import load_config
from megatron_stare.config.resolved import resolve_run
from megatron_stare.errors import ConfigError
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.models import read_shape
from megatron_stare.planning.preflight import check

QUICKSTART = str(ROOT / "configs/quickstart.yaml")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

CUDA_CANNOT = [
    (
        "qwen3_moe",
        "optimizer.distributed=false",
        "model.path: on CUDA mixture-of-experts models need Transformer Engine",
    ),
    ("qwen2", "parallel.context=2", "parallel.context: on CUDA context parallelism needs Transformer Engine's"),
]


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
    assert main(["train", QUICKSTART, f"model.path={tmp_path}", "parallel.tensor=1", override, "--dry-run"]) == 2
    assert f"error: {message}" in capsys.readouterr().err
    # of a cluster to be joined nothing is known here: the rank that finds CUDA says so, before it meets the others
    elsewhere = ("runtime.runner=ray", "runtime.ray_address=far:6379")
    joining = load_config(QUICKSTART, [f"model.path={tmp_path}", "parallel.tensor=1", override, *elsewhere])
    check(joining)
    with pytest.raises(ConfigError, match=message.partition(": ")[2]):
        Trainer(resolve_run(joining), 0, f"file://{tmp_path}/ranks")
    assert not torch.distributed.is_initialized()


def test_the_distributed_optimizer_trains_on_cuda_whatever_adam_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(QUICKSTART, ["optimizer.distributed=true"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_device(config, experts=False)


@pytest.mark.parametrize("name", ["transformer_engine", "apex"])
def test_experts_run_on_cuda_with_transformer_engine_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config = load_config(QUICKSTART, ["optimizer.distributed=true"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: found("torch" if asked == name else asked))
    refused = pytest.raises(ConfigError, match="need Transformer Engine") if name == "apex" else nullcontext()
    with refused:
        check_device(config, experts=True)


def test_a_rank_without_cuda_says_what_it_cannot(tmp_path: Path) -> None:
    elsewhere = ("runtime.runner=ray", "runtime.ray_address=far:6379")
    config = load_config(
        QUICKSTART, [f"model.path={ROOT / 'assets/tiny-adder'}", *elsewhere, "performance.batched_p2p=true"]
    )
    with pytest.raises(ConfigError, match="CUDA"):
        Trainer(resolve_run(config), 0, f"file://{tmp_path}/ranks")
    assert not torch.distributed.is_initialized()
