"""Versions in docs/install.md are true: why there are two environments, and which releases the
image takes."""

from __future__ import annotations

import re
import subprocess

import pytest
from packaging.requirements import Requirement
from support.runs import ROOT
from support.sglang_servers import PYTHON

IMAGE = (ROOT / "scripts/Containerfile").read_text()
ARGUMENTS = dict(re.findall(r"^ARG (\w+)=(\S+)$", IMAGE, re.MULTILINE))


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


@pytest.mark.sglang
def test_no_environment_serves_both() -> None:
    """Once this fails, one environment may do: docs/install.md."""
    asked = (
        "from importlib.metadata import requires, version; print(version('sglang'),"
        " *requires('sglang'), sep='\\n')"
    )
    said = subprocess.run(
        [PYTHON, "-c", asked], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert said[0] == ARGUMENTS["SGLANG"]
    wanted = {each.name: each for each in map(Requirement, said[1:]) if each.marker is None}
    assert not wanted["torch"].specifier.contains(pins()["torch"])
    assert str(wanted["torch"].specifier) == "==2.14.1"


def test_the_image_and_the_page_take_the_releases_of_the_project() -> None:
    page = (ROOT / "docs/install.md").read_text()
    assert ARGUMENTS["TORCH"] == pins()["torch"]
    assert (
        f"sglang=={ARGUMENTS['SGLANG']}" in page
        and ARGUMENTS["SGLANG"] in (ROOT / "scripts/sglang-cpu.lock").read_text()
    )
    assert (
        f"=={ARGUMENTS['TRANSFORMER_ENGINE']}" in page and f"--branch {ARGUMENTS['APEX']}" in page
    )
    assert (
        f"torch {pins()['torch']}" in page
        and "CUDA 13.0" in page
        and ARGUMENTS["CUDA"].startswith("13.0")
    )
    assert set(re.findall(r"\$\{([A-Z]\w+)\}", IMAGE)) - {"PATH"} == set(ARGUMENTS)


def test_the_page_asks_for_all_that_transformer_engine_is_built_with() -> None:
    """Its headers are PyTorch's: cudnn.h and nccl.h are in no folder of the CUDA toolkit."""
    page = (ROOT / "docs/install.md").read_text()
    for package in ("python3.12-dev", "python3.12-venv", "build-essential", "git"):
        assert f"`{package}`" in page and re.search(rf" {re.escape(package)} ", IMAGE), package
    before = page.partition('"transformer-engine[pytorch]')[0]
    (folder, path) = re.findall(r"^    S=(\S+); export CPATH=(\S+)", before, re.MULTILINE)[0]
    assert folder == "$PWD/.venv/lib/python3.12/site-packages/nvidia"
    assert path.split(":") == ["$S/cudnn/include", "$S/nccl/include"]
