"""A run logs the plan's own numbers beside what it measures, or says why it cannot be predicted."""

from __future__ import annotations

import gc
import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.runs import ROOT, model, train

from megatron_stare.cli import main
from megatron_stare.commands.status import status_of
from megatron_stare.commands.views import as_text
from megatron_stare.config.load import load_recorded, validate
from megatron_stare.config.resolved import ResolvedRun, resolve_run
from megatron_stare.errors import ConfigError
from megatron_stare.megatron.step.rank_memory import SavedForBackward
from megatron_stare.observability.metrics.planned import planned_and_measured
from megatron_stare.planning.gpus import find_gpu, named
from megatron_stare.planning.own_plan import ModelFlops, own_plan
from megatron_stare.planning.phase_times import all_gpus
from megatron_stare.records.rollout_batch import Branches

TINY = str(ROOT / "assets/tiny-adder")


@pytest.fixture(autouse=True)
def _a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", str(tmp_path))  # no driver's tool, whatever machine this is
    monkeypatch.chdir(tmp_path)


def run_of(**sections: Any) -> ResolvedRun:
    return resolve_run(
        validate({"model": {"path": TINY}, "algorithm": "grpo", **sections}, "this test")
    )


@pytest.mark.wide
@pytest.mark.distributed
def test_a_run_logs_the_plan_of_itself_and_what_it_took(tmp_path: Path) -> None:
    """In micro-batches that are nearly full, as the plan's are, what is kept for backward is nearly
    what was said."""
    inline = ("runtime.runner=inline", "parallel.tensor=1", "eval.prompts=0", model())
    small = {
        "batch.prompts": 8,
        "batch.micro_batch_tokens": 256,
        "plan.response_tokens": 20,
        "run.steps": 7,
    }
    done = train(*inline, f"run.dir={tmp_path / 'run'}", cwd=tmp_path, **small)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert main(["plan", "run/config.yaml", "--gpu", "cpu-core", "--json", "plan.json"]) == 0
    plan = json.loads(Path("plan.json").read_text())
    (stage,) = plan["stages"]
    for row in rows:
        assert row["plan/response_tokens"] == plan["lengths"]["response"] == 20
        # nothing is calibrated
        assert not [name for name in row if name.startswith("plan/") and name.endswith("_s")]
        for phase in ("log_probs", "update"):
            held = {
                item: size for item, size in stage["phases"][phase].items() if item != "processes"
            }
            assert row[f"plan/{phase}_mb"] == pytest.approx(sum(held.values()) / 1e6)
        assert 0.8 < row["memory/update_live_mb"] / row["plan/update_mb"] <= 1
        state = sum(
            stage["phases"]["update"][item] for item in ("parameters", "gradients", "optimizer")
        )
        # nothing is kept any more
        assert row["memory/sync_live_mb"] == pytest.approx(state / 1e6, rel=1e-3)
    assert {each.name for each in planned_and_measured(rows)} == {
        "memory in log_probs",
        "memory in update",
        "response",
    }
    assert "Planned and measured" in (tmp_path / "run/report.html").read_text()
    assert "  planned     memory in " in as_text(status_of(tmp_path / "run"))

    calibrated = ["run/config.yaml", "--gpu", "cpu-core", "--json", "plan.json"]
    assert main(["plan", *calibrated, "--calibrate", "run"]) == 0
    plan = json.loads(Path("plan.json").read_text())
    said = own_plan(resolve_run(load_recorded(tmp_path / "run/config.yaml"))).metrics
    assert said["plan/step_s"] == pytest.approx(plan["step"]["seconds"])
    for phase, seconds in plan["step"]["phases"].items():
        assert said[f"plan/{phase}_s"] == pytest.approx(seconds)
    found = {each.name: each for each in planned_and_measured([{**row, **said} for row in rows])}
    assert found["update"].measured == statistics.median(
        row["time/update_s"] for row in rows[2:] or rows
    )
    for phase in ("rollout", "update", "sync"):
        assert 0.2 < found[phase].planned / found[phase].measured < 5


