"""`performance`: what is asked for reaches Megatron, what cannot be is refused, and null is on only
on a GPU, where tests cover the setting."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from support.models import save_model
from support.runs import ROOT

from megatron_stare.cli import main
from megatron_stare.config import performance
from megatron_stare.config.load import load_config
from megatron_stare.config.performance import (
    FEATURES,
    NOT_OFFERED,
    check_performance,
    chosen,
    environment,
    megatron_fields,
    missing,
    reasons,
)
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import PerformanceConfig
from megatron_stare.errors import ConfigError
from megatron_stare.megatron.step import passes
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.models import read_shape
from megatron_stare.models.shape import ModelShape
from megatron_stare.planning.preflight import check

QUICKSTART = str(ROOT / "configs/quickstart.yaml")
MODEL = f"model.path={ROOT / 'assets/tiny-adder'}"
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
PARTS: dict[Any, Any] = {
    "model": TransformerConfig,
    "gradients": DistributedDataParallelConfig,
    "optimizer": OptimizerConfig,
}
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_every_row_has_a_setting_and_megatron_has_its_fields() -> None:
    switches = {
        name
        for name, info in PerformanceConfig.model_fields.items()
        if info.annotation == (bool | None)
    }
    assert switches == {feature.name for feature in FEATURES} | NOT_OFFERED.keys()
    for feature in FEATURES:
        assert all(value for fields in feature.sets.values() for value in fields.values())
        for part, fields in feature.sets.items():
            assert fields.keys() <= PARTS[part].__dataclass_fields__.keys(), feature.name


def test_a_row_is_proven_by_a_committed_result_alone() -> None:
    for feature in FEATURES:
        if feature.proven:
            result = json.loads((RESULTS / f"{feature.check}.json").read_text())
            assert result["machine"]["gpu"] and result["verdict"] == "pass"
            assert result["settings"][feature.name]["verdict"] == "pass"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_setting_turns_on_its_fields_and_no_others(feature: performance.Feature) -> None:
    on = PerformanceConfig(**{feature.name: True})
    for part in PARTS:
        before, after = megatron_fields(PerformanceConfig(), part), megatron_fields(on, part)
        assert not any(before.values())
        assert {name: value for name, value in after.items() if value} == dict(
            feature.sets.get(part, {})
        )
        assert before.keys() == after.keys()


GPU = frozenset(performance.NEEDS)  # a device that has everything
NAMES = {feature.name for feature in FEATURES}
GAINS = {
    "rope_fusion",
    "swiglu_fusion",
    "bias_fusion",
    "wgrad_fusion",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "batched_p2p",
}


def on(*overrides: str, has: Collection[str] = GPU, shape: ModelShape | None = None) -> set[str]:
    """Names of the settings that are on, each of which was null unless it is overridden."""
    config = load_config(QUICKSTART, [MODEL, "optimizer.distributed=true", *overrides])
    settings = chosen(config, shape, has)
    found = {feature.name for feature in FEATURES if getattr(settings, feature.name)}
    left = [each for each in FEATURES if getattr(settings, each.name) is None]
    assert not left and reasons(config, shape, has).keys() == NAMES - found
    return found


def test_on_a_gpu_null_is_on_if_tests_cover_it() -> None:
    assert on() == GAINS
    assert on(has=()) == set()
    assert on("performance.automatic=false") == set()
    assert on("performance.automatic=false", "performance.bias_fusion=true") == {"bias_fusion"}
    assert on("performance.swiglu_fusion=false") == GAINS - {"swiglu_fusion"}
    assert on(has={"cuda"}) == GAINS - {"rope_fusion", "wgrad_fusion"}
    assert on(has={"cuda", "wgrad"}) == GAINS - {"rope_fusion"}
    assert on("optimizer.distributed=false") == GAINS - {"overlap_param_gather"}
    without_overlap = GAINS - {"overlap_param_gather", "overlap_grad_reduce"}
    assert on("performance.overlap_grad_reduce=false") == without_overlap
    two = ("parallel.pipeline=2", "parallel.virtual_pipeline=2")
    assert on(*two) == GAINS - {"batched_p2p"}
    assert on("parallel.pipeline=4", "parallel.virtual_pipeline=2") == GAINS
    assert on("parallel.pipeline=2") == GAINS


def test_a_proven_setting_is_on_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    proven = tuple(replace(each, proven=each.name == "bias_fusion") for each in FEATURES)
    monkeypatch.setattr(performance, "FEATURES", proven)
    assert on(has=()) == {"bias_fusion"}


def test_latent_attention_has_no_fused_rotary_embedding(tmp_path: Path) -> None:
    save_model(tmp_path / "latent", "deepseek_v3")
    assert on(shape=read_shape(str(tmp_path / "latent"))) == GAINS - {"rope_fusion"}


def test_tests_that_cover_a_setting_are_there() -> None:
    ours = re.compile(r"(tests/megatron/\S+\.py)::(\w+)")
    for feature in FEATURES:
        assert (feature.name in GAINS) == bool(feature.covered), feature.name
        for file, name in ours.findall(feature.covered):
            assert f"def {name}(" in (ROOT / file).read_text()


def test_a_rank_builds_its_model_with_what_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performance, "device_has", lambda: {"cuda"})
    config = load_config(QUICKSTART, [MODEL, "model.dtype=float32", "parallel.tensor=1"])
    asked = []

    def build(*arguments: Any) -> None:
        asked.append(arguments)
        raise InterruptedError

    monkeypatch.setattr("megatron_stare.megatron.trainer.build_policy", build)
    monkeypatch.setattr("megatron_stare.megatron.trainer.join", lambda *_: None)
    with pytest.raises(InterruptedError):
        Trainer(resolve_run(config), 0, f"file://{tmp_path}/ranks")
    ((*_, settings, _),) = asked
    assert settings.swiglu_fusion is True and settings.rope_fusion is False


def test_transformer_engine_alone_is_not_enough_for_the_fused_weight_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron's output layer, which is not Transformer Engine's, asks for Apex's module when it is
    built. Its message is why."""
    extension = "fused_weight_gradient_mlp_cuda"
    installed = {"transformer_engine"}
    monkeypatch.setattr(performance, "_installed", lambda name: name in installed)
    _, met = performance.NEEDS["wgrad"]
    assert not met()
    installed.add(extension)
    assert met()

    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        gradient_accumulation_fusion=True,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    with pytest.raises(RuntimeError, match=extension):
        layers.ColumnParallelLinear(8, 8, config=config, init_method=lambda _: None, tp_group=alone)


