"""scripts/gpu_check.sh: what each check computes, small, on a CPU; and that only figures within
bounds pass."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import re
import runpy
import select
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import sglang_servers as servers
from support.adams import offloading, precision_aware
from support.carried_only import without_the_rest
from support.runs import ROOT

from megatron_stare.config.schema import Config, PerformanceConfig
from megatron_stare.errors import UserError
from megatron_stare.models import read_shape
from megatron_stare.planning.phase_times import body_flops
from megatron_stare.process import versions
from megatron_stare.rollout.engines.model_folder import load_tokenizer, stop_token_ids
from megatron_stare.rollout.engines.sglang.protocol import SUPPORTED_VERSIONS
from megatron_stare.rollout.engines.sglang.replica import server_options

FOLDER = ROOT / "tools" / "gpu_check"
SCRIPT = ROOT / "scripts" / "gpu_check.sh"
QUICK = ("vocabulary", "server_hash", "kth_largest_key", "stage_32b", "trainer", "offload")
SLOW = ("agreement", "export", "te", "settings", "optimizers", "mfu_32b")
ALONE = ("quickstart", "cuda_ipc", "nccl_ranks")  # they start processes of their own
SERVED = ("serve", "server_cycle", "update_group")  # with a real SGLang server


def module(name: str) -> ModuleType:
    """One of the folder's modules, which import each other by name."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


def entry() -> dict[str, Any]:
    """Runs tools/gpu_check/__main__.py without its main: the names that it defines."""
    sys.path.insert(0, str(FOLDER))
    try:
        return runpy.run_path(str(FOLDER / "__main__.py"), run_name="looked at")
    finally:
        sys.path.remove(str(FOLDER))


def test_every_check_is_run_by_a_test() -> None:
    checks = entry()["CHECKS"]
    assert sorted(checks) == sorted(QUICK + SLOW + ALONE + SERVED)
    rows = re.findall(r"^\| `(\w+)` \| ", (ROOT / "docs" / "gpu.md").read_text(), re.MULTILINE)
    assert rows == list(checks)  # in the order in which they are run


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ({"error": 0.5, "share": 0.9}, "pass"),
        ({"error": 1.0, "share": 0.8}, "pass"),  # a bound itself is within it
        ({"error": 1.1, "share": 0.9}, "fail"),
        ({"error": 0.5, "share": 0.7}, "fail"),
        ({"error": math.nan, "share": 0.9}, "fail"),
        ({"share": 0.9}, "fail"),  # a figure that was not taken
    ],
)
def test_verdicts(figures: dict[str, float], verdict: str) -> None:
    bounds = {"error": ("<=", 1.0), "share": (">=", 0.8)}
    said, broken = module("verdict").verdict_of(figures, bounds)
    assert said == verdict
    assert bool(broken) == (verdict == "fail")
    assert module("verdict").verdict_of(figures, {})[0] == "fail"  # nothing was asked


def checked(rank: int, init: str, name: str) -> tuple[dict[str, Any], str, list[str]]:
    """Runs a check on a CPU; returned are its figures, and the verdict."""
    check = module(name)
    found = check.run(True)
    bounds = {each: bound for each, bound in check.BOUNDS.items() if each not in check.GPU_ONLY}
    return (found["figures"], *module("verdict").verdict_of(found["figures"], bounds))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_check_on_a_cpu(writers, name: str) -> None:
    ((figures, verdict, broken),) = writers.run(checked, 1, name)
    assert (verdict, broken) == ("pass", [])
    assert module(name).BOUNDS.keys() - set(module(name).GPU_ONLY) <= figures.keys()


def optimizer_rows(rank: int, init: str) -> list[dict[str, Any]]:
    """Compares both optimizers with a plain one, with stand-ins for what they need, and two results
    that are wrong."""
    check = module("optimizers")
    with module("rig").model_folder(module("rig").Size.of(True)) as folder:
        plain = check.updated(folder, PerformanceConfig())
        with precision_aware():
            first = check.updated(folder, PerformanceConfig(precision_aware_optimizer=True))
        with offloading():
            second = check.updated(folder, PerformanceConfig(optimizer_offload=True))
    wrong = [replace(first, end=[x + 1 for x in first.end]), replace(first, resumed=plain.start)]
    return [check.compared(each, plain) for each in (first, second, *wrong)]