def test_a_run_on_an_unknown_gpu_is_not_predicted_and_says_why() -> None:
    found = own_plan(run_of(plan={"gpu": "h100"}))
    assert (
        not found.metrics and len(found.notes) == 1 and "did you mean 'h100-80g'?" in found.notes[0]
    )
    # whose GPUs this machine does not know
    found = own_plan(run_of(runtime={"ray_address": "head:6379"}))
    assert not found.metrics and "set plan.gpu" in found.notes[0]
    told = own_plan(run_of(runtime={"ray_address": "head:6379"}, plan={"gpu": "h100-80g"}))
    assert told.metrics["plan/update_mb"] > 0 and not told.notes
    assert own_plan(run_of(plan={"gpu": "h100", "enabled": False})) == type(found)()


def test_a_file_of_coefficients_that_is_none_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "plan_coefficients.json").write_text("[]")
    (note,) = own_plan(run_of()).notes
    assert "not a file of coefficients" in note


def test_seconds_are_those_that_a_calibration_has_fitted(tmp_path: Path) -> None:
    def seconds_of(**coefficients: float) -> dict[str, float]:
        entry = {"cpu-core": {"run": "r", "coefficients": coefficients}}
        (tmp_path / "plan_coefficients.json").write_text(json.dumps(entry))
        found = own_plan(run_of()).metrics
        assert "plan/update_mb" in found
        return {name: value for name, value in found.items() if name.endswith("_s")}

    assert seconds_of() == {} == seconds_of(fixed_s=0, link_efficiency=0.1)
    assert list(seconds_of(update_mfu=0.1)) == ["plan/update_s"]
    # as a run that samples ahead leaves it: its rollout is what training waited for
    rest = {"log_prob_mfu": 0.1, "update_mfu": 0.1, "sync_bytes_s": 1e8, "fixed_s": 0}
    assert set(seconds_of(**rest)) == {"plan/log_probs_s", "plan/update_s", "plan/sync_s"}
    assert "plan/step_s" not in seconds_of(**{**rest, "decode_efficiency": 0.1, "fixed_s": 5.0})
    fitted = seconds_of(**rest, decode_efficiency=0.1)
    phases = sum(fitted[f"plan/{phase}_s"] for phase in ("rollout", "log_probs", "update", "sync"))
    assert fitted["plan/step_s"] == pytest.approx(phases)


def test_every_stage_is_looked_at_and_servers_are_not_the_ranks(tmp_path: Path) -> None:
    """The last of two stages holds the output layer; the cache of colocated servers is no rank's
    tensor."""
    layout = {"model": {"path": str(ROOT / "assets/architectures/qwen2.5-7b"), "dtype": "bfloat16"}}
    servers = {"rollout": {"engine": "sglang"}, "plan": {"gpu": "h100-80g"}}
    small, large = (
        own_plan(run_of(**layout, **servers, sglang={"colocated": True, "memory_fraction": share}))
        for share in (0.4, 0.6)
    )
    assert small.metrics == large.metrics and small.metrics
    whole = own_plan(run_of(**layout, **servers)).metrics["plan/update_mb"]
    halves = own_plan(run_of(**layout, **servers, parallel={"pipeline": 2})).metrics[
        "plan/update_mb"
    ]
    assert halves > 0.5 * whole


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA H200", "h200-141g"),
        ("NVIDIA B200", "b200-180g"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA L40S", None),
    ],
)
def test_kinds_of_gpus_by_the_names_that_drivers_have(name: str, found: str | None) -> None:
    if found:
        assert named(name).name == found
    else:
        with pytest.raises(ConfigError, match=f"the GPU {name} is unknown"):
            named(name)


def test_memory_kept_for_backward_is_counted_once_and_let_go() -> None:
    weight = torch.ones(100, 100, requires_grad=True)
    count = SavedForBackward()
    with count.counting([weight.untyped_storage()]):
        x = torch.ones(50, 100)
        first = x @ weight  # keeps x, and not the weight
        assert count.take_peak() == 4 * 5000
        second = (first * first[:]).sum()  # keeps what both factors look into, once
        assert count.take_peak() == 2 * 4 * 5000
        second.backward()
    del first, second
    assert count.take_peak() == 2 * 4 * 5000 and count.take_peak() == 0