def test_the_reference_computes_with_the_policys_fusions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise policy and reference round differently at equal weights; and without gradients
    there is no buffer to add a weight's to."""
    config = load_config(QUICKSTART, [MODEL])
    settings = config.performance.model_copy(update={"rope_fusion": True, "wgrad_fusion": True})
    asked: list[PerformanceConfig] = []

    def build(*args: Any) -> None:
        asked.append(args[4])
        raise InterruptedError

    monkeypatch.setattr(passes, "build_model", build)
    shape = read_shape(ROOT / "assets/tiny-adder")
    with pytest.raises(InterruptedError):
        passes.Reference(config.model_copy(update={"performance": settings}), shape, Any)
    assert asked == [settings.model_copy(update={"wgrad_fusion": False})]


REFUSED = [
    ("rope_fusion=true", "performance.rope_fusion: this setting needs CUDA and Transformer Engine"),
    (
        "wgrad_fusion=true",
        "performance.wgrad_fusion: this setting needs CUDA and Apex",
    ),
    ("batched_p2p=true", "performance.batched_p2p: this setting needs CUDA"),
    ("cuda_connections=1", "performance.cuda_connections: this setting needs CUDA"),
    (
        "cuda_allocator=expandable_segments:True",
        "performance.cuda_allocator: this setting needs CUDA",
    ),
    ("gradient_bucket=1000", "performance.gradient_bucket: a bucket size has an effect only"),
    (
        "overlap_param_gather=true",
        "performance.overlap_param_gather: this setting needs optimizer.distributed",
    ),
    (
        "precision_aware_optimizer=true",
        "performance.precision_aware_optimizer: this setting needs optimizer.distributed",
    ),
]


