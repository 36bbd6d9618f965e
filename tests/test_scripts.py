"""The set-up scripts say what is missing, and leave what is there alone."""

from __future__ import annotations

import re
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


def commands(text: str) -> list[str]:
    """The scripts that a text has run, in order, without their arguments."""
    return re.findall(r"^(?: {4}|exec )?bash (scripts/\w+\.sh)", text, re.MULTILINE)


@pytest.fixture
def ci(tmp_path: Path) -> Path:
    """CI's script, beside commands of README that say how they were called."""
    for folder in (".ci", "scripts"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    for script in commands((ROOT / "README.md").read_text()):
        (tmp_path / script).write_text(f'echo {script} "$@"\n')
    return tmp_path


def test_ci_runs_the_commands_of_readme_in_their_order(ci: Path) -> None:
    done = subprocess.run(["bash", ci / ".ci/run"], cwd="/", capture_output=True, text=True, check=True)
    in_readme = commands((ROOT / "README.md").read_text())
    assert in_readme == ["scripts/quickstart.sh", "scripts/test.sh"]
    assert [line.split()[0] for line in done.stdout.splitlines()] == in_readme  # the suite's last line comes last


def test_ci_runs_all_but_the_slow_tests(ci: Path) -> None:
    done = subprocess.run(["bash", ci / ".ci/run"], capture_output=True, text=True, check=True)
    assert "scripts/test.sh --all" in done.stdout


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """scripts/test.sh as it is, with environments that only say how they were called."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(ROOT / "scripts/test.sh", scripts)
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s|" "$@"; echo\n')
    (tmp_path / "python").chmod(0o755)
    (scripts / "setup_env.sh").write_text(f'ROOT="{tmp_path}" PYTHON="{tmp_path}/python"\n')
    (scripts / "setup_sglang.sh").write_text("echo servers\n")
    return scripts / "test.sh"


def output_of(script: Path, *arguments: str) -> str:
    return subprocess.run(["bash", script, *arguments], cwd="/", capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("arguments", "tier", "served"),
    [
        ([], "not slow and not wide and not sglang", False),
        (["--all", "-x"], "not slow", True),
        (["tests/ops", "-n", "0"], "not slow and not wide and not sglang", False),
    ],
)
def test_a_tier_of_tests_is_what_test_sh_says(stand_in: Path, arguments: list[str], tier: str, served: bool) -> None:
    said = output_of(stand_in, *arguments)
    assert ("servers" in said) is served
    *checks, pytest_line = said.splitlines()
    assert [line.split("|")[1] for line in checks if "|" in line] == ["ruff", "ruff", "mypy"]
    own = [word for word in arguments if word != "--all"]
    assert pytest_line.split("|")[1:-1] == ["pytest", "-n", "2", "--dist", "loadfile", "-m", tier, *own]


def test_slow_tests_are_run_file_by_file(stand_in: Path) -> None:
    done = output_of(stand_in, "--slow", "tests/ops")
    assert "servers" in done and done.splitlines()[-1] == "tests/support/slow_shards.py|tests/ops|"


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_ci_fails_where_a_command_does(ci: Path, script: str) -> None:
    (ci / "scripts" / script).write_text("exit 3\n")
    done = subprocess.run(["bash", ci / ".ci/run"], capture_output=True, text=True)
    assert done.returncode == 3
    assert "scripts/test.sh" not in done.stdout


def test_no_folder_changes_what_ruff_takes_for_the_project_s_own(tmp_path: Path) -> None:
    """`runs/` of the quickstart is the one every user has; `models/`, say, is as likely."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in ("tests", "tools", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
        for module in (tmp_path / folder).rglob("*.py"):
            (tmp_path / module.stem).mkdir(exist_ok=True)
            (tmp_path / module.parent.name).mkdir(exist_ok=True)
    assert (tmp_path / "runs").is_dir()
    (tmp_path / "megatron_stare").mkdir()
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "I", "tests", "tools", "benchmarks"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
