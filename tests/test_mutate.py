"""The mutation tool: what it changes, what it leaves alone, and that a mutant's fate is what the tests say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from mutate import table
from mutation.judge import Checkout, brief, without_folders
from mutation.reach import Reach, statement_of
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
        (16, "top", "not (top)"),
        (17, "rows.sort(key=abs)", "pass"),
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


NAME = "megatron_stare/ops/double.py"
FILES = {
    NAME: """LOW = 3


def double(x):
    return x * 2


def doubled(x):
    while x < 8:
        x = x * 2
    return x
""",
    "tests/ops/test_low.py": """from megatron_stare.ops import double


def test_low():
    assert double.LOW > 2


def test_up():
    assert double.doubled(5) == 10


def test_wrong():
    assert double.doubled(5) == 11
""",
    "tests/ops/test_rank.py": """import multiprocessing

from megatron_stare.ops.double import double


def answer(pipe):
    pipe.send(double(4))


def test_rank():
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=answer, args=(there,))
    process.start()
    assert here.recv() == 8
    process.join()
""",
    "tests/test_ends.py": "import os\n\n\ndef test_ends():\n    os._exit(3)\n",
    "tests/test_aborts.py": "import os\n\n\ndef test_aborts():\n    os.abort()\n",
    "tests/conftest.py": "",
    "pytest.ini": "[pytest]\nmarkers =\n    slow: long\n",
}
LOW, UP, RANK = "tests/ops/test_low.py::test_low", "tests/ops/test_low.py::test_up", "tests/ops/test_rank.py::test_rank"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Of one file, and tests that see some of it."""
    folder = tmp_path / "repository"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    return folder


def test_the_tests_that_reach_a_line_decide(repository: Path, tmp_path: Path) -> None:
    """What a test sees dies, though only a process that it starts sees it; what none sees lives. A test that fails
    anyway judges nothing. A hang and a process that ends are no failed test."""
    checkout, reach = Checkout(repository, tmp_path, "HEAD"), Reach(tmp_path / "kept/reach.json")
    for name in ("tests/ops/test_low.py", "tests/ops/test_rank.py"):
        reach.follow(checkout, name)
    kept = Reach(tmp_path / "kept/reach.json")
    mutants = mutants_of(repository / NAME, NAME)
    fates = {}
    for mutant in mutants:
        tests = [test for _, test in kept.tests_for(checkout.folder, mutant)]
        assert set(tests) == {1: {LOW, UP, RANK}, 5: {RANK}}.get(mutant.line, {UP})
        hangs = (mutant.line, mutant.kind) == (10, "arithmetic")
        verdict = checkout.judge(mutant, tests, 3.0 if hangs else 60.0)
        assert not hangs or verdict.by == UP
        fates[mutant.line, mutant.before.strip(), mutant.after.strip()] = verdict.status
        assert (checkout.folder / NAME).read_text() == FILES[NAME] == (repository / NAME).read_text()
    assert fates == {
        (1, "3", "4"): "survived",
        (5, "*", "/"): "killed",
        (5, "2", "3"): "killed",
        (9, "<", "<="): "survived",
        (9, "8", "9"): "survived",
        (10, "*", "/"): "timeout",
        (10, "2", "3"): "killed",
    }
    assert kept.named(f"{UP} AssertionError: {LOW}") == UP and kept.named("tests/none.py::test_no x") is None
    for name, status in (("ends", "broken"), ("aborts", "killed")):
        assert checkout.judge(mutants[0], [f"tests/test_{name}.py"], 60.0).status == status
    checkout.close()
    assert subprocess.run(["git", "worktree", "list"], cwd=repository, capture_output=True).stdout.count(b"\n") == 1


def test_the_statement_of_a_mutant_is_the_innermost_one() -> None:
    source = """A = 1
def f(x=2):
    if x > (
        3
    ):
        return g(
            4,
        )
    return 5
"""
    places = {line: statement_of(source, Mutant("", line, 0, (line, 1), "", "", "")) for line in (1, 2, 4, 7, 9)}
    assert places == {1: None, 2: None, 4: {3, 4, 5}, 7: {6, 7, 8}, 9: {9}}


def test_the_table_counts_every_mutant_once() -> None:
    found = ["maths killed", "maths survived", "operators survived", "megatron timeout", "megatron ", "megatron broken"]
    where = {"file": "a.py", "line": 1, "kind": "call", "before": "min", "after": "max"}
    rows = []
    for number, words in enumerate([*found, "maths killed"]):
        area, _, status = words.partition(" ")
        rows.append({"number": number, "area": area, "status": status or None, **where})
    said = table({"mutants": rows}, {2: "no row is read", 0: "killed all the same"}).splitlines()
    assert said[2:6] == [
        "| maths | 3 | 3 | 2 | 0 | 0 | 1 | 0.667 |",
        "| operators | 1 | 1 | 0 | 0 | 1 | 0 | - |",
        "| megatron | 3 | 1 | 0 | 1 | 0 | 0 | 0.000 |",
        "| all | 7 | 5 | 2 | 1 | 1 | 1 | 0.500 |",
    ]
    assert [line.rpartition(": ")[2] for line in said[7:]] == ["lives", "no row is read", "ran out of time"]


def test_a_mutant_is_data() -> None:
    mutant = Mutant("a.py", 1, 4, (1, 5), "constant", "1", "2")
    assert mutant.apply("x = 1\n") == "x = 2\n"


def test_what_a_test_said_names_no_folder_of_this_machine() -> None:
    said = "Command '['/home/me/bin/python', '-m', 'x', '/tmp/a1/run.py']'\n File \"/opt/b/graph.py\", line 9 in a/b.py"
    assert brief(said) == "Command '['python', '-m', 'x', 'run.py']' File \"graph.py\", line 9 in a/b.py"
    assert brief("tcp://host:1/x " + "1 / 2 " * 99) == ("tcp://host:1/x " + "1 / 2 " * 99)[:160]
    files = sorted((ROOT / "benchmarks/results").glob("mutants*.json"))
    recorded = [each for file in files for each in json.loads(file.read_text())["mutants"]]
    kept = [each["by"] for each in recorded if each.get("by")]  # an untried one has none
    assert len(kept) > 200 and all(without_folders(each) == each for each in kept)
