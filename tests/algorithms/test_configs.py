"""Every method has a configuration of its published settings and a page, and both are true."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from megatron_stare.algorithms import METHODS
from megatron_stare.config.layers import read_yaml
from megatron_stare.config.load import build_method, validate

ROOT = Path(__file__).parent.parent.parent
CONFIGS = sorted((ROOT / "configs/algorithm").glob("*.yaml"))
PAGES = ROOT / "docs/algorithms"


def test_every_method_has_a_configuration_and_a_page() -> None:
    assert {path.stem for path in CONFIGS} == {*METHODS, "skywork_or1"}
    index = (PAGES / "README.md").read_text()
    for name in METHODS:
        assert (PAGES / f"{name}.md").exists()
        assert f"({name}.md)" in index


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_configuration_is_accepted_and_names_its_source(path: Path) -> None:
    config = validate({"model": {"path": "some/model"}, **read_yaml(path)}, str(path))
    assert type(config.algorithm.method).__module__.endswith({"skywork_or1": "grpo"}.get(path.stem, path.stem))
    assert re.search(r"arXiv \d{4}\.\d{5}|Ours", path.read_text().split("algorithm:")[0])


@pytest.mark.parametrize("name", METHODS)
def test_the_page_names_settings_that_exist(name: str) -> None:
    method = build_method({"name": name})
    fields = {f.name for f in dataclasses.fields(method)}
    rows = re.findall(r"^\| (`[^|]*)\|", (PAGES / f"{name}.md").read_text(), re.MULTILINE)
    named = {setting.split(".")[0] for row in rows for setting in re.findall(r"`(\w[\w.]*)`", row)}
    assert named
    assert named <= fields
