"""The set-up scripts say what is missing, and leave what is there alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = {"setup_env.sh": ("PYTHON", ".venv"), "setup_sglang.sh": ("SGLANG_PYTHON", ".venv-sglang")}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what the scripts read, and a folder `bin` with the commands they use but Python."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for command in ("awk", "bash", "cat", "cut", "df", "dirname", "sha256sum"):
        (tmp_path / "bin" / command).symlink_to(str(shutil.which(command)))
    return tmp_path


def run(project: Path, script: str, *, begins: bool = False, **variables: str) -> tuple[int, str]:
    """Exit status and stderr; `begins` says whether it gets as far as to say that it sets something up."""
    environment = {"PATH": str(project / "bin"), **variables}
    command = [str(project / "bin/bash"), str(project / "scripts" / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("setting up") if begins else done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_a_python(project: Path, script: str) -> None:
    variable, _ = SCRIPTS[script]
    code, said = run(project, script)
    assert code == 2
    assert said.splitlines() == [
        "error: no Python 3.10 to 3.12 found (python3 is missing)",
        f"  fix: install one, or name it: {variable}=/path/to/python3.11",
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_python_without_venv_is_passed_over(project: Path, script: str) -> None:
    """It answers the version's question with yes and the modules' with no, as Debian's does without python3-venv."""
    for name in ("python3.12", "python3.11"):
        (project / "bin" / name).write_text('#!/bin/bash\n[[ "$2" != *ensurepip* ]]\n')
        (project / "bin" / name).chmod(0o755)
    code, said = run(project, script)
    assert code == 2 and "has no venv module\n  fix: install python3-venv" in said
    (project / "bin/python3.10").write_text("#!/bin/bash\n[[ $1 == -c ]]\n")  # can, and then fails to make one
    (project / "bin/python3.10").chmod(0o755)
    (project / "bin/rm").symlink_to(str(shutil.which("rm")))
    code, said = run(project, script, begins=True)
    assert code == 1 and said == ""


@pytest.mark.parametrize("script", SCRIPTS)
def test_on_a_full_disk_the_old_environment_stays(project: Path, script: str) -> None:
    variable, venv = SCRIPTS[script]
    (project / venv).mkdir()
    (project / venv / "kept").touch()
    (project / "bin/df").unlink()
    (project / "bin/df").write_text("#!/bin/bash\necho Filesystem\necho disk 9 8 100 9% /\n")
    (project / "bin/df").chmod(0o755)
    code, said = run(project, script, **{variable: sys.executable})
    assert code == 2
    assert f"error: only 100 MB free on the disk of {project}" in said and "fix: free some space" in said
    assert (project / venv / "kept").exists()