@pytest.mark.parametrize("back", [False, True])
def test_a_graph_is_let_go_whether_or_not_a_gradient_goes_through_it(back: bool) -> None:
    """A node that keeps its own output, as exp does, must not be held by it: CISPO's ratio is a
    factor without gradient, so no backward pass takes its graph apart. Each step would leave one.
    """
    weight = torch.ones(100, requires_grad=True)
    count = SavedForBackward()
    with count.counting([]):
        ratio = (2 * weight).exp()
        loss = ((ratio if back else ratio.detach()) * weight).sum()
    loss.backward()
    assert torch.allclose(weight.grad, torch.e**2 * torch.full((100,), 3.0 if back else 1.0))
    del loss, ratio
    gc.collect()
    assert count.take_peak() > 0 and count.take_peak() == 0


def test_what_a_signal_ends_before_it_is_counted_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    count = SavedForBackward()
    monkeypatch.setattr(count, "add", interrupted)
    weight = torch.ones(3, 3, requires_grad=True)
    with count.counting([]), pytest.raises(KeyboardInterrupt):
        torch.ones(2, 3) @ weight
    gc.collect()
    assert said == []


def test_medians_leave_the_first_steps_out_and_memory_is_the_largest() -> None:
    rows = [
        {
            "plan/step_s": 3.0,
            "plan/update_mb": 7.0,
            "time/step_s": float(n),
            "memory/update_peak_mb": float(m),
        }
        for n, m in ((100, 9), (90, 1), (4, 2), (1, 3), (2, 4))
    ]
    found = {each.name: (each.planned, each.measured) for each in planned_and_measured(rows)}
    assert found == {"step": (3.0, 2.0), "memory in update": (7.0, 9.0)}
    assert planned_and_measured([]) == planned_and_measured([{"time/step_s": 1.0}]) == []


def test_the_rates_of_arithmetic_are_those_of_the_sequences_and_phases() -> None:
    """Operations by hand, from the matrices of the tiny model."""
    run = run_of(plan={"gpu": "h100-80g"})
    shape = run.shape
    heads, width = shape.heads * shape.head_dim, shape.hidden
    layer = width * heads * 2 + 2 * width * shape.kv_heads * shape.head_dim + 3 * width * shape.ffn

    def forward(prompt: int, response: int) -> float:
        length = prompt + response
        attention = shape.layers * 2 * heads * length * length
        return (
            2 * shape.layers * layer * length + attention + 2 * width * shape.vocab_size * response
        )

    lengths = ((3, 5), (3, 9), (7, 2))
    contexts, responses = torch.tensor(lengths).T
    batch = SimpleNamespace(
        branches=Branches(torch.arange(3), contexts, responses, torch.ones(3, dtype=torch.bool))
    )
    measured = {"time/log_probs_s": 0.5, "time/update_s": 1.5, "time/step_s": 8.0}
    found = ModelFlops(run).metrics(batch, measured)
    passes = (0 if run.config.skips_log_prob_pass else 1) + 3 * run.config.batch.epochs
    flops = passes * sum(forward(*each) for each in lengths)
    ranks, peak = run.config.parallel.world_size, find_gpu("h100-80g", "").flops
    assert found["perf/train_tflops"] == pytest.approx(flops / 2.0 / ranks / 1e12)
    assert found["perf/train_mfu"] == pytest.approx(flops / (2.0 * ranks * peak))
    assert found["perf/mfu"] == pytest.approx(flops / (8.0 * all_gpus(run.config) * peak))
    assert ModelFlops(run).metrics(batch, {"time/step_s": 8.0}) == {}  # nothing was trained
    assert set(ModelFlops(run_of()).metrics(batch, measured)) == {"perf/train_tflops"}
