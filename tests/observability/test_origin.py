"""A run notes the commit of this package, wherever it is started, and none where there is no
checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megatron_stare.process import versions as module
from megatron_stare.process.versions import origin

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_the_commit_is_that_of_the_package_and_not_of_the_folder_one_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    commit = origin()["commit"].removesuffix("+changes")
    assert len(commit) >= 12 and head.startswith(commit)


def test_an_installed_package_in_somebodys_repository_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment in a checkout of something else: its commit says nothing of ours."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    lib = tmp_path / "venv/lib/site-packages/megatron_stare/process"
    lib.mkdir(parents=True)
    monkeypatch.setattr(module, "__file__", str(lib / "versions.py"))
    found = origin()
    assert "commit" not in found and set(found) == {"date", "host", "version"}
    monkeypatch.setenv("PATH", str(tmp_path))  # nor where there is no git
    assert "commit" not in origin()
