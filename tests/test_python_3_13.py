"""README's first command with Python 3.13, which CI does not run: on a clean clone, with an
environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.runs import ROOT

NEEDED_GB = 8  # the environment and the clone


def python() -> str | None:
    """A Python 3.13 of this machine: on PATH, or pyenv's newest. None: there is none."""
    folder = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which("python3.13"), *sorted(map(str, folder.glob("3.13.*/bin/python3.13")))]
    for each in reversed(found):
        if each and not subprocess.run([each, "-c", ""], capture_output=True).returncode:
            return each
    return None


@pytest.mark.slow
def test_the_quickstart_and_the_operators_pass_with_python_3_13(tmp_path: Path) -> None:
    chosen = python()
    if chosen is None:
        pytest.skip("there is no Python 3.13 on this machine")
    if shutil.disk_usage(tmp_path).free < NEEDED_GB * 1e9:
        pytest.skip(f"{tmp_path} has less than {NEEDED_GB} GB free")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    # nothing of the environment that runs this test
    names = ("PYTHONPATH", "VIRTUAL_ENV", "PYTEST_CURRENT_TEST", "PYTHON")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment["PYTHON"] = chosen
    try:
        for command in (
            ["scripts/quickstart.sh", "--steps", "3"],
            ["scripts/test.sh", "tests/ops", "tests/algorithms"],
        ):
            done = subprocess.run(
                ["bash", *command], cwd=clone, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        version = subprocess.check_output([clone / ".venv/bin/python", "--version"], text=True)
        assert version.startswith("Python 3.13.")
        (run,) = clone.glob("runs/quickstart*")
        assert (run / "hf/model.safetensors").is_file()
    finally:
        shutil.rmtree(clone)  # 6 GB
