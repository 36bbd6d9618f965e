"""The words for what decides last bits change with device, libraries and this package's code, and
with nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import megatron_stare
from megatron_stare.process import versions as installed


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package's modules that the digest is of."""
    copy = tmp_path / "megatron_stare"
    shutil.copytree(
        Path(megatron_stare.__file__).parent,
        copy,
        ignore=lambda _, names: [n for n in names if "." in n],
    )
    (copy / "__init__.py").write_text("one = 1")
    (copy / "megatron/step/step.py").write_text("two = 2")
    monkeypatch.setattr(megatron_stare, "__file__", str(copy / "__init__.py"))
    return copy


def digest() -> str:
    installed.code_digest.cache_clear()
    try:
        return installed.code_digest()
    finally:
        installed.code_digest.cache_clear()


def test_code_that_changes_is_other_code(package: Path) -> None:
    first = digest()
    assert digest() == first
    (package / "megatron/step/step.py").write_text("two = 3")
    second = digest()
    (package / "megatron/step/step.py").rename(package / "megatron/steps.py")
    third = digest()
    assert len({first, second, third}) == 3
    (package / "megatron/notes.txt").write_text("not code")
    (package / "__pycache__").mkdir(exist_ok=True)
    assert digest() == third


def test_a_process_keeps_the_code_that_it_began_with(package: Path) -> None:
    installed.code_digest.cache_clear()
    first = installed.code_digest()
    (package / "megatron/step/step.py").write_text("two = 3")
    assert installed.code_digest() == first != digest()


def test_the_words_have_device_libraries_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    here = installed.computes_on()
    assert (
        f"torch {torch.__version__}" in here
        and installed.code_digest()[:12] in here
        and "megatron-core " in here
    )
    assert "transformer-engine" not in here  # which is not installed
    assert not {installed.COMPILED, installed.UNORDERED} & set(here.split(", "))
    assert installed.UNORDERED in installed.computes_on(unordered=True).split(", ")
    monkeypatch.setattr(installed, "version", lambda name: "9.9")
    newer = installed.computes_on()
    assert newer != here and "transformer-engine 9.9" in newer
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert installed.computes_on() != newer
    monkeypatch.setattr(installed, "_cpu_info", lambda: "model name : another")
    assert installed.computes_on().startswith("another, ")