@without_gpu
@pytest.mark.parametrize(("override", "message"), REFUSED)
def test_what_cannot_be_is_refused_by_name(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    override: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", QUICKSTART, MODEL, f"performance.{override}", "--dry-run"]) == 2
    assert f"error: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [
                "rollout.engine=sglang",
                "sglang.colocated=true",
                "performance.cuda_allocator=expandable_segments:True",
            ],
            "expandable segments cannot be shared",
        ),
        (
            ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "performance.batched_p2p=true"],
            "two stages with several chunks",
        ),
        (
            ["optimizer.distributed=true", "performance.overlap_param_gather=true"],
            "needs performance.overlap_grad_",
        ),
        (
            ["parallel.sequence=true", "performance.tp_comm_overlap=true"],
            "tp_comm_overlap: this setting is not offered",
        ),
        (
            [
                "optimizer.distributed=true",
                "model.dtype=float32",
                "performance.optimizer_offload=true",
            ],
            "only master weights of 16-bit parameters",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_on_any_device(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_performance(load_config(QUICKSTART, [MODEL, *overrides]))
    check_performance(load_config(QUICKSTART, [MODEL, *overrides[:-1]]))


def test_a_fused_rotary_embedding_is_refused_for_latent_attention(tmp_path: Path) -> None:
    save_model(tmp_path / "latent", "deepseek_v3")
    save_model(tmp_path / "plain", "llama")
    latent, plain = (read_shape(str(tmp_path / name)) for name in ("latent", "plain"))
    fused = load_config(QUICKSTART, [MODEL, "performance.rope_fusion=true"])
    with pytest.raises(ConfigError, match="latent attention, whose rotary embedding is not fused"):
        check_performance(fused, latent)
    check_performance(fused, plain)
    check_performance(load_config(QUICKSTART, [MODEL]), latent)


@without_gpu
def test_of_a_cluster_elsewhere_the_rank_says_what_it_lacks(tmp_path: Path) -> None:
    elsewhere = ["runtime.runner=ray", "runtime.ray_address=far:6379"]
    config = check(load_config(QUICKSTART, [MODEL, *elsewhere, "performance.batched_p2p=true"]))
    with pytest.raises(ConfigError, match="this setting needs CUDA"):
        Trainer(config, 0, f"file://{tmp_path}/ranks")
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("overrides", "queues"),
    [
        (("parallel.tensor=1",), None),
        (("parallel.tensor=1", "parallel.pipeline=2"), None),
        (("parallel.tensor=2",), "1"),
        (("parallel.tensor=1", "parallel.context=2"), "1"),
        (("parallel.tensor=2", "performance.cuda_connections=8"), "8"),
        (("parallel.tensor=1", "performance.cuda_connections=8"), "8"),
    ],
)
def test_environment_of_trainer_ranks(overrides: tuple[str, ...], queues: str | None) -> None:
    """Ranks that exchange activations inside a layer have one hardware queue. Products of float32
    are not rounded to TF32."""
    expected = {} if queues is None else {"CUDA_DEVICE_MAX_CONNECTIONS": queues}
    in_16_bits = load_config(QUICKSTART, [*overrides, "model.dtype=bfloat16"])
    assert environment(in_16_bits) == expected
    expected = expected | {"NVIDIA_TF32_OVERRIDE": "0"}
    assert environment(load_config(QUICKSTART, [*overrides])) == expected
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    given = [*overrides, f"performance.cuda_allocator={allocator['PYTORCH_CUDA_ALLOC_CONF']}"]
    assert environment(load_config(QUICKSTART, given)) == expected | allocator


def test_a_dry_run_says_what_turns_each_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", QUICKSTART, MODEL, "performance.bias_fusion=true", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["performance"]["bias_fusion"] is True  # remarks are comments
    for feature in FEATURES:
        told = f"# off on this machine: performance.{feature.name}, "
        assert (told in text) == (feature.name != "bias_fusion")
        # without what it needs, `true` is refused
        turns_on = f"performance.{feature.name}=true asks for it"
        assert (turns_on in text) == (feature.name != "bias_fusion" and not missing(feature))
    assert "# activations: a rank keeps about" in text
    assert "# not offered: performance.tp_comm_overlap: Transformer Engine's user buffers" in text


def test_the_page_names_every_setting_and_what_proves_it() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    for feature in FEATURES:
        assert f"| `performance.{feature.name}=true` |" in page
        assert f"`{feature.check}`" in page
    for name in NOT_OFFERED:
        assert f"`performance.{name}`" in page
