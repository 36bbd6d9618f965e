"""Names of earlier releases still work in YAML, and a file that imports such a module is told where
it is now."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from megatron_stare.errors import ConfigError
from megatron_stare.registry import MOVED, resolve
from megatron_stare.rollout.engines.local import LocalEngine


def test_a_former_path_names_the_same_object() -> None:
    former = resolve("megatron_stare.rollout.local.LocalEngine", {}, "rollout.engine")
    assert former is LocalEngine


@pytest.mark.parametrize("former", MOVED)
def test_what_has_moved_is_where_the_table_says(former: str) -> None:
    importlib.import_module(MOVED[former])
    package = former.rpartition(".")[0]
    assert importlib.util.find_spec(package) is None or importlib.util.find_spec(former) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "from megatron_stare.batch import Prompt",
            "import megatron_stare.records.batch instead of megatron_stare.batch",
        ),
        (
            "from megatron_stare.orchestration.guarded_batches import Kept",
            (
                "import megatron_stare.driver.guards instead of"
                " megatron_stare.orchestration.guarded_batches"
            ),
        ),
    ],
)
def test_a_user_s_file_is_told_where_its_import_is_now(
    tmp_path: Path, line: str, said: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{line}\n\n\ndef verify(answer, reference):\n    return 1.0\n")
    with pytest.raises(ConfigError) as raised:
        resolve(f"{file}:verify", {}, "reward.verifier")
    assert said in str(raised.value) and str(file) in str(raised.value)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("sys.exit(0)", 0),
        ("argparse.ArgumentParser().parse_args(['train'])", 2),
    ],
)
def test_a_file_that_ends_the_process_as_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, code: int
) -> None:
    """Imports it by its path, twice, and as a module."""
    file = tmp_path / "leaves_at_import.py"
    file.write_text(f"import argparse, sys\n\n{line}\n\n\ndef verify(answer, reference): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in (f"{file}:verify", f"{file}:verify", "leaves_at_import.verify"):
        with pytest.raises(ConfigError) as raised:
            resolve(name, {}, "reward.verifier")
        assert f"calls sys.exit({code}) ({file}:3, in <module>)" in str(raised.value)


def test_a_file_whose_import_is_interrupted_is_imported_again(tmp_path: Path) -> None:
    file = tmp_path / "interrupted.py"
    file.write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        resolve(f"{file}:verify", {}, "reward.verifier")
    assert f"file:{file}" not in sys.modules
