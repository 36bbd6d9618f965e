"""Every block of the how-to pages, run as it stands in an empty folder: files written, commands and
programs run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import DOCS, ROOT, Block, blocks

from megatron_stare.config.load import load_config

HOWTO = sorted(DOCS.glob("howto/*.md"))
TIMEOUT_S = 280


def parts(page: Path) -> list[Block]:
    found = [block for block in blocks(page) if block.not_run is None]
    for block in found:
        assert block.file or block.language in ("bash", "python"), (
            f"{page}:{block.line}: run it, or say why not"
        )
    return found


def write_files(page: Path, folder: Path) -> None:
    for block in parts(page):
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)


@pytest.mark.parametrize("page", HOWTO, ids=lambda page: page.stem)
def test_blocks_are_well_formed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without running them: Python and bash parse, configurations are read, and few blocks are left
    out."""
    assert sum(block.not_run is not None for block in blocks(page)) <= 1
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for block in parts(page):
        if block.language == "python":
            ast.parse(block.text)
        elif block.language == "bash":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        elif block.language == "yaml":
            load_config(str(block.file), [])


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Environment of a shell in which this checkout is installed; pip installs into a folder of the
    test."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, call in {"python": "", "megatron-stare": "-m megatron_stare.cli"}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {call} "$@"\n')
        (tools / name).chmod(0o755)
    site = tmp_path / "site"
    return {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{site}",
        "PYTHON": sys.executable,  # of scripts
        "PIP_TARGET": str(site),
        "PIP_NO_INDEX": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in HOWTO if parts(page)], ids=lambda page: page.stem
)
def test_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    for name in ("scripts", "configs"):  # pages that launch by script are read in a checkout
        (folder / name).symlink_to(ROOT / name)
    write_files(page, folder)
    script = ["set -euo pipefail"]
    for block in parts(page):
        script.append(f"echo '--- {page.name}:{block.line}'")
        if block.file is None:
            script.append(
                block.text if block.language == "bash" else f"python - <<'BLOCK'\n{block.text}BLOCK"
            )
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    reached = re.findall(r"^--- (\S+)$", done.stdout, re.MULTILINE)[-1:]
    assert done.returncode == 0, f"at {reached}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def test_a_page_that_fails_is_told_with_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# x\n\n```json\n{}\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:3: run it, or say why not"):
        parts(page)
    page.write_text("# x\n\n<!-- not run: it needs a cluster -->\n```bash\nfalse\n```\n")
    assert parts(page) == []