@pytest.mark.slow
@pytest.mark.distributed
def test_the_optimizers_rows_with_stand_ins(writers) -> None:
    (said,) = writers.run(optimizer_rows, 1)
    assert [each["verdict"] for each in said] == ["pass", "pass", "fail", "fail"]


@pytest.mark.parametrize(
    ("nbytes", "plain_nbytes", "verdict"),
    [(80, 100, "pass"), (100, 100, "fail"), (120, 100, "fail"), (0, 0, "pass")],
)
def test_an_optimizer_s_setting_may_be_slow_but_saves_memory(
    nbytes: int, plain_nbytes: int, verdict: str
) -> None:
    check = module("optimizers")
    start, end = [torch.zeros(2)], [torch.ones(2)]
    plain = check.Updated(start, end, end, 1.0, plain_nbytes)
    said = check.compared(replace(plain, seconds=3.0, nbytes=nbytes), plain)
    assert said["verdict"] == verdict and said["time over none"] == 3.0


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="it is there"
)
def test_the_optimizers_need_transformer_engine() -> None:
    lacking = module("verdict").lacking
    assert "transformer_engine.pytorch" in lacking(entry()["CHECKS"]["optimizers"])


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "TORCHDYNAMO_DISABLE": "1",
        **variables,
    }
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ALONE)
def test_a_check_with_processes_of_its_own(tmp_path: Path, name: str) -> None:
    ended = run("--cpu", name, "--out", str(tmp_path), **without_the_rest())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((tmp_path / f"{name}.json").read_text())["small, on a CPU"] is True


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING))
@pytest.mark.parametrize("name", SERVED)
def test_a_check_with_a_server(tmp_path: Path, name: str) -> None:
    ended = run("--cpu", name, "--out", str(tmp_path), SGLANG_PYTHON=servers.PYTHON)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert result["libraries"]["servers"]["sglang"] in SUPPORTED_VERSIONS


NO_GPU = pytest.mark.skipif(module("verdict").lacking(["cuda"]) == [], reason="there is a GPU")


@NO_GPU
def test_the_most_telling_check_comes_first(tmp_path: Path) -> None:
    ended = run("--out", str(tmp_path))
    assert ended.returncode == 3, ended.stderr
    names = [line.partition(":")[0] for line in ended.stdout.splitlines()]
    assert names == list(entry()["CHECKS"])
    assert names[:5] == ["serve", "quickstart", "server_cycle", "trainer", "mfu_32b"]
    assert "update_group: not run: cuda, " in ended.stdout
    assert "a second GPU missing" in ended.stdout


def test_a_check_that_reaches_its_limit_is_too_slow_and_not_repeated(tmp_path: Path) -> None:
    assert entry()["LIMIT_S"] <= 480
    (tmp_path / "trainer.json").write_text(json.dumps({"verdict": "pass"}))
    asked = ("vocabulary", "trainer", "--cpu", "--out", str(tmp_path))
    ended = run(*asked, "--limit", "0")
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.startswith("vocabulary: too slow; it took longer than 0 s")
    assert "trainer: pass, found before" in ended.stdout  # the next one has its turn
    result = json.loads((tmp_path / "vocabulary.json").read_text())
    assert result["check"] == "vocabulary" and result["verdict"] == "too slow"
    ended = run(*asked)
    assert ended.returncode == 1 and "vocabulary: too slow, found before" in ended.stdout
    ended = run("vocabulary", "--cpu", "--out", str(tmp_path), "--again")
    assert ended.returncode == 0 and "vocabulary: pass\n" in ended.stdout


