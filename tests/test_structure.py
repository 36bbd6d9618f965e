"""The house keeps its shape: imports run downwards, files stay short, loss code never waits for the host."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megatron_stare.models import FAMILIES as MODEL_FAMILIES
from megatron_stare.observability.sinks import SINKS

PACKAGE = Path(__file__).parent.parent / "megatron_stare"
FILES = sorted(PACKAGE.rglob("*.py"))

# a package may import those of lower levels, and itself
LEVELS = {
    "errors": 0,
    "vector_maths": 0,
    "interruption": 0,
    "quiet": 0,
    "shipped": 0,
    "batch": 0,
    "statistics": 0,
    "records": 1,
    "config": 1,
    "algorithms": 2,
    "models": 1,
    "registry": 1,
    "workers": 1,
    "methods": 3,
    "weights": 2,
    "ops": 2,
    "data": 3,
    "rewards": 3,
    "environments": 3,
    "rollout": 4,
    "megatron": 4,
    "observability": 3,
    "orchestration": 5,
    "run_state": 4,
    "evaluate": 4,
    "layout_rules": 3,
    "device_rules": 2,
    "preflight": 5,
    "resuming": 5,
    "opening": 6,
    "session": 7,
    "train": 8,
    "cli": 9,
}
ONLY_IN = {
    "ray": {"orchestration/ray.py"},
    "megatron.core": {"megatron/"},
    # the server's environment has them, the trainer's has not
    "sglang": {f"rollout/sglang/{name}.py" for name in ("cpu_platform", "cpu_platform_class", "serve")},
    "transformers": {"rollout/", "preflight.py", "models/rope.py"},
}


def imports(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def unit(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_file(file: Path) -> None:
    here = str(file.relative_to(PACKAGE))
    source = file.read_text()
    assert len(source.splitlines()) <= 450, "a second reason to exist?"
    assert ast.get_docstring(ast.parse(source)), "say what the file is for"
    if unit(here) == "__init__":
        return
    for name in imports(file):
        for guarded, places in ONLY_IN.items():
            if name == guarded or name.startswith(guarded + "."):
                assert any(here == place or (place.endswith("/") and here.startswith(place)) for place in places), name
        if name.startswith("megatron_stare.") and (other := name.split(".")[1]) in LEVELS:
            assert other == unit(here) or LEVELS[other] < LEVELS[unit(here)], f"{here} imports {other}"


def test_algorithms_and_ops_do_not_know_each_other() -> None:
    for file in FILES:
        here = unit(str(file.relative_to(PACKAGE)))
        for name in imports(file):
            assert not (here == "algorithms" and name.startswith("megatron_stare.ops"))
            assert not (here == "ops" and name.startswith("megatron_stare.algorithms"))


def test_a_model_family_is_named_in_its_own_file_alone() -> None:
    for family in MODEL_FAMILIES:
        naming = {
            str(file.relative_to(PACKAGE))
            for file in FILES
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Constant) and node.value == family
        }
        assert naming == {f"models/{family}.py"}


def test_a_sink_is_a_file_and_nothing_asks_for_its_name() -> None:
    places = {path.rpartition(".")[0] for path in SINKS.values()}
    files = {file.stem for file in (PACKAGE / "observability/sinks").glob("*.py")} - {"__init__"}
    assert places == {f"megatron_stare.observability.sinks.{name}" for name in files} and len(files) == len(SINKS)
    for file in FILES:
        if unit(str(file.relative_to(PACKAGE))) in ("config", "data"):
            continue  # where a source of prompts is called jsonl
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare | ast.MatchValue):
                found = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                assert not found & SINKS.keys(), f"{file}:{node.lineno}"
        if file.parent.name != "sinks":
            assert not {name for name in imports(file) if ".sinks." in name and not name.endswith(".SINKS")}, file


def test_the_driver_reads_like_the_algorithm() -> None:
    """Its loop is four verbs, and nothing else in the file is a loop."""
    source = (PACKAGE / "train.py").read_text()
    assert len(source.splitlines()) <= 60
    (loop,) = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.For | ast.While))
    assert ast.unparse(loop).splitlines() == [
        "for step in run.steps():",
        "    batch = run.rollouts.next(step)",
        "    result = run.trainer.step(batch)",
        "    run.rollouts.publish(run.trainer.weights(), step)",
        "    run.monitor.log(step, batch, result)",
    ]


@pytest.mark.parametrize("file", [f for f in FILES if f.parent.name in ("algorithms", "ops")], ids=lambda f: f.name)
def test_loss_code_does_not_wait_for_the_host(file: Path) -> None:
    calls = {
        node.func.attr
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert not calls & {"item", "tolist", "cpu", "synchronize"}
