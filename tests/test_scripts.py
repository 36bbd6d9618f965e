"""The set-up scripts say what is missing, and leave what is there alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = {
    "setup_env.sh": ("PYTHON", ".venv"),
    "setup_sglang.sh": ("SGLANG_PYTHON", ".venv-sglang"),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what the scripts read, and a folder `bin` with the commands they use but Python."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for command in ("awk", "bash", "cat", "cut", "df", "dirname", "mkdir", "rm", "sha256sum"):
        (tmp_path / "bin" / command).symlink_to(str(shutil.which(command)))
    return tmp_path


def run(project: Path, script: str, *, begins: bool = False, **variables: str) -> tuple[int, str]:
    """Exit status and stderr; `begins` says whether it gets as far as to say that it sets something
    up."""
    environment = {"PATH": str(project / "bin"), **variables}
    command = [str(project / "bin/bash"), str(project / "scripts" / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("setting up") if begins else done.stdout == ""
    return done.returncode, done.stderr


def python(
    path: Path, version: str, *, modules: bool = True, runs: bool = True, base: Path | None = None
) -> Path:
    """A stand-in for a Python of a version. It answers what the scripts ask, and fails to make an
    environment. Without `modules` it is as Debian's without python3-venv; without `runs`, pyenv's
    shim of a version that is not selected; with `base`, that of an environment made with it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    answers = f"""#!/bin/bash
{"" if runs else "exit 127"}
case "$*" in
*version_info*) echo {version} ;;
*ensurepip*) {"true" if modules else "false"} ;;
*_base_executable*) echo "{base or "$0"}" ;;
--version) echo Python {version}.9 ;;
*) exit 3 ;;
esac
"""
    path.write_text(answers)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", SCRIPTS)