def test_all_processes_of_a_check_end_with_it(tmp_path: Path) -> None:
    """One that is left would hold the pipe open."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        left = f"exec 9>{pipe}; sleep 600 & echo left >&9; exit 3"
        assert entry()["ended"](["sh", "-c", left], 60.0) == 3
        said = b""
        while select.select([reading], [], [], 60.0)[0] and (more := os.read(reading, 100)):
            said += more
        assert said == b"left\n" and select.select([reading], [], [], 0)[0]
    finally:
        os.close(reading)
    assert entry()["ended"](["sleep", "600"], 0.0) is None


def test_an_error_that_the_product_explains_is_a_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A check dies of other errors, and leaves no result."""
    check = ModuleType("explained")
    check.BOUNDS, check.GPU_ONLY = {"tokens": (">=", 1.0)}, ()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "explained", check)
    monkeypatch.setattr(sys, "path", [*sys.path])

    errors: list[Exception] = [
        RuntimeError("not explained"),
        UserError("the server ended with 1", where="http://one"),
    ]

    def fails(cpu: bool) -> None:
        raise errors.pop(0)

    check.run = fails  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError):
        entry()["one"]("explained", tmp_path, cpu=True)
    assert list(tmp_path.iterdir()) == []
    entry()["one"]("explained", tmp_path, cpu=True)
    result = json.loads((tmp_path / "explained.json").read_text())
    assert result["verdict"] == "fail" and "the server ended with 1" in result["broken"][0]


@NO_GPU
def test_what_is_missing_is_not_run_and_what_is_there_is_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "trainer.json").write_text(json.dumps({"verdict": "pass"}))
    ended = run("trainer", "export", "--out", str(tmp_path))
    assert ended.returncode == 3, ended.stderr
    assert "trainer: pass, found before" in ended.stdout
    assert "export: not run: cuda missing" in ended.stdout
    # nothing was written for it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trainer.json"]
    ended = run("trainer", "--again", "--out", str(tmp_path))
    assert ended.returncode == 3 and "trainer: not run: cuda missing" in ended.stdout


# what a check may want that a machine with PyTorch has not, by what is looked for in `CHECKS`
HEAVY = {
    "megatron.core": "megatron",
    "pydantic": "pydantic",
    "transformers": "transformers",
    "triton": "triton",
}


