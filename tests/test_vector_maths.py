"""MKL's kernels are settled before anything else computes, in every kind of process; support/probe
notes what did."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import sglang_servers as servers
from support.runs import ROOT, environment, model, train

from megatron_stare.process.vector_maths import FUNCTIONS

PACKAGES = ("algorithms", "megatron", "ops", "rollout", "select")
PROBE = str(ROOT / "tests/support/probe")


def probed(folder: Path, inherited: dict[str, str]) -> dict[str, str]:
    """An environment in which every Python process reports to the folder."""
    return {
        **inherited,
        "FIRST_MATHS": str(folder),
        "PYTHONPATH": f"{PROBE}:{inherited.get('PYTHONPATH', '')}",
    }


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in folder.glob("*.json")]


def kinds(found: list[dict[str, Any]], *files: str) -> list[str]:
    """Picks the files in which a process computed; settle() must have been the first to compute in
    every process."""
    for report in found:
        assert "settle" in report["functions"] and report["elements"] == 1, report
    return [
        name
        for name in files
        if any(path.endswith(name) for report in found for path in report["files"])
    ]


def test_every_function_that_torch_hands_to_mkl_is_called() -> None:
    header = Path(torch.__file__).parent / "include/ATen/cpu/vml.h"
    assert set(FUNCTIONS) == set(
        re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", header.read_text(), re.MULTILINE)
    )


@pytest.mark.wide
@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_that_computes_settles_first(package: str, tmp_path: Path) -> None:
    script = (
        f"import megatron_stare.{package}, torch; torch.set_num_threads(2);"
        " torch.rand(100_000).cos()"
    )
    subprocess.run([sys.executable, "-c", script], env=probed(tmp_path, environment()), check=True)
    assert kinds(reports(tmp_path), "<string>") == ["<string>"]


@pytest.mark.wide
@pytest.mark.distributed
def test_a_run_settles_first_in_driver_trainer_and_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has two threads, as in the quickstart."""
    for name, value in probed(tmp_path, dict(os.environ)).items():
        monkeypatch.setenv(name, value)
    settings = {"run.steps": 1, "eval.prompts": 0, "rollout.threads": 2}
    done = train(model(), f"run.dir={tmp_path / 'run'}", cwd=tmp_path, **settings)
    assert done.returncode == 0, done.stderr
    found = reports(tmp_path)
    assert kinds(found, "megatron/trainer.py", "rollout/engines/local.py") == [
        "megatron/trainer.py",
        "rollout/engines/local.py",
    ]
    assert len(found) >= 3  # two ranks and an engine


@pytest.mark.wide
@pytest.mark.distributed
def test_a_tool_settles_first_in_itself_and_its_ranks(tmp_path: Path) -> None:
    """Ranks are forked from a process that has settled, and inherit it."""
    command = [
        sys.executable,
        str(ROOT / "tools/check_invariance.py"),
        "--tp",
        "2",
        "--algorithm",
        "grpo",
    ]
    subprocess.run(command, env=probed(tmp_path, environment()), check=True, cwd=tmp_path)
    found = reports(tmp_path)
    assert kinds(found, "megatron/trainer.py") == ["megatron/trainer.py"]
    assert len(found) >= 3  # two ranks, and the tool


def imported(file: Path) -> set[str]:
    """Names of all modules that a script imports, what lies beside it with all that this imports
    among them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    for top in {name.split(".")[0] for name in names}:
        beside = [file.parent / f"{top}.py", *(file.parent / top).glob("*.py")]
        for neighbour in beside:
            names |= imported(neighbour) if neighbour.exists() else set()
    return names


SCRIPTS = [
    file for folder in ("tools", "benchmarks") for file in sorted((ROOT / folder).glob("*.py"))
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.name)
def test_every_script_that_computes_imports_what_settles(script: Path) -> None:
    names = imported(script)
    settling = tuple(f"megatron_stare.{name}" for name in (*PACKAGES, "process.vector_maths"))
    if "torch" in names and "__main__" in script.read_text():
        assert any(name.startswith(settling) for name in names)


SERVER_SIDE = """
import sys, torch
try:  # as in serve.py, which would settle too
    import torchvision
except (ImportError, OSError, RuntimeError):
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    torchvision = torch.library.Library("torchvision", "DEF")
    torchvision.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torchvision.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
if sys.argv[1] == "plugins":
    from sglang.srt.plugins import load_plugins
    load_plugins()
else:
    from sglang.srt.platforms import current_platform
    assert current_platform.get_default_attention_backend() == "torch_native"
torch.set_num_threads(2)
torch.rand(100_000).cos()
"""


@pytest.mark.sglang
@pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING))
@pytest.mark.parametrize("entry", ["plugins", "platform"])
def test_sglang_settles_when_it_loads_the_plug_in(entry: str, tmp_path: Path) -> None:
    """Also in servers that somebody else starts."""
    path = {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [servers.PYTHON, "-c", SERVER_SIDE, entry],
        env=probed(tmp_path, {**os.environ, **path}),
        check=True,
    )
    assert kinds(reports(tmp_path), "<string>") == ["<string>"]


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING))
def test_a_server_settles_first_in_the_process_of_the_model(tmp_path: Path) -> None:
    """A server is started without our PYTHONPATH, so its Python is a script that sets one."""
    python = tmp_path / "python"
    (tmp_path / "reports").mkdir()
    python.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={PROBE}:{ROOT} FIRST_MATHS={tmp_path / 'reports'}\nexec"
        f' {servers.PYTHON} "$@"\n'
    )
    python.chmod(0o755)
    with servers.running(python=str(python)) as engine:
        servers.sync(engine, 1, servers.weights())
    assert kinds(reports(tmp_path / "reports"), "managers/scheduler.py") == [
        "managers/scheduler.py"
    ]
