"""Every method has a configuration of its published settings and a page, and both are true."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from megatron_stare.algorithms import METHODS
from megatron_stare.config.layers import read_yaml
from megatron_stare.config.load import build_method, load_config, validate
from megatron_stare.planning.preflight import check

ROOT = Path(__file__).parent.parent.parent
CONFIGS = sorted((ROOT / "configs/algorithm").glob("*.yaml"))
PAGES = ROOT / "docs/algorithms"
BASELINES = (PAGES / "baselines.md").read_text()
# what the page of baselines says of each in a table of its own: | `method` | clip_low | clip_high |
# ...
DEFAULTS = re.findall(r"^\| `(\w+)` \| (.*) \|$", BASELINES.split("\n## ")[0], re.MULTILINE)


# modules whose names are not those of their methods
MODULES = {"skywork_or1": "grpo", "clip_b": "entropy_clip", "clip_v": "entropy_clip"}


def place_of(method: str) -> tuple[str, str]:
    """The target of a link to what is said of a method, and the text: its page, or its section on
    that of baselines."""
    if (page := PAGES / f"{method}.md").exists():
        return page.name, page.read_text()
    (section,) = [each for each in BASELINES.split("\n## ") if each.startswith(f"{method}\n")]
    return f"baselines.md#{method}", section


def test_every_method_has_a_configuration_and_a_page_or_a_section() -> None:
    assert {path.stem for path in CONFIGS} == {*METHODS, "skywork_or1"}
    index = (PAGES / "README.md").read_text()
    for name in METHODS:
        assert f"({place_of(name)[0]})" in index


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_configuration_is_accepted_and_names_its_source(path: Path) -> None:
    config = validate({"model": {"path": "some/model"}, **read_yaml(path)}, str(path))
    assert type(config.algorithm.method).__module__.endswith(MODULES.get(path.stem, path.stem))
    assert re.search(r"arXiv \d{4}\.\d{5}|Ours", path.read_text().split("algorithm:")[0])


@pytest.mark.parametrize("name", METHODS)
def test_numbers_beside_settings_in_the_text_are_the_defaults(name: str) -> None:
    """Such as `mu` (2.5)."""
    method = build_method({"name": name})
    for setting, said in re.findall(r"`(\w+)` \(([\d.e-]+)\b", place_of(name)[1]):
        assert float(said) == getattr(method, setting), setting


@pytest.mark.parametrize("name", METHODS)
def test_the_page_names_settings_that_exist(name: str) -> None:
    method = build_method({"name": name})
    fields = {f.name for f in dataclasses.fields(method)}
    rows = re.findall(r"^\| (`[^|]*)\|", place_of(name)[1], re.MULTILINE)
    named = {setting.split(".")[0] for row in rows for setting in re.findall(r"`(\w[\w.]*)`", row)}
    assert named or name in dict(DEFAULTS)
    assert named <= fields


def test_the_table_of_the_baselines_has_their_defaults() -> None:
    assert {name for name, _ in DEFAULTS} == {
        name for name in METHODS if not (PAGES / f"{name}.md").exists()
    }
    for name, cells in DEFAULTS:
        method = build_method({"name": name})
        for setting, said in zip(
            ("clip_low", "clip_high", "dual_clip", "aggregation"), cells.split("|"), strict=True
        ):
            known = getattr(method, setting, "")  # an empty cell: the method has no such setting
            assert read_cell(said) == known, f"{name}: {setting}"


def read_cell(said: str) -> float | str | None:
    try:
        return float(said)
    except ValueError:
        return {"null": None}.get(said.strip(), said.strip())


# optimizer steps a rollout batch, and of the warm-up, as the file's own source counts them
PROMISED = {
    "clip_cov": (8, 0),
    "dapo": (16, 10 * 16),
    "gspo": (4, 0),
    "justrl": (4, 10 * 4),
    "kl_cov": (8, 0),
    "stapo": (4, 10 * 4),
    "steer": (16, 0),
    "twenty_entropy": (16, 0),
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_configuration_passes_preflight_and_trains_as_it_promises(
    path: Path, tmp_path: Path
) -> None:
    """On a model with the positions of those it was published with."""
    folder = shutil.copytree(ROOT / "assets/tiny-adder", tmp_path / "model")
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 40960}))
    run = check(load_config(path, [f"model.path={folder}"]))
    updates, warmup = PROMISED.get(path.stem, (1, 0))
    assert (run.config.batch.updates, run.config.optimizer.warmup_steps) == (updates, warmup)
