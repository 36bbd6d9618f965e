"""The small wheel is the package's own files under another name; it needs torch and numpy only, and
shares no path with the large wheel."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from support.runs import ROOT

BLOCKED = ("pydantic", "ray", "megatron", "megatron_stare", "transformers", "trl")
PROGRAM = f"""
import sys
class Block:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in {BLOCKED}:
            raise ImportError("imported: " + name)
sys.meta_path.insert(0, Block())
import torch, stare_select
from stare_select.conformance import main
found = stare_select.Selector("stare", entropy_target=None, share=0.5).update(
    torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2), torch.ones(1), torch.ones(1, 2)
)
assert found.codes.tolist() == [[0, 1]], found.codes
print(stare_select.__file__)
"""
SOURCES = ("megatron_stare", "configs", "assets", "tools")
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")


def python(*arguments: object, cwd: Path, program: Path | str = sys.executable) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    for name in FILES:
        shutil.copy(ROOT / name, source / name)
    build = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-w")
    python(*build, folder, source / "tools" / "stare_select", cwd=folder)
    python(*build, folder, source, cwd=folder)
    (small,) = folder.glob("stare_select-*.whl")
    (large,) = folder.glob("megatron_stare-*.whl")
    return small, large


@pytest.mark.wide
def test_both_install_in_one_environment_and_own_no_path_twice(
    wheels: tuple[Path, Path], tmp_path: Path
) -> None:
    venv.create(tmp_path / "both", symlinks=True)
    program = tmp_path / "both" / "bin" / "python"
    install = ("-m", "pip", "--python", program, "install", "-q", "--no-deps", "--no-index")
    python(*install, *wheels, cwd=tmp_path)
    site = next((tmp_path / "both" / "lib").glob("python*/site-packages"))
    owned = [{row[0] for row in csv.reader(record.open())} for record in site.glob("*/RECORD")]
    assert len(owned) == 2 and min(map(len, owned)) > 20
    assert not owned[0] & owned[1]


@pytest.mark.wide
def test_the_small_wheel_has_the_same_files_and_imports_torch_and_numpy_only(
    wheels: tuple[Path, Path], tmp_path: Path
) -> None:
    zipfile.ZipFile(wheels[0]).extractall(tmp_path)
    built = tmp_path / "stare_select"
    assert (built / "py.typed").is_file()
    license_ = next(tmp_path.glob("*.dist-info/licenses/LICENSE"))
    assert license_.read_text() == (ROOT / "LICENSE").read_text()
    for file in built.rglob("*.py"):
        inside = file.relative_to(built)
        source = ROOT / "megatron_stare" / inside
        if len(inside.parts) == 1 and inside.stem != "errors":
            source = ROOT / "megatron_stare" / "select" / inside
        expected = source.read_text().replace("megatron_stare.select", "stare_select")
        assert file.read_text() == expected.replace("megatron_stare", "stare_select")
    where = python("-c", PROGRAM, cwd=tmp_path)
    assert Path(where.strip()).parent == built
