"""The slow suite's own runner: what it keeps, what it runs again, and that a failure stays one."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from support import slow_shards

HEAD = "import pytest\npytestmark = pytest.mark.slow\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two files of slow tests, with a name that says how often one has run."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: slow\n")
    (tmp_path / "tests/test_a.py").write_text(
        HEAD + "def test_one():\n    open('runs', 'a').write('a')\n"
        "@pytest.mark.skip(reason='no Chromium')\ndef test_two(): pass\n"
    )
    (tmp_path / "tests/test_b.py").write_text(
        HEAD + "def test_three():\n    open('runs', 'a').write('b')\n    assert not"
        " open('broken').read()\n"
    )
    (tmp_path / "tests/test_c.py").write_text("def test_quick(): assert False\n")
    (tmp_path / "broken").write_text("yes")
    (tmp_path / ".gitignore").write_text("build/\nruns\nbroken\ntable.json\n")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(slow_shards, "ROOT", tmp_path)
    monkeypatch.setattr(slow_shards, "TABLE", tmp_path / "table.json")
    return tmp_path


@pytest.mark.wide
def test_what_passed_is_not_run_again_and_what_failed_is(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert slow_shards.main([]) == 1
    assert (project / "runs").read_text() == "ab"
    said = capsys.readouterr().out
    assert "tests/test_b.py::test_three" in said.splitlines() and "1 passed, 1 failed" in said
    table = json.loads((project / "table.json").read_text())["files"]
    assert table["tests/test_a.py"]["skipped"] == {"test_two": "no Chromium"}
    assert (
        table["tests/test_b.py"]["passed"] == 0
        and "test_three" in table["tests/test_b.py"]["failed"]
    )
    assert list(table) == ["tests/test_a.py", "tests/test_b.py"]
    (project / "broken").write_text("")
    assert slow_shards.main([]) == 0
    assert (project / "runs").read_text() == "abb"
    assert (
        "failed" not in json.loads((project / "table.json").read_text())["files"]["tests/test_b.py"]
    )


@pytest.mark.wide
def test_another_commit_is_run_anew_and_what_no_commit_has_is_refused(project: Path) -> None:
    (project / "broken").write_text("")
    assert slow_shards.main(["tests/test_b.py"]) == 0
    assert not (project / "table.json").exists()  # of some files there is no table
    (project / "tests/test_b.py").write_text((project / "tests/test_b.py").read_text() + "# more\n")
    with pytest.raises(SystemExit, match="changes that no commit has"):
        slow_shards.main([])
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, "commit", "-qam", "more"], cwd=project, check=True)
    assert slow_shards.main(["tests/test_b.py"]) == 0
    assert (project / "runs").read_text() == "bb"


@pytest.mark.wide
def test_the_table_alone_lets_another_clone_resume(project: Path) -> None:
    """Only the table is carried to the other machine, and a commit of the table changes nothing."""
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    assert slow_shards.main([]) == 1
    table = project / "table.json"
    shutil.rmtree(project / "build")
    subprocess.run(["git", "add", "-f", "table.json"], cwd=project, check=True)
    subprocess.run(["git", *identity, "commit", "-qm", "table"], cwd=project, check=True)
    (project / "broken").write_text("")
    told = json.loads(table.read_text())
    assert slow_shards.main([]) == 0
    assert (project / "runs").read_text() == "abb"  # a passed and is not run again, b failed
    again = json.loads(table.read_text())
    assert again["commit"] == told["commit"] and again["left"] == []
    assert list(again["files"]) == ["tests/test_a.py", "tests/test_b.py"]
    told["commit"] = "0000000"
    table.write_text(json.dumps(told))
    shutil.rmtree(project / "build")
    assert slow_shards.main([]) == 0
    assert (project / "runs").read_text() == "abbab"


@pytest.mark.wide
def test_a_test_that_ends_pytest_itself_is_a_failure_and_the_others_run(project: Path) -> None:
    (project / "tests/test_a.py").write_text(
        HEAD + "import os\ndef test_gone():\n    os._exit(7)\n"
    )
    (project / "broken").write_text("")
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, "commit", "-qam", "gone"], cwd=project, check=True)
    assert slow_shards.main([]) == 1
    files = json.loads((project / "table.json").read_text())["files"]
    (why,) = files["tests/test_a.py"]["failed"].values()
    assert "ended with 7" in why and files["tests/test_b.py"]["passed"] == 1


def test_the_table_has_no_folders_of_the_machine() -> None:
    said = (
        "Command '['/a/b-1/.venv/bin/python', '--out=/tmp/p_0/k.json']' at http://127.0.0.1:3/x/y"
    )
    want = "Command '['python', '--out=k.json']' at http://127.0.0.1:3/x/y"
    assert slow_shards.without_folders(said) == want
    assert slow_shards.without_folders("1/2 of tests/test_a.py::test_b") == (
        "1/2 of tests/test_a.py::test_b"
    )
