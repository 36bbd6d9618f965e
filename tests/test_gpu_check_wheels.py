"""Packages that are carried to a machine with nothing but PyTorch: their versions are this
project's, nothing is missing among them, and they are found once they are installed."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support import sglang_servers as servers
from support.carried_only import WHEELS, closure, without_the_rest
from support.runs import ROOT

FOLDER = ROOT / "tools" / "gpu_check"


def pins(file: str) -> set[str]:
    return {line.partition(";")[0] for line in (ROOT / file).read_text().splitlines()}


def listed() -> tuple[list[str], list[str]]:
    """Lists of `--wheels` for the trainer and for the servers."""
    ended = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check.sh"), "--wheels"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=True,
    )
    _, trainer, server = re.split(r"^#.*\n", ended.stdout, flags=re.MULTILINE)
    return trainer.split(), server.split()


def argument(name: str) -> str:
    """Default of an argument of scripts/Containerfile."""
    text = (ROOT / "scripts" / "Containerfile").read_text()
    (found,) = re.findall(rf"^ARG {name}=(\S+)$", text, re.MULTILINE)
    return found


def test_versions_are_those_of_the_pins_the_lock_and_the_container() -> None:
    trainer, server = listed()
    engine = {f"{name}=={argument('TRANSFORMER_ENGINE')}" for name in WHEELS["TRANSFORMER_ENGINE"]}
    lock = pins("scripts/sglang-cpu.lock")
    imported = {each for each in lock if each.partition("==")[0] in WHEELS["IMPORTED"]}
    assert "einops" in WHEELS["IMPORTED"] and len(imported) == len(WHEELS["IMPORTED"])
    assert engine | imported < {*trainer} <= engine | imported | pins("constraints.txt")
    # for Python 3.12
    assert {"megatron-core==0.19.2", "typing_extensions==4.16.0"} < {*trainer}
    kernels = WHEELS["KERNELS"].items()
    assert {*server} - lock == {f"{name}=={version}" for name, version in kernels}
    assert f"sglang=={argument('SGLANG')}" in server
    assert any(each.startswith("torchvision==") for each in server)


def test_the_servers_list_leaves_out_what_comes_with_pytorch_alone() -> None:
    lock = {each.partition("==")[0] for each in pins("scripts/sglang-cpu.lock") if "==" in each}
    left_out = lock - {each.partition("==")[0] for each in listed()[1]}
    # torch's builds for CPUs do not require triton
    assert {canonicalize_name(name) for name in left_out} <= closure(["torch"]) | {"triton"}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the list is of Python 3.12")
def test_all_that_the_trainer_s_packages_require_is_carried() -> None:
    carried = {canonicalize_name(name) for name in WHEELS["CARRIED"]}
    assert closure(carried) <= carried | closure(["torch"])


@pytest.mark.wide
def test_checks_are_imported_with_no_more_than_what_is_carried() -> None:
    """The command of a run, which one of them starts, is imported as well."""
    checks = [file.stem for file in FOLDER.glob("*.py") if file.stem != "__main__"]
    code = (
        f"import sys\nsys.path[:0] = [{str(FOLDER)!r}]\n"
        f"sys.path.append({str(ROOT / 'benchmarks')!r})\n"
        f"import machine\nfor name in {checks!r}: __import__(name)\n"
        "import megatron_stare.cli, megatron_stare.train\n"
        "try:\n    import ray\nexcept ImportError:\n    print('ray is not there')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **without_the_rest()},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "ray is not there\n"


@pytest.mark.sglang
@pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING))
def test_kernels_are_those_that_sglang_asks_for() -> None:
    code = "import importlib.metadata as m, json; print(json.dumps(m.requires('sglang')))"
    said = subprocess.run(
        [servers.PYTHON, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    wanted = {canonicalize_name(each.name): each for each in map(Requirement, json.loads(said))}
    for name, version in WHEELS["KERNELS"].items():
        assert wanted[canonicalize_name(name)].specifier.contains(version), name


def wheel(folder: Path, name: str, pytorch: str | None = None) -> None:
    """Writes a wheel with one module of its name, or a package with `pytorch` as its module of that
    name."""
    info = f"{name}-1.0.dist-info"
    module = {f"{name}.py": "FOUND = __file__\n"}
    files = {
        **(
            module
            if pytorch is None
            else {f"{name}/__init__.py": "", f"{name}/pytorch.py": pytorch}
        ),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)


def test_what_is_built_sees_the_headers_of_pytorch_s_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def call(command: list[str], env: dict[str, str]) -> int:
        asked.append(env["CPATH"].split(":"))
        return 0

    (tmp_path / "nvidia").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(subprocess, "call", call)
    monkeypatch.setenv("CPATH", "/of/the/user")
    install = runpy.run_path(str(FOLDER / "wheels.py"))["_install"]
    assert install(["source.tar.gz"], tmp_path / "target") is False
    ((*headers, last),) = asked
    own = [f"{tmp_path}/nvidia/{name}/include" for name in ("cudnn", "nccl")]
    assert {*own} <= {*headers} and last == "/of/the/user"


@pytest.mark.wide
def test_what_is_fetched_is_found_once_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One package that is not to be had, or does not build, costs none of the others. Half of
    Transformer Engine, or one that does not import, is not left installed."""
    registry, fetched, root = (tmp_path / name for name in ("registry", "fetched", "root"))
    for folder in (registry, fetched, root):
        folder.mkdir()
    for name in ("of_trainer", "of_servers"):
        wheel(registry, name)
    wheel(registry, "transformer_engine", "import of_trainer\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(registry))
    found: dict[str, Any] = runpy.run_path(str(FOLDER / "wheels.py"))
    lists = found["fetch"].__globals__
    monkeypatch.setitem(lists, "trainers", lambda: ["of_trainer==1.0", "transformer_engine==1.0"])
    monkeypatch.setitem(lists, "servers", lambda: ["nowhere==1.0", "of_servers==1.0"])
    assert found["fetch"](fetched) == 1
    monkeypatch.setitem(lists, "servers", lambda: ["of_servers==1.0"])
    assert found["fetch"](fetched) == 0
    source = fetched / "trainer" / "transformer_engine_torch-1.0.tar.gz"
    source.write_bytes(b"does not build")
    assert found["install"](fetched, root) == 1
    assert (root / ".gpu_wheels" / "of_trainer.py").exists()
    assert not [*root.glob(".gpu_wheels/transformer_engine*")]
    source.unlink()
    assert found["install"](fetched, root) == 0
    assert (root / ".gpu_wheels" / "transformer_engine").is_dir()
    wheel(fetched / "trainer", "transformer_engine", "import not_carried\n")
    assert found["install"](fetched, root) == 1
    assert not [*root.glob(".gpu_wheels/transformer_engine*")]
    assert (root / ".gpu_wheels" / "of_trainer.py").exists()
    code = "import of_servers, torch; print(of_servers.FOUND, torch.__file__)"
    python = root / ".venv-sglang" / "bin" / "python"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == [
        str(next(root.glob(".venv-sglang/lib/*/site-packages/of_servers.py"))),
        torch.__file__,
    ]
