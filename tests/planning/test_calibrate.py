"""Coefficients that a run was made with are found in what it reports, and kept by GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support.runs import ROOT

from megatron_stare.cli import main
from megatron_stare.config.load import dump_yaml, load_config, validate
from megatron_stare.config.resolved import resolve_run
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.planning.calibrate import calibrate, medians
from megatron_stare.planning.gpus import (
    HOST_LINK,
    Coefficients,
    Fitted,
    find_gpu,
    read_coefficients,
    store,
)
from megatron_stare.planning.memory import PlannedFit
from megatron_stare.planning.phase_times import Lengths, parameters, step_time

GPU = find_gpu("h100-80g")
# both rates of decoding are assumed ones by one factor
TRUE = Coefficients(
    log_prob_mfu=0.3,
    update_mfu=0.25,
    prefill_mfu=0.2,
    decode_efficiency=0.3,
    sync_bytes_s=5e9,
    fixed_s=7.0,
)


def a_run(
    folder: Path,
    steps: int = 9,
    metrics: Mapping[str, float] | None = None,
    rollout: Mapping[str, Any] | None = None,
    true: Coefficients = TRUE,
    model: str = "qwen3-32b",
    sglang: Mapping[str, Any] | None = None,
) -> Path:
    """A run on H100s whose phases took what the model says with these, but for its first two
    steps."""
    sections: dict[str, Any] = {
        "model": {"path": str(ROOT / f"assets/architectures/{model}"), "dtype": "bfloat16"},
        "parallel": {"tensor": 4, "sequence": True, "pipeline": 2, "data": 2},
        "rollout": {
            "engine": "sglang",
            "engines": 4,
            "max_prompt_tokens": 400,
            "max_new_tokens": 4000,
            **(rollout or {}),
        },
        "sglang": {"tensor_parallel": 4, **(sglang or {})},
        "optimizer": {"distributed": True},
        "algorithm": {"name": "grpo", "correction": {}} if rollout else "grpo",
    }
    config = validate(sections, "this test")
    run, fit = resolve_run(config), PlannedFit(GPU.memory)
    fullest = max(fit.stages(run), key=lambda each: sum(each.values()))
    step = step_time(run, GPU, true, Lengths(100, 1500), fullest, fit.served(run))
    took = {f"time/{phase}_s": seconds for phase, seconds in step.phases.items()}
    found = {**took, "time/step_s": step.seconds, "response/length_mean": 1500.0, **(metrics or {})}
    lines = []
    for n in range(steps):  # updates lie evenly about the model's, but for the first two
        factor = 1e6 if n < 2 else 1 + 0.01 * (n - (steps + 1) / 2)
        lines.append(
            json.dumps({"step": n, **found, "time/update_s": found["time/update_s"] * factor})
        )
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump_yaml(config))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_a_runs_coefficients_are_found(tmp_path: Path) -> None:
    found = calibrate([a_run(tmp_path)], GPU, Coefficients(), None)
    assert found.run == str(tmp_path)
    assert asdict(found.coefficients) == pytest.approx(asdict(TRUE))


def test_what_does_not_grow_with_products_is_found_in_runs_of_several_sizes(tmp_path: Path) -> None:
    true = replace(TRUE, log_prob_moves=20.0, update_moves=50.0, decode_layer_s=3e-5)
    folders = [
        a_run(tmp_path / "a", true=true),
        a_run(tmp_path / "b", true=true, model="qwen3-8b-base"),
        a_run(tmp_path / "c", true=true, model="qwen3-1.7b-base", rollout={"staleness": 1}),
    ]
    for pair in (folders[:2], folders):
        found = calibrate(pair, GPU, Coefficients(), None)
        assert found.run == ", ".join(map(str, pair))
        assert asdict(found.coefficients) == pytest.approx(asdict(true))
    alone = calibrate(folders[1:2], GPU, Coefficients(), None).coefficients
    assert (alone.log_prob_moves, alone.update_moves, alone.decode_layer_s) == (0, 0, 0)
    assert alone.update_mfu < true.update_mfu


def test_the_command_takes_several_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    true = replace(TRUE, log_prob_moves=20.0, update_moves=50.0, decode_layer_s=3e-5)
    a_run(tmp_path / "a", true=true)
    a_run(tmp_path / "b", true=true, model="qwen3-8b-base")
    assert main(["plan", "a/config.yaml", "--calibrate", "a", "--calibrate", "b"]) in (0, 1)
    assert "fitted to a, b: " in capsys.readouterr().out
    (known,) = json.loads(Path("plan_coefficients.json").read_text()).values()
    assert known["run"] == "a, b"
    assert known["coefficients"]["update_moves"] == pytest.approx(50.0)


def test_a_wait_for_a_batch_is_no_rollouts_time(tmp_path: Path) -> None:
    folder = a_run(tmp_path, rollout={"staleness": 1}, metrics={"time/rollout_s": 0.5})
    found = calibrate([folder], GPU, Coefficients(), None).coefficients
    assert found.decode_efficiency == Coefficients().decode_efficiency
    assert found.update_mfu == pytest.approx(TRUE.update_mfu)


def test_a_wait_for_a_batch_is_no_fixed_time(tmp_path: Path) -> None:
    took = medians(a_run(tmp_path, rollout={"staleness": 1}))
    training = sum(took[f"time/{phase}_s"] for phase in ("log_probs", "update", "sync"))
    waited = {"time/rollout_s": 100.0, "time/step_s": 100.0 + training + TRUE.fixed_s}
    folder = a_run(tmp_path, rollout={"staleness": 1}, metrics=waited)
    found = calibrate([folder], GPU, Coefficients(), None).coefficients
    assert found.fixed_s == pytest.approx(7.0)


def test_a_shared_device_s_sync_is_fitted_without_the_way_back(tmp_path: Path) -> None:
    """Weights at 10 GB/s, and the way out of all but the gradients; the way back is no part of a
    sync, but of the passes that need it."""
    shared = {"colocated": True, "memory_fraction": 0.6}
    run = resolve_run(load_config(str(a_run(tmp_path, sglang=shared) / "config.yaml")))
    fullest = max(PlannedFit(GPU.memory).stages(run), key=lambda each: sum(each.values()))
    out = sum(fullest.values()) - fullest["gradients"]
    took = {"time/sync_s": 2 * parameters(run.shape) / 10e9 + out / HOST_LINK}
    found = calibrate([a_run(tmp_path, metrics=took, sglang=shared)], GPU, Coefficients(), None)
    assert found.coefficients.sync_bytes_s == pytest.approx(10e9)
    assert found.coefficients.update_mfu == pytest.approx(TRUE.update_mfu)


def test_what_cannot_be_fitted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="4 steps after the first 2"):
        calibrate([a_run(tmp_path, steps=6)], GPU, Coefficients(), None)
    with pytest.raises(DataError, match="cannot be read"):
        calibrate([tmp_path / "none"], GPU, Coefficients(), None)
    with pytest.raises(ConfigError, match="the links of this GPU's node alone would need"):
        calibrate([a_run(tmp_path, metrics={"time/log_probs_s": 1e-9})], GPU, Coefficients(), None)
    slow = replace(GPU, flops=GPU.flops / 10)
    with pytest.raises(ConfigError, match="more than this GPU can do"):
        calibrate([a_run(tmp_path)], slow, Coefficients(), None)


def test_coefficients_are_kept_by_gpu(tmp_path: Path) -> None:
    path = tmp_path / "coefficients.json"
    assert read_coefficients(path, "h100-80g") == Fitted(Coefficients())
    store(path, "h100-80g", Fitted(TRUE, "runs/a"))
    store(path, "a100-80g", Fitted(replace(TRUE, fixed_s=1.0), "runs/b"))
    assert read_coefficients(path, "h100-80g") == Fitted(TRUE, "runs/a")
    assert read_coefficients(path, "a100-80g").coefficients.fixed_s == 1.0
    assert read_coefficients(path, "b200-180g") == Fitted(Coefficients())
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    for wrong in (
        "[]",
        "{",
        '{"h100-80g": {"coefficients": {"speed": 1}}}',
        '{"h100-80g": {"coefficients": {}}}',
    ):
        path.write_text(wrong)
        with pytest.raises(DataError, match="not a file of coefficients"):
            read_coefficients(path, "h100-80g")
