"""Versions in docs/install.md are true: why there are two environments, and which releases the
image takes."""

from __future__ import annotations

import contextlib
import re
import subprocess
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from support.runs import ROOT
from support.sglang_servers import PYTHON

from megatron_stare.commands.doctor.checks_versions import PYTHONS

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


def pythons() -> list[str]:
    """Versions in which scripts/python_env.sh makes environments."""
    (found,) = re.findall(
        r'^PYTHONS="(.*)"', (ROOT / "scripts/python_env.sh").read_text(), re.MULTILINE
    )
    return found.split()


def test_every_python_that_is_offered_can_have_every_pin() -> None:
    """Pins that are not installed here are not looked at."""
    seen, refused = 0, []
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        with contextlib.suppress(PackageNotFoundError):
            package = distribution(pin.name)
            if not pin.specifier.contains(package.version):
                continue
            seen += 1
            admitted = SpecifierSet(package.metadata["Requires-Python"] or "")
            refused += [
                f"{line} on {python}"
                for python in pythons()
                if pin.marker is None or pin.marker.evaluate({"python_version": python})
                if not admitted.contains(f"{python}.9")
            ]
    assert seen > 50 and refused == []


def test_scripts_package_doctor_and_pages_offer_the_same_pythons() -> None:
    numbers = sorted(tuple(map(int, each.split("."))) for each in pythons())
    assert (numbers[0], numbers[-1]) == PYTHONS
    least, most = (".".join(map(str, each)) for each in PYTHONS)
    assert f'requires-python = ">={least}"' in (ROOT / "pyproject.toml").read_text()
    for file in ("README.md", "constraints.txt", "docs/doctor.md", "scripts/python_env.sh"):
        assert f"{least} to {most}" in (ROOT / file).read_text(), file


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
