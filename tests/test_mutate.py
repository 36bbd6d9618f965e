"""The mutation tool: what it changes, what it leaves alone, and that a mutant's fate is what the tests say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from mutation.judge import Checkout, rounds_for
from mutation.sites import Mutant, mutants_of

SOURCE = '''"""A docstring with 1 + 1."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    low: int = 3


def spread(rows: list[float], top: float = 0.5) -> float:
    """min and max."""
    if not rows or len(rows) < 2:
        raise ValueError(f"{len(rows) + 1} rows are too few" + "!" * 2)
    assert top > 0
    if top:
        rows.sort(key=abs)
    ä = (max(rows) - min(rows)) * top
    return -ä if top >= 1 else ä
'''


def changes(tmp_path: Path, source: str) -> set[tuple[int, str, str]]:
    path = tmp_path / "some.py"
    path.write_text(source)
    return {(each.line, each.before.strip(), each.after.strip()) for each in mutants_of(path, "some.py")}


def test_what_numbers_depend_on_is_changed_and_nothing_else(tmp_path: Path) -> None:
    assert changes(tmp_path, SOURCE) == {
        (8, "3", "4"),
        (11, "0.5", "1.0"),
        (13, "or", "and"),
        (13, "not rows", "(rows)"),
        (13, "<", "<="),
        (13, "2", "3"),
        (15, "top", "not (top)"),
        (16, "rows.sort(key=abs)", "pass"),
        (18, "max", "min"),
        (18, "min", "max"),
        (18, "-", "+"),
        (18, ") *", ") /"),
        (19, "top >= 1", "not (top >= 1)"),
        (19, ">=", ">"),
        (19, "1", "2"),
        (19, "-ä", "(ä)"),
    }


def test_a_change_is_one_place_of_one_line(tmp_path: Path) -> None:
    """Columns count characters, where the parser counts bytes."""
    path = tmp_path / "some.py"
    path.write_text(SOURCE)
    (last,) = [each for each in mutants_of(path, "some.py") if each.before == "-ä"]
    assert last.apply(SOURCE).splitlines()[18] == "    return (ä) if top >= 1 else ä"
    assert last.apply(SOURCE).splitlines()[:18] == SOURCE.splitlines()[:18]
    with pytest.raises(ValueError, match="no longer"):
        last.apply(SOURCE.replace("-ä", "+ä"))


def test_tests_decide(tmp_path: Path) -> None:
    """In a repository of one function: what its test sees dies, what it does not see lives."""
    repository = tmp_path / "repository"
    files = {
        "megatron_stare/ops/double.py": "def double(x):\n    return x * 2\n\n\ndef unseen(x):\n    return x + 1\n",
        "tests/ops/test_other.py": "def test_nothing():\n    pass\n",
        "tests/ops/test_twice.py": "from megatron_stare.ops.double import double\n\n\n"
        "def test_it():\n    assert double(4) == 8\n",
        "tests/test_far.py": "def test_far():\n    pass\n",
        "pytest.ini": "[pytest]\nmarkers =\n    slow: long\n",
    }
    for name, text in files.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], cwd=repository, check=True)
    name = "megatron_stare/ops/double.py"
    checkout = Checkout(repository, tmp_path / "checkout", "HEAD")
    seen: dict[str, str | None] = {}
    for mutant in mutants_of(repository / name, name):
        rounds = rounds_for(checkout.folder, mutant, {"tests/ops/test_other.py": 0.1}, True)
        assert rounds == [["tests/ops/test_twice.py"], ["tests/ops/test_other.py"], ["tests/test_far.py"]]
        if mutant.kind == "arithmetic":
            seen[mutant.after.strip()] = checkout.judge(mutant, rounds, 60.0).killed_by
            assert (checkout.folder / name).read_text() == files[name]
    checkout.close()
    assert seen == {"/": "tests/ops/test_twice.py::test_it", "-": None}


def test_a_mutant_that_hangs_is_killed(tmp_path: Path) -> None:
    from mutation.judge import run_tests

    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: long\n")
    (tmp_path / "test_hang.py").write_text("def test_hang():\n    while True:\n        pass\n")
    assert run_tests(tmp_path, ["test_hang.py"], 4.0) == "timeout"


def test_a_mutant_is_data() -> None:
    mutant = Mutant("a.py", 1, 4, (1, 5), "constant", "1", "2")
    assert mutant.apply("x = 1\n") == "x = 2\n"
