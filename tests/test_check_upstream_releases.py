"""tools/check_upstream.py on the real releases: it names every change that is listed by hand, and little else."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
LISTED = yaml.safe_load((ROOT / "tests" / "upstream_changes.yaml").read_text())
RELEASES = {"megatron_core": ("0.16.1", "0.19.2"), "sglang": ("0.5.21", "0.5.23")}
PACKAGES = {"megatron_core": "megatron.core.", "sglang": "sglang."}

# as a script has it: its own folder first
sys.path.insert(0, str(ROOT / "tools"))
TOOL = importlib.import_module("check_upstream")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Wheels by upstream and release; skips where pip cannot get one."""
    folder = tmp_path_factory.mktemp("wheels")

    def get(name: str, version: str) -> Path:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "-d",
            str(folder),
        ]
        for python in ([], ["--python-version", "3.12"]):  # the newest are not made for every Python
            done = subprocess.run([*pip, *python, f"{name}=={version}"], capture_output=True, text=True)
            if found := sorted(folder.glob(f"{name}-{version}-*.whl")):
                return found[0]
        pytest.skip(f"pip cannot download {name} {version}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")

    return get


def test_the_list_is_of_the_size_it_has_to_have() -> None:
    """Thirty real changes at least, most of them of what the project uses; each says how it was seen."""
    changes = [each for listed in LISTED["changes"].values() for each in listed]
    assert len(changes) >= 30
    assert sum(each["used"] == "project" for each in changes) >= 30
    assert all(each["change"] and each["file"] and each["used"] in ("project", "plausible") for each in changes)
    keys = [(each["name"], each["kind"], each.get("says", "")) for each in changes]
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
@pytest.mark.parametrize("upstream", RELEASES)
def test_every_listed_change_is_named_and_one_in_ten_is_a_false_alarm_at_most(
    upstream: str, wheels: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = (str(wheels(upstream, version)) for version in RELEASES[upstream])
    plausible = str(ROOT / "tests" / "support" / "check_upstream_uses.py")
    findings = []
    for more in ([], ["--uses", plausible, "--alone"]):
        assert TOOL.main([after, "--against", before, "--json", *more]) == 1
        read = yaml.safe_load(capsys.readouterr().out)
        assert read["unread"] == []
        findings += read["findings"]

    def says(finding: dict[str, Any], entry: dict[str, Any]) -> bool:
        same = finding["name"] == PACKAGES[upstream] + entry["name"] and finding["kind"] == entry["kind"]
        return same and entry.get("says", "") in finding["what"]

    listed, wrong = LISTED["changes"][upstream], LISTED["false_alarms"][upstream]
    missed = [entry for entry in listed if not any(says(each, entry) for each in findings)]
    assert missed == []
    # every finding has a verdict, so that a new one is judged before it is let stand
    assert [each for each in findings if not any(says(each, entry) for entry in listed + wrong)] == []
    alarms = [each for each in findings if not any(says(each, entry) for entry in listed)]
    assert len(alarms) <= len(findings) / 10


@pytest.mark.slow
@pytest.mark.parametrize("upstream", RELEASES)
def test_the_tables_of_the_page_are_what_the_tool_prints(
    upstream: str, wheels: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = (str(wheels(upstream, version)) for version in RELEASES[upstream])
    TOOL.main([after, "--against", before, "--markdown"])
    assert capsys.readouterr().out in (ROOT / "docs" / "upstreams.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("upstream", RELEASES)
def test_what_is_declared_is_in_a_release_that_we_run_with(upstream: str, wheels: Any) -> None:
    """SGLang's names too, of which the trainer's environment has none."""
    definitions, release = (importlib.import_module(f"upstream.{name}") for name in ("definitions", "release"))
    declared = importlib.import_module("upstream.declared").DECLARED
    pinned = {"megatron_core": "0.16.1", "sglang": "0.5.23"}[upstream]
    names = definitions.Definitions(release.open_release(wheels(upstream, pinned)))
    for each in declared:
        module, _, text = each.name.partition(":")
        if names.source.holds(module):
            assert text in names.module(module).words if text else names.find(module) is not None, each.name