# the others need them all
FEW_NEEDS = [
    ("vocabulary", "server_hash", "cuda_ipc", "kth_largest_key"),
    pytest.param(("stage_32b",), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("names", FEW_NEEDS, ids="-".join)
def test_a_check_names_all_that_it_cannot_be_imported_without(names: tuple[str, ...]) -> None:
    """Modules that are not among a check's needs are taken away. A need that is not named would let
    the check fail where it cannot be run."""
    found = entry()
    needs = {*found["EVERY"], *(need for name in names for need in found["CHECKS"][name])}
    gone = [module for need, module in HEAVY.items() if need not in needs]
    assert "transformers" in gone
    code = (
        f"import sys\nsys.path[:0] = [{str(FOLDER)!r}, {str(ROOT / 'benchmarks')!r}]\n"
        f"sys.modules.update(dict.fromkeys({gone!r}))\nimport machine, {', '.join(names)}\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


SECOND = module("verdict").SECOND_GPU


def test_the_oldest_nccl_that_has_several_ranks_on_a_device_and_a_second_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking = module("verdict").lacking
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))  # PyTorch's build
    for loaded, there in (("2.30.7", True), ("2.9.6", False), ("2.30.1", True), (None, False)):
        monkeypatch.setattr(versions, "loaded_nccl", lambda loaded=loaded: loaded)
        assert (lacking(["nccl 2.30"]) == []) is there, loaded
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert lacking(["cuda", SECOND]) == [SECOND]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert lacking(["cuda", SECOND]) == []


def test_the_nccl_of_a_result_is_the_one_that_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On both sides: this Python stands for the servers', with a library that says 2.30.7."""
    check = module("servers")
    there = (
        "from megatron_stare.process import versions\n"
        "versions.nccl_release = lambda: '2.30.7'\n"
        "import importlib.metadata as metadata\nmetadata.version = lambda name: '0'\n"
    )
    monkeypatch.setattr(check, "_VERSIONS", there + check._VERSIONS)
    monkeypatch.setattr(check, "sglang_python", lambda config: sys.executable)
    monkeypatch.setattr(check, "nccl_release", lambda: "2.30.1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = check.libraries(Config.model_validate({"model": {"path": "none"}}))
    assert [found[side]["nccl"] for side in ("trainer", "servers")] == ["2.30.1", "2.30.7"]
    assert found["servers"]["torch"] == torch.__version__


def test_both_ends_of_the_update_group_have_one_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check, own = module("update_group"), {**os.environ}
    config = Config.model_validate(
        {
            "model": {"path": "none"},
            "rollout": {"engine": "sglang"},
            "runtime": {"env": {"A": "a"}},
            "sglang": {"sync": "distributed", "python": sys.executable},
        }
    )

    class Replica:
        def __init__(self, config: Config, number: int) -> None:
            raise UserError("the server did not start")

    monkeypatch.setattr(os, "environ", own)
    monkeypatch.setattr(check, "small_model", lambda cpu: contextlib.nullcontext("none"))
    monkeypatch.setattr(check, "served", lambda *_, **__: config)
    monkeypatch.setattr(check, "libraries", lambda config: {})
    monkeypatch.setattr(check, "weights_of", lambda model: {})
    monkeypatch.setattr(check, "SGLangReplica", Replica)
    with pytest.raises(UserError):
        check.run(True)
    shared = {"A": "a", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert own.items() >= shared.items()
    assert server_options(config).process_environment().items() >= shared.items()


def test_the_servers_python_is_one_with_sglang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verdict = module("verdict")
    has, not_has = tmp_path / "has", tmp_path / "not"
    for file, status in ((has, 0), (not_has, 1)):
        file.write_text(f"#!/bin/sh\nexit {status}\n")
        file.chmod(0o755)
    monkeypatch.setattr(verdict, "SGLANG", tmp_path / "nowhere")
    monkeypatch.setenv("MEGATRON_STARE_SGLANG_PYTHON", str(not_has))
    monkeypatch.setenv("SGLANG_PYTHON", str(has))
    assert verdict.sglang_python() == str(has) and verdict.lacking(["sglang"]) == []
    monkeypatch.setenv("SGLANG_PYTHON", str(not_has))
    assert verdict.sglang_python() is None and verdict.lacking(["sglang"]) == ["sglang"]
    monkeypatch.setattr(verdict, "SGLANG", has)  # that of the checkout
    assert verdict.sglang_python() == str(has)


ROW = {"loss/policy": 0.5, "optimizer/grad_norm": 1.0}
ROW |= {"agreement/mean": 0.01, "agreement/p99": 0.1, "agreement/p999": 0.5}


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, None),
        ({"loss/policy": math.nan}, "not finite"),
        ({"optimizer/grad_norm": math.inf}, "not finite"),
        ({"optimizer/grad_norm": 0.0}, "without a gradient"),
        ({"agreement/mean": 0.03}, "agreement, mean"),
        ({"agreement/p99": math.nan}, "agreement, p99"),
        ({"agreement/p999": None}, "agreement, p999"),  # not measured
    ],
)
def test_one_step_can_fail_the_quickstart(change: dict[str, Any], broken: str | None) -> None:
    quickstart = module("quickstart")
    odd = {name: value for name, value in (ROW | change).items() if value is not None}
    figures = quickstart.figures_of([ROW, odd, *[ROW] * 18])
    verdict, found = module("verdict").verdict_of(figures, quickstart.BOUNDS)
    assert verdict == ("fail" if broken else "pass")
    assert [broken in each for each in found] == ([True] if broken else [])
    figures = quickstart.figures_of([ROW] * 19)
    assert module("verdict").verdict_of(figures, quickstart.BOUNDS)[0] == "fail"


def test_the_small_model_spells_every_token(tmp_path: Path) -> None:
    small_model = module("small_model")
    shape = json.loads(small_model.SHAPE.read_text()) | {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 40,
    }
    small_model.write_model(tmp_path, shape)
    tokenizer, tiny = load_tokenizer(str(tmp_path)), load_tokenizer(str(small_model.TINY))
    assert tokenizer("12+3=").input_ids == tiny("12+3=").input_ids
    assert len(tokenizer) == 40 and len({tokenizer.decode([token]) for token in range(40)}) == 40
    assert tokenizer.decode([15, 38]) == "<15><38>"
    assert stop_token_ids(str(tmp_path), tokenizer) == (1,)


def test_the_share_of_the_peak_is_that_of_the_planned_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = module("stage_32b")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, flops in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert stage.peak() == flops
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Voodoo")
    with pytest.raises(UserError, match="the GPU Voodoo is unknown"):
        stage.peak()


def test_operations_are_those_of_a_plan() -> None:
    stage = module("stage_32b")
    shape = read_shape(ROOT / "assets/architectures/qwen2.5-32b")
    planned = 3 * sum(body_flops(shape, length, 0) for length in (100, 7))
    assert stage.operations(shape, [100, 7]) == planned
