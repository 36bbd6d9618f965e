"""scripts/gpu_check.sh: what each check computes, small, on a CPU; and that only figures within
bounds pass."""

from __future__ import annotations

import importlib
import json
import math
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.adams import offloading, precision_aware
from support.runs import ROOT

from megatron_stare.config.schema import PerformanceConfig

FOLDER = ROOT / "tools" / "gpu_check"
SCRIPT = ROOT / "scripts" / "gpu_check.sh"
QUICK = ("vocabulary", "server_hash", "kth_largest_key", "stage_32b", "trainer", "offload")
SLOW = ("agreement", "export", "te", "settings", "optimizers")
ALONE = ("cuda_ipc", "nccl_ranks")  # they start processes of their own


def module(name: str) -> ModuleType:
    """One of the folder's modules, which import each other by name."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


def test_every_check_is_run_by_a_test() -> None:
    sys.path.insert(0, str(FOLDER))
    try:
        checks = runpy.run_path(str(FOLDER / "__main__.py"), run_name="looked at")["CHECKS"]
    finally:
        sys.path.remove(str(FOLDER))
    assert sorted(checks) == sorted(QUICK + SLOW + ALONE)
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert all(f"| `{name}` |" in page for name in checks)


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
    return [check.compared(each, plain, timed=False) for each in (first, second, *wrong)]


@pytest.mark.slow
@pytest.mark.distributed
def test_the_optimizers_rows_with_stand_ins(writers) -> None:
    (said,) = writers.run(optimizer_rows, 1)
    assert [each["verdict"] for each in said] == ["pass", "pass", "fail", "fail"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "TORCHDYNAMO_DISABLE": "1",
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
    ended = run("--cpu", name, "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((tmp_path / f"{name}.json").read_text())["small, on a CPU"] is True


@pytest.mark.skipif(module("verdict").lacking(["cuda"]) == [], reason="there is a GPU")
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


def test_the_wheels_to_carry_are_those_of_this_project() -> None:
    listed = run("--wheels").stdout.splitlines()
    pinned = [
        line.partition(";")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()
    ]
    # for Python 3.12
    assert {"megatron-core==0.19.2", "typing_extensions==4.16.0"} < set(listed) <= set(pinned)


# modules that come with neither PyTorch nor transformers, and are not carried
NOT_THERE = ("ray", "rich", "tensorboard", "aiohttp", "orjson", "math_verify", "pytest", "absl")


def test_checks_need_no_more_than_what_is_carried() -> None:
    code = (
        f"import sys\nsys.path[:0] = [{str(FOLDER)!r}, {str(ROOT / 'benchmarks')!r}]\n"
        # importing them fails as if they were not installed
        f"sys.modules.update(dict.fromkeys({NOT_THERE!r}))\n"
        f"import machine\nfor name in {(*QUICK, *SLOW, *ALONE)!r}: __import__(name)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


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
    sys.path.insert(0, str(FOLDER))
    try:
        entry = runpy.run_path(str(FOLDER / "__main__.py"), run_name="looked at")
    finally:
        sys.path.remove(str(FOLDER))
    needs = {*entry["EVERY"], *(need for name in names for need in entry["CHECKS"][name])}
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


def test_the_oldest_nccl_that_has_several_ranks_on_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking = module("verdict").lacking
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    assert lacking(["nccl 2.30"]) == ["nccl 2.30"]
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 1))
    assert lacking(["nccl 2.30"]) == []
