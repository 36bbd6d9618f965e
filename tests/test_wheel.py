"""A wheel has all that README names: installed, it works from any folder, with nothing of the
repository in reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml
from support.runs import LOADING, ROOT

SOURCES = (
    "megatron_stare",
    "configs",
    "assets",
    "tools",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
HIDDEN = ("PYTHONPATH", "VIRTUAL_ENV", "MEGATRON_STARE_SGLANG_PYTHON")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in HIDDEN}


def python(*arguments: object, cwd: Path) -> None:
    """Runs this environment's Python, which has pip and setuptools."""
    command = [sys.executable, *map(str, arguments)]
    subprocess.run(command, cwd=cwd, env=ENVIRONMENT, check=True, capture_output=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment with the wheel, made from the sdist, and with the
    dependencies of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    python(
        "-c", "from setuptools import build_meta; build_meta.build_sdist('../sdist')", cwd=source
    )
    (sdist,) = (folder / "sdist").iterdir()
    shutil.unpack_archive(sdist, folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    python(
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "-w",
        folder,
        unpacked,
        cwd=folder,
    )
    (wheel,) = folder.glob("*.whl")
    environment = folder / "environment"
    venv.create(environment, symlinks=True)
    programs = environment / "bin"
    python(
        "-m",
        "pip",
        "--python",
        programs / "python",
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    (site,) = environment.glob("lib/python*/site-packages")
    # a folder that is named in a .pth file has its own .pth files, and so this repository, left out
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return programs


def run(program: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)


@pytest.mark.wide
def test_the_quickstart_s_configuration_and_model_are_found(
    installed: Path, tmp_path: Path
) -> None:
    done = run(
        installed / "megatron-stare",
        "train",
        "configs/quickstart.yaml",
        "--dry-run",
        "run.seed=7",
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, LOADING)
    resolved = yaml.safe_load(done.stdout)
    assert resolved["run"]["seed"] == 7
    assert Path(resolved["model"]["path"]).is_relative_to(installed.parent)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.wide
def test_a_tool_runs(installed: Path, tmp_path: Path) -> None:
    vectors = ROOT / "tests/algorithms/algorithm_vectors.json"
    done = run(installed / "megatron-stare", "tool", "check_vectors", vectors, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "groups passed" in done.stdout
    assert (
        run(
            installed / "megatron-stare", "tool", "check_vectors", tmp_path / "none", cwd=tmp_path
        ).returncode
        == 2
    )


def test_a_report_is_made(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: tiny}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    done = run(installed / "megatron-stare", "report", tmp_path, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h1>tiny</h1>" in page
    assert "color-scheme" in page and "pointermove" in page  # its style and its script


@pytest.mark.wide
def test_sglang_s_environment_is_asked_for_and_not_guessed(installed: Path, tmp_path: Path) -> None:
    override = "rollout.engine=sglang"
    done = run(
        installed / "megatron-stare",
        "train",
        "configs/quickstart.yaml",
        override,
        "--dry-run",
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "\nerror: sglang.python: this package was installed from a wheel" in done.stderr
    assert (
        "fix: name the Python of SGLang's environment here or in MEGATRON_STARE_SGLANG_PYTHON"
        in done.stderr
    )
    assert str(installed.parent) not in done.stderr
