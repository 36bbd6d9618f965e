"""Nothing heavy is imported where a command can answer without it; elsewhere a line on stderr says
what is starting, before it does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import environment

from megatron_stare.config.load import load_config, load_section
from megatron_stare.errors import ConfigError
from megatron_stare.process import signs_of_life

HEAVY = ("torch", "ray", "transformers", "megatron.core", "numpy", "pyarrow")
QUICKSTART = "configs/quickstart.yaml"
# runs the command line, and says on stderr what of HEAVY it imported, and the exit code
PROBE = f"""
import sys
from megatron_stare.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print("probe", code, *[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


def probed(*arguments: str, cwd: Path) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The command, and its exit code and heavy imports as words."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
    )
    *_, last = done.stderr.splitlines()
    assert last.startswith("probe "), done.stderr
    return done, last.split()[1:]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["train", "--help"], 0),
        (["init", "--help"], 0),
        (["init", "mine"], 0),
        (["recipes"], 0),
        (["recipes", "--json"], 0),
        (["recipes", "none"], 2),
        (["format"], 0),
        (["trian"], 2),
        (["train", QUICKSTART, "--dryrun"], 2),
        (["train", "none.yaml"], 2),
        (["train", QUICKSTART, "run.stepz=1"], 2),
        (["train", QUICKSTART, "run.steps=0"], 2),
        (["train", QUICKSTART, "data.mixture=[{path: a}]", "data.path=b"], 2),
        (["eval", "none.yaml", "--checkpoint", "x"], 2),
        (["plan", QUICKSTART, "nodes=2"], 2),
        (["doctor", QUICKSTART, "run.stepz=1"], 2),
        (["convert", "none", "target"], 2),
        (["bisect", "none", "--from", "1", "--to", "2"], 2),
        (["status", "none"], 2),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else None,
)
def test_what_needs_nothing_heavy_imports_nothing_heavy(
    tmp_path: Path, arguments: list[str], code: int
) -> None:
    done, found = probed(*arguments, cwd=tmp_path)
    assert found == [str(code)]
    assert "loading" not in done.stderr


def test_importing_the_package_imports_next_to_nothing() -> None:
    code = (
        "import sys, megatron_stare; megatron_stare.UserError;"
        f" print([name for name in ('pydantic', 'yaml', *{HEAVY}) if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_train_says_what_it_loads_where_nobody_looks_too(tmp_path: Path) -> None:
    """And stdout, a configuration, is left alone."""
    done, found = probed("train", QUICKSTART, "model.path=none", "--dry-run", cwd=tmp_path)
    assert found[:2] == ["2", "torch"] and done.stdout == ""
    first, second, *_ = done.stderr.splitlines()
    assert first == "loading PyTorch and Megatron ..."
    assert second.startswith("error: ") and "none/config.json" in second


def test_other_commands_say_it_on_a_terminal_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done, found = probed("recipes", "dapo_qwen2.5_32b", cwd=tmp_path)
    assert found[:2] == ["0", "torch"] and "loading" not in done.stderr + done.stdout
    monkeypatch.delitem(sys.modules, "torch")
    signs_of_life.say_loading()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    signs_of_life.say_loading()
    assert capsys.readouterr() == ("", "loading PyTorch and Megatron ...\n")
    monkeypatch.setitem(sys.modules, "torch", signs_of_life)  # it is there: nothing takes long
    signs_of_life.say_loading(always=True)
    assert capsys.readouterr() == ("", "")


def test_settings_are_checked_before_the_method_and_the_method_after() -> None:
    told: list[str] = []
    with pytest.raises(ConfigError, match=r"run\.steps=0: run\.steps: must be at least 1"):
        load_config(
            QUICKSTART, ["algorithm.x=1", "run.steps=0"], before_method=lambda: told.append("")
        )
    assert told == []
    with pytest.raises(ConfigError, match=r"algorithm\.x=1: algorithm\.x: unknown name 'x'"):
        load_config(QUICKSTART, ["algorithm.x=1"], before_method=lambda: told.append("read"))
    assert told == ["read"]


def test_a_section_alone_is_that_of_the_whole() -> None:
    recipe = "recipes/dapo_qwen2.5_32b"
    whole = load_config(recipe)
    assert load_section(recipe, "parallel") == whole.parallel != load_config(QUICKSTART).parallel
    assert load_section(QUICKSTART, "moe") == load_config(QUICKSTART).moe


def test_counted_words() -> None:
    assert [signs_of_life.counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