def test_arguments_start_no_set_up(project: Path, script: str) -> None:
    (project / "bin/sed").symlink_to(str(shutil.which("sed")))
    command = [str(project / "bin/bash"), str(project / "scripts" / script)]
    for argument, status in (("--help", 0), ("-h", 0), ("now", 2)):
        done = subprocess.run(
            [*command, argument],
            env={"PATH": str(project / "bin")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stderr
        told = done.stderr if status else done.stdout
        assert ("takes no arguments, not 'now'" if status else "usage: bash scripts/") in told
        assert SCRIPTS[script][0] in told or status
    assert not list(project.glob(".venv*"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_a_python(project: Path, script: str) -> None:
    variable, _ = SCRIPTS[script]
    code, said = run(project, script)
    assert code == 2
    assert said.splitlines() == [
        "error: no Python 3.11 to 3.13 found (python3 is missing)",
        f"  fix: install one, or name it: {variable}=/path/to/python3.12",
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_python_without_venv_is_passed_over(project: Path, script: str) -> None:
    for version in ("3.12", "3.13"):
        python(project / f"bin/python{version}", version, modules=False)
    code, said = run(project, script)
    assert code == 2 and "has no venv module\n  fix: install python3-venv" in said
    python(project / "bin/python3.11", "3.11")
    assert chosen(project, script)[0] == str(project / "bin/python3.11")


def chosen(project: Path, script: str, **variables: str) -> tuple[str, str]:
    """The Python that it takes, and why."""
    command = [str(project / "bin/bash"), str(project / "scripts" / script)]
    done = subprocess.run(
        command,
        env={"PATH": str(project / "bin"), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3 and done.stderr == ""  # as it came to make the environment
    found = re.fullmatch(
        r"setting up \S+ with Python 3\.\d+\.9 of (\S+), (.*) \(a few minutes, once\)\n",
        done.stdout,
    )
    assert found, done.stdout
    return found[1], found[2]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_newest_megatron_s_python_is_taken_where_there_is_one(
    project: Path, script: str
) -> None:
    variable, _ = SCRIPTS[script]
    first = "the first one found of 3.12, 3.13, 3.11"
    plain = python(project / "bin/python3", "3.11")
    assert chosen(project, script) == (str(plain), "the only one found")
    older = python(project / "bin/python3.11", "3.11")
    assert chosen(project, script) == (str(older), first)
    newer = python(project / "home/.pyenv/versions/3.13.0/bin/python3.13", "3.13")
    assert chosen(project, script, HOME=str(project / "home")) == (str(newer), first)
    python(project / "bin/python3.12", "3.12", runs=False)  # a shim
    pyenvs = [
        python(project / f"pyenv/versions/{v}/bin/python3.12", "3.12") for v in ("3.12.1", "3.12.7")
    ]
    assert chosen(project, script, PYENV_ROOT=str(project / "pyenv")) == (str(pyenvs[-1]), first)
    best = python(project / "bin/python3.12", "3.12")
    assert chosen(project, script, PYENV_ROOT=str(project / "pyenv")) == (str(best), first)
    assert chosen(project, script, **{variable: "python3.11"}) == (
        str(older),
        f"which {variable} names",
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_active_environment_is_made_anew_with_its_base(project: Path, script: str) -> None:
    """Its own Python stands first on PATH, and is gone by the time it is made anew."""
    base = python(project / "base/python3.12", "3.12")
    venv = project / SCRIPTS[script][1]
    python(venv / "bin/python3.12", "3.12", base=base)
    (venv / ".stamp").touch()
    path = f"{venv / 'bin'}:{project / 'bin'}"
    assert chosen(project, script, PATH=path)[0] == str(base)
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    python(venv / "bin/python3", "3.11", base=base)
    assert chosen(project, script, PATH=path)[0] == str(base)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_python_of_the_user_s_that_cannot_serve_is_refused_by_name(
    project: Path, script: str
) -> None:
    variable, _ = SCRIPTS[script]
    python(project / "bin/python3.12", "3.12")
    python(project / "bin/python3.10", "3.10")
    code, said = run(project, script, **{variable: "python3.10"})
    assert code == 2
    assert said == (
        f"error: {variable}=python3.10 says: Python 3.10.9\n  fix: name one of 3.12, 3.13, 3.11\n"
    )
    code, said = run(project, script, **{variable: "python4"})
    assert code == 2 and f"error: {variable}=python4 is no command" in said
    python(project / "bin/python3.13", "3.13", modules=False)
    code, said = run(project, script, **{variable: "python3.13"})
    assert code == 2 and "python3.13 has no venv module" in said


def test_two_environments_stand_side_by_side(project: Path) -> None:
    """An environment is not built again for its own Python or where none is named; another Python's
    goes beside."""
    maker = (
        '#!/bin/bash\ncase "$*" in\n*version_info*) echo VERSION ;;\n--version) echo Python'
        ' VERSION.9 ;;\n*_base_executable*) echo BASE ;;\n"-m venv"*) /bin/mkdir -p "$3/bin";'
        ' /bin/cp "$0" "$3/bin/python" ;;\n*) true ;;\nesac\n'
    )
    for version in ("3.12", "3.11"):
        path = project / f"bin/python{version}"
        path.write_text(maker.replace("VERSION", version).replace("BASE", str(path)))
        path.chmod(0o755)

    def setting_up(**variables: str) -> tuple[str, str]:
        script = f"source {project}/scripts/setup_env.sh; echo $PYTHON"
        environment = {"PATH": str(project / "bin"), **variables}
        command = [str(project / "bin/bash"), "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        *said, used = done.stdout.splitlines()
        return (
            Path(used).relative_to(project).parts[0],
            " ".join(said).partition(" with ")[0].rpartition("/")[2],
        )

    assert setting_up() == (".venv", ".venv")
    assert setting_up() == (".venv", "")
    assert setting_up(PYTHON="python3.12") == (".venv", "")
    assert setting_up(PYTHON="python3.11") == (".venv-3.11", ".venv-3.11")
    assert setting_up(PYTHON="python3.11") == (".venv-3.11", "")
    # as scripts hand it on to those that they call
    assert setting_up(PYTHON=str(project / ".venv-3.11/bin/python")) == (".venv-3.11", "")
    assert setting_up() == (".venv", "")
    with (project / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    # made from the Python that made it: its own is removed with it
    assert setting_up(PYTHON=str(project / ".venv-3.11/bin/python")) == (".venv-3.11", ".venv-3.11")
    # of another release now
    (project / ".venv/bin/python").write_text((project / "bin/python3.11").read_text())
    assert setting_up() == (".venv", ".venv")


@pytest.mark.parametrize("script", SCRIPTS)
def test_on_a_full_disk_the_old_environment_stays(project: Path, script: str) -> None:
    variable, venv = SCRIPTS[script]
    (project / venv).mkdir()
    for name in ("kept", ".stamp"):
        (project / venv / name).touch()
    (project / "bin/df").unlink()
    (project / "bin/df").write_text("#!/bin/bash\necho Filesystem\necho disk 9 8 100 9% /\n")
    (project / "bin/df").chmod(0o755)
    code, said = run(project, script, **{variable: sys.executable})
    assert code == 2
    assert (
        f"error: only 100 MB free on the disk of {project}" in said
        and "fix: free some space" in said
    )
    assert (project / venv / "kept").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_environment_made_by_hand_stays(project: Path, script: str) -> None:
    _, venv = SCRIPTS[script]
    python(project / "bin/python3.12", "3.12")
    (project / venv).mkdir()
    (project / venv / "kept").touch()
    code, said = run(project, script)
    assert code == 2
    assert said == (
        f"error: {project / venv} was not made by this script, which would build it anew\n"
        "  fix: use it without this script, or remove it\n"
    )
    assert (project / venv / "kept").exists()
    # a link is replaced alone
    (project / venv).rename(project / "elsewhere")
    (project / "elsewhere/.stamp").write_text("of another version\n")
    (project / venv).symlink_to("elsewhere")
    assert chosen(project, script)[0] == str(project / "bin/python3.12")
    assert (project / "elsewhere/kept").exists() and not (project / venv).is_symlink()


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_interrupted_build_is_begun_anew(project: Path, script: str) -> None:
    """The stand-in fails before the environment is made, then after a part of it is."""
    venv = project / SCRIPTS[script][1]
    stand_in = python(project / "bin/python3.12", "3.12")
    chosen(project, script)
    assert [each.name for each in venv.iterdir()] == [".stamp"]
    half = f'"-m venv"*) echo half >{venv}/half; echo half >{venv}/.half; exit 3 ;;\n'
    stand_in.write_text(stand_in.read_text().replace("--version)", f"{half}--version)"))
    chosen(project, script)
    assert (venv / "half").exists()
    python(stand_in, "3.12")
    chosen(project, script)
    assert [each.name for each in venv.iterdir()] == [".stamp"]


def commands(text: str) -> list[str]:
    """The scripts that a text has run, in order, without their arguments."""
    return re.findall(r"^(?: {4}|exec )?bash (scripts/\w+\.sh)", text, re.MULTILINE)


@pytest.fixture
def ci(tmp_path: Path) -> Path:
    """CI's script, beside commands of README that say how they were called."""
    for folder in (".ci", "scripts"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    for script in [*commands((ROOT / "README.md").read_text()), "scripts/build_site.sh"]:
        (tmp_path / script).write_text(f'echo {script} "$@" on${{PYTHON:+-$PYTHON}}\n')
    return tmp_path


def test_ci_runs_the_commands_of_readme_in_their_order_and_on_the_older_python(ci: Path) -> None:
    # which test.sh exports
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    command = ["bash", ci / ".ci/run"]
    done = subprocess.run(
        command, cwd="/", env=environment, capture_output=True, text=True, check=True
    )
    in_readme = commands((ROOT / "README.md").read_text())
    assert in_readme == ["scripts/quickstart.sh", "scripts/test.sh"]
    first, whole, site, *older = [line.split() for line in done.stdout.splitlines()]
    assert site == ["scripts/build_site.sh", "on"]
    assert [first[0], whole[0]] == in_readme and whole[1] == "--all"
    assert first[-1] == whole[-1] == "on"  # whatever Python is taken
    assert [line[0] for line in older] == [*in_readme, in_readme[1]]
    assert {line[-1] for line in older} == {"on-python3.11"}
    assert {"tests/megatron", "tests/ops"} < set(older[1])


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
    return subprocess.run(
        ["bash", script, *arguments], cwd="/", capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize(
    ("arguments", "tier", "served"),
    [
        ([], "not slow and not wide and not sglang", False),
        (["--all", "-x"], "not slow", True),
        (["tests/ops", "-n", "0"], "not slow and not wide and not sglang", False),
    ],
)
def test_a_tier_of_tests_is_what_test_sh_says(
    stand_in: Path, arguments: list[str], tier: str, served: bool
) -> None:
    said = output_of(stand_in, *arguments)
    assert ("servers" in said) is served
    *checks, pytest_line = said.splitlines()
    assert [line.split("|")[1] for line in checks if "|" in line] == ["ruff", "ruff", "mypy"]
    own = [word for word in arguments if word != "--all"]
    assert pytest_line.split("|")[1:-1] == [
        "pytest",
        "-n",
        "2" if served else "3",
        "--dist",
        "loadfile",
        "-m",
        tier,
        *own,
    ]


@pytest.mark.parametrize("arguments", [[], ["--all"], ["--slow"]])
def test_tiers_that_need_bubblewrap_say_where_it_is_missing(
    stand_in: Path, tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "bin").mkdir()
    for command in ("bash", "dirname", "sh"):
        (tmp_path / "bin" / command).symlink_to(str(shutil.which(command)))
    missing = "apt-get install bubblewrap" if arguments else None
    for name, said in ((None, missing), ("bwrap", None)):
        if name is not None:
            (tmp_path / "bin" / name).symlink_to(sys.executable)
        done = subprocess.run(
            [tmp_path / "bin/bash", stand_in, *arguments],
            env={"PATH": str(tmp_path / "bin")},
            capture_output=True,
            text=True,
            check=True,
        )
        assert (said or "") in done.stderr and bool(done.stderr) == bool(said)


@pytest.mark.parametrize(("failing", "code"), [("ruff", 4), ("mypy", 5), ("pytest", 6), ("", 0)])
def test_the_first_failure_ends_test_sh_with_its_code(
    stand_in: Path, failing: str, code: int
) -> None:
    said = f'printf "%s|" "$@"; echo\n[ "$2" != "{failing}" ] || exit {code}\n'
    (stand_in.parents[1] / "python").write_text(f"#!/bin/sh\n{said}")
    done = subprocess.run(["bash", stand_in], capture_output=True, text=True)
    assert done.returncode == code
    called = [line.split("|")[1] for line in done.stdout.splitlines()]
    assert called[-1] == (failing or "pytest")


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
        shutil.copytree(
            ROOT / folder,
            tmp_path / folder,
            ignore=shutil.ignore_patterns("results", "__pycache__"),
        )
        for module in (tmp_path / folder).rglob("*.py"):
            (tmp_path / module.stem).mkdir(exist_ok=True)
            (tmp_path / module.parent.name).mkdir(exist_ok=True)
    assert (tmp_path / "runs").is_dir()
    (tmp_path / "megatron_stare").mkdir()
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--no-cache",
        "--select",
        "I",
        "tests",
        "tools",
        "benchmarks",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def trying(project: Path) -> Callable[..., tuple[int, list[str], str]]:
    """scripts/try_release.sh with a Python that notes what it is asked and fails where FAILS says.
    It gives the exit status, what was asked of environments, and what was said."""
    (project / "configs").mkdir()
    for command in ("grep", "paste", "tail", "tee", "tr"):
        (project / "bin" / command).symlink_to(str(shutil.which(command)))
    python = project / "bin/python3.12"
    python.write_text(
        '#!/bin/bash\ncase "$*" in\n'
        "*version_info*) echo 3.12 ;;\n--version) echo Python 3.12.9 ;;\n*ensurepip*) true ;;\n"
        '*_base_executable*) echo "$0" ;;\n'
        '"-m venv"*) /bin/mkdir -p "$3/bin"; /bin/cp "$0" "$3/bin/python" ;;\n'
        '*) echo "$*" >>"$ASKED"\n'
        'case "$*" in *"${FAILS:-nothing}"*) echo "1 failed"; exit 1 ;;\n'
        '*-m\\ pytest*) echo "== 9 passed ==" ;; esac ;;\n'
        "esac\n"
    )
    python.chmod(0o755)

    def trying(*arguments: str, **variables: str) -> tuple[int, list[str], str]:
        asked = project / "asked"
        asked.write_text("")
        command = [str(project / "bin/bash"), str(project / "scripts/try_release.sh"), *arguments]
        environment = {"PATH": str(project / "bin"), "ASKED": str(asked), **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, asked.read_text().splitlines(), done.stderr + done.stdout

    return trying


def test_a_release_is_tried_beside_what_is_pinned(
    project: Path, trying: Callable[..., tuple[int, list[str], str]]
) -> None:
    code, asked, said = trying("megatron-core==0.19.0", "torch==2.14.1")
    folder = project / "build/try/3.12+megatron-core==0.19.0+torch==2.14.1"
    assert (
        code == 0
        and said.splitlines()[-1]
        == "3.12, megatron-core==0.19.0, torch==2.14.1: quickstart passed;  9 passed "
    )
    pip = [line for line in asked if line.startswith("-m pip install")]
    assert pip[-1].endswith(
        f"-c {folder}/constraints.txt megatron-core==0.19.0 torch==2.14.1"
    )  # after the project's pins
    pins, held = ((file / "constraints.txt").read_text().splitlines() for file in (project, folder))
    left = [line for line in pins if line not in held]
    assert sorted({line.partition("==")[0] for line in left}) == ["megatron-core", "torch"]
    assert not (project / ".venv").exists()
    assert "tests/megatron tests/ops" in asked[-1]
    code, asked, said = trying(
        "megatron-core==0.19.0", "torch==2.14.1", "--", "tests/ops", "-x", FAILS="-m pytest"
    )
    assert code == 1 and "quickstart passed; 1 failed" in said.splitlines()[-1]
    # made once
    assert not any("pip" in line for line in asked) and asked[-1].endswith("tests/ops -x")
    code, _, said = trying("megatron-core==0.19.0", "torch==2.14.1", FAILS="megatron_stare.cli")
    assert code == 1 and "quickstart failed;  9 passed" in said.splitlines()[-1]


@pytest.mark.parametrize("words", [[], ["megatron-core"], ["megatron-core=="], ["--frobnicate"]])
def test_what_is_no_release_is_not_tried(
    trying: Callable[..., tuple[int, list[str], str]], words: list[str]
) -> None:
    code, asked, said = trying(*words)
    assert code == 2 and asked == [] and "such as megatron-core==0.19.0" in said
