"""`quickstart.sh --compare` begins two runs, continues what of them is unfinished, and checks both
in a dry run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# In place of Python: a line of its arguments a call; a run leaves its configuration, and ends early
# where it is told to
RECORDER = r"""#!/usr/bin/env bash
echo "$*" >>calls
[ "$3" = train ] || exit 0
for word in "$@"; do
    case "$word" in
    --dry-run) exit 0 ;;
    run.dir=*) folder="${word#run.dir=}" ;;
    run.name=*) name="${word#run.name=}" ;;
    esac
done
mkdir -p "$folder" && touch "$folder/config.yaml"
[ "$name" != "${FAILS:-}" ]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The scripts, with an environment that is set up already."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "scripts/setup_env.sh").write_text(
        'source "$(dirname "${BASH_SOURCE[0]}")/python_env.sh"\nPYTHON="$ROOT/python"\n'
    )
    (tmp_path / "python").write_text(RECORDER)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def quickstart(
    project: Path, *arguments: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """How it ended, and the calls of the command line, without what is the same in all."""
    (project / "calls").write_text("")
    done = subprocess.run(
        ["bash", str(project / "scripts/quickstart.sh"), *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    calls = (project / "calls").read_text().splitlines()
    return done, [call.removeprefix("-m megatron_stare.cli ").removesuffix(" ") for call in calls]


def train(method: str, folder: str, *rest: str) -> str:
    words = {
        "grpo": (
            "algorithm=grpo algorithm.aggregation=token_mean algorithm.clip_high=0.28"
            " algorithm.dual_clip=10 "
        )
    }
    settings = words.get(method, "" if method == "stare" else f"algorithm={method} ")
    return " ".join(
        [
            f"train configs/quickstart.yaml {settings}run.name={method} run.dir={folder}/{method}",
            *rest,
        ]
    )


def report(folder: str, method: str = "grpo") -> str:
    return f"report {folder}/stare {folder}/{method} --out {folder}/report.html"


def test_a_comparison_is_continued(project: Path) -> None:
    runs = project / "runs"
    done, calls = quickstart(project, "--compare", "grpo", FAILS="stare")
    assert done.returncode == 1
    (folder,) = [f"runs/{path.name}" for path in runs.iterdir()]
    assert calls == [train("stare", folder)]

    # the half that had begun goes on, the other begins; and so it is if that is cut short as well
    done, calls = quickstart(project, "--compare", "grpo", "--resume", "--steps", "5", FAILS="grpo")
    assert done.returncode == 1
    assert calls == [
        train("stare", folder, "--resume", "run.steps=5"),
        train("grpo", folder, "run.steps=5"),
    ]
    both = [train("stare", folder, "--resume"), train("grpo", folder, "--resume")]
    done, calls = quickstart(project, "--resume", "--compare", "grpo")
    assert done.returncode == 0, done.stderr
    assert calls == [*both, report(folder)]

    # of several the newest with the same method
    for name in (
        "compare-20000101-000000/stare",
        "compare-90000101-000000/stare",
        "compare-90000101-000000/gspo",
    ):
        (runs / name).mkdir(parents=True)
        (runs / name / "config.yaml").touch()
    (runs / "compare-90000102-000000").mkdir()
    assert quickstart(project, "--compare", "grpo", "--resume")[1] == [*both, report(folder)]
    newest = "runs/compare-90000101-000000"
    _, calls = quickstart(project, "--compare", "gspo", "--resume")
    assert calls == [
        train("stare", newest, "--resume"),
        train("gspo", newest, "--resume"),
        report(newest, "gspo"),
    ]
    _, calls = quickstart(project, "--compare", "gspo", "--resume", "--dry-run")
    assert calls == [
        train("stare", newest, "--resume --dry-run"),
        train("gspo", newest, "--resume --dry-run"),
    ]

    # without --resume another one begins
    _, calls = quickstart(project, "--compare", "grpo")
    assert "--resume" not in " ".join(calls) and len(calls) == 3


def test_nothing_to_continue(project: Path) -> None:
    done, calls = quickstart(project, "--compare", "grpo", "--resume")
    assert (done.returncode, calls) == (2, [])
    assert done.stderr.startswith("error: there is no comparison with grpo to resume under runs/")
    done, calls = quickstart(project, "--compare", "stare")
    assert (done.returncode, calls) == (2, [])


def test_one_run_is_continued(project: Path) -> None:
    assert quickstart(project, "--resume", "--dry-run")[1] == [
        "train configs/quickstart.yaml --resume --dry-run"
    ]


@pytest.mark.wide
def test_a_dry_run_checks_both_and_stops(project: Path) -> None:
    """With the real command line."""
    (project / "python").unlink()
    (project / "python").write_text(f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')
    (project / "python").chmod(0o755)
    for name in ("configs", "assets"):
        (project / name).symlink_to(ROOT / name)
    done, _ = quickstart(project, "--compare", "grpo", "--dry-run", PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stderr) == (0, "loading PyTorch and Megatron ...\n" * 2)
    assert done.stdout.count("\nalgorithm:\n  name: ") == 2
    assert "name: grpo" in done.stdout.split("\nalgorithm:\n")[2]
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    "arguments", [(), ("run.dir=runs/mine",), ("--compare", "grpo")], ids=["one", "named", "two"]
)
def test_its_last_lines_say_what_is_next(project: Path, arguments: tuple[str, ...]) -> None:
    """With paths that hold where it was called from."""
    recorder = (project / "python").read_text()
    (project / "python").write_text(
        recorder.replace("for word", "folder=runs/new name=x\nfor word", 1)
    )
    for old in ("runs/older", "runs/zzz"):
        (project / old).mkdir(parents=True)
        (project / old / "config.yaml").touch()
        os.utime(project / old / "config.yaml", (1, 1))
    done, _ = quickstart(project, *arguments)
    assert done.returncode == 0, done.stderr
    lines = [line.split("#")[0].split() for line in done.stdout.splitlines()[-5:]]
    (folder,) = {Path(words[-1]) for words in lines if words[:2] == ["megatron-stare", "status"]}
    report = folder.parent if "--compare" in arguments else folder
    assert lines[:2] == [
        ["activate:", "source", str(project / "activate")],
        ["report:", str(report / "report.html")],
    ]
    assert [words[-5:][:3] for words in lines[2:3]] == [["megatron-stare", "init", "my-run"]]
    assert lines[3] == ["megatron-stare", "recipes"]
    expected = {(): "new", ("run.dir=runs/mine",): "mine"}
    assert folder.name == expected.get(arguments, "stare") and (folder / "config.yaml").exists()


def test_a_dry_run_or_a_run_that_failed_says_nothing_of_what_is_next(project: Path) -> None:
    done, _ = quickstart(project, "--dry-run")
    assert (done.returncode, done.stdout) == (0, "")
    done, _ = quickstart(project, "run.dir=runs/mine", "run.name=x", FAILS="x")
    assert done.returncode == 1 and "next:" not in done.stdout
