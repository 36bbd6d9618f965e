"""The house keeps its shape: imports run downwards, files stay short, loss code never waits for the host."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from megatron_stare.config.schema import SGLangConfig
from megatron_stare.models import FAMILIES as MODEL_FAMILIES

PACKAGE = Path(__file__).parent.parent / "megatron_stare"
FILES = sorted(PACKAGE.rglob("*.py"))

# a package may import those of lower levels, and itself; of `run` it is every file that has a level
LEVELS = {
    "errors": 0,
    "vector_maths": 0,
    "interruption": 0,
    "recovery": 0,
    "quiet": 0,
    "time_limit": 1,
    "shipped": 0,
    "whole_words": 0,
    "batch": 0,
    "records": 1,
    "models": 1,
    "registry": 1,
    "workers": 1,
    "network": 1,
    "metric": 0,
    "heap": 0,
    "installed": 0,
    "algorithms": 2,
    "ops": 2,
    "config": 3,
    "weights": 4,
    "data": 4,
    "rewards": 4,
    "environments": 4,
    "evaluation": 3,
    "observability": 4,
    "layout_rules": 4,
    "moe_rules": 4,
    "activation_memory": 4,
    "memory_budget": 4,
    "performance": 4,
    "process_settings": 4,
    "resolved": 4,
    "device_rules": 4,
    "tasks": 5,
    "rollout": 5,
    "megatron": 5,
    "black_box": 5,
    "run_state": 5,
    "supervision": 5,
    "run.evaluate": 5,
    "run.evaluation_folder": 6,
    "run.evaluator": 6,
    "orchestration": 6,
    "run.preflight": 6,
    "run.memory_check": 6,
    "run.resuming": 6,
    "run.status": 6,
    "run.prompt_inputs": 6,
    "run.opening": 7,
    "run.recipes_command": 7,
    "run.offline_evaluation": 7,
    "planning": 7,
    "doctor": 7,
    "run.held_run": 8,
    "run.session": 9,
    "run.eval_command": 8,
    "run.views": 8,
    "train": 10,
    "bisecting": 11,
    "cli": 12,
}
ONLY_IN = {
    "ray": {"orchestration/ray.py"},
    "megatron.core": {"megatron/"},
    # the server's environment has them, the trainer's has not
    "sglang": {f"rollout/sglang/{name}.py" for name in ("cpu_platform", "cpu_platform_class", "serve", "flag_check")},
    "transformers": {"rollout/", "models/rope.py"},
}

# comparisons with a string that is also the name of something registered, and why each may be
COMPARED = {
    ("algorithms/grpo_s.py", "arithmetic"): "a kind of mean, not the verifier or the source of that name",
    (
        "config/load.py",
        "jsonl",
    ): "whether data.path and data.eval_path are files, whose names are made to hold in any folder",
    ("config/load.py", "files"): "the same source by its newer name",
    ("config/formats.py", "sglang"): "whether an older configuration's section of that name had a reader",
    ("config/schema.py", "sglang"): "whether the section of that name, config's own, has a reader in this run",
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
    """What has a level: of `a/b.py`, or `a.b.C` as it is imported, the package; of `run` the file."""
    first, *rest = path.removesuffix(".py").replace("/", ".").split(".")
    return f"{first}.{rest[0]}" if first == "run" and rest else first


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
        if name.startswith("megatron_stare.") and (other := unit(name.removeprefix("megatron_stare."))) in LEVELS:
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


def registries() -> dict[str, set[str]]:
    """The names that every file registers: the keys of its tables of dotted paths, and the families by their files."""
    found = {f"models/{family}.py": {family} for family in MODEL_FAMILIES}
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            table = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
            if isinstance(table, ast.Dict) and table.values and all(map(dotted_path, table.values)):
                names = {key.value for key in table.keys if isinstance(key, ast.Constant)}
                found.setdefault(str(file.relative_to(PACKAGE)), set()).update(names)
    return found


def dotted_path(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and str(node.value).startswith("megatron_stare.")


def compared_strings(tree: ast.AST) -> set[str]:
    """String literals on either side of a comparison, or in a pattern of a `match`."""
    sides: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides += [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides.append(node.value)
    literals = (node.value for side in sides for node in ast.walk(side) if isinstance(node, ast.Constant))
    return {value for value in literals if isinstance(value, str)}


def test_what_is_registered_is_found_by_its_registry_and_named_in_no_if() -> None:
    """Families, tasks, environments, methods, engines, verifiers and sinks: one more of them is no branch elsewhere."""
    registered = registries()
    assert {"algorithms/__init__.py", "environments/__init__.py", "rewards/verifier.py", "rollout/replicas.py"} < {
        *registered
    }
    names = set().union(*registered.values())
    assert {"stare", "single_turn", "math", "sglang", "qwen3_moe"} < names
    compared = {
        (here, name)
        for file in FILES
        for here in [str(file.relative_to(PACKAGE))]
        for name in compared_strings(ast.parse(file.read_text())) & (names - registered.get(here, set()))
    }
    assert compared == COMPARED.keys()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("if config.rollout.engine == 'sglang': pass", {"sglang"}),
        ("x = 1 if 'dapo' != name else 2", {"dapo"}),
        ("while name in ('math', 'jsonl'): pass", {"math", "jsonl"}),
        ("match name:\n case 'stare' | 'grpo': pass", {"stare", "grpo"}),
        ("engine = made['local']", set()),
    ],
)
def test_a_comparison_is_seen_however_it_is_written(source: str, found: set[str]) -> None:
    assert compared_strings(ast.parse(source)) == found


def test_sglang_is_named_in_its_folder_the_registry_and_config_alone() -> None:
    """In code, comments and texts. A setting's full name (`sglang.colocated`) is config's word, whoever reads it."""
    setting = re.compile(rf"\bsglang\.({'|'.join(SGLangConfig.model_fields)})\b")
    naming = {str(file.relative_to(PACKAGE)) for file in FILES if "sglang" in setting.sub("", file.read_text()).lower()}
    elsewhere = {name for name in naming if not name.startswith(("rollout/sglang/", "config/"))}
    assert elsewhere == {"rollout/replicas.py"}


def test_no_two_modules_have_one_name() -> None:
    names = Counter(file.stem for file in FILES if file.stem != "__init__")
    assert {name for name, files in names.items() if files > 1} == set()
    assert names.keys() & sys.stdlib_module_names == set()


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


@pytest.mark.parametrize(
    ("name", "places"),
    [
        # a shape that ships is read like any; a reference is held against the policy's; conversion has no run
        ("read_shape", {"models/__init__.py", "resolved.py", "run/preflight.py", "weights/convert.py"}),
        ("algorithm.method", {"resolved.py"}),
    ],
)
def test_a_run_s_model_and_method_are_resolved_in_one_place(name: str, places: set[str]) -> None:
    using = {
        str(file.relative_to(PACKAGE))
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node).endswith(name)
    }
    assert using == places


def test_event_loops_are_run_where_signals_are_known() -> None:
    """Elsewhere a signal would raise between a coroutine and its task, or in the middle of a loop."""
    names = {"run_until_complete", "run_coroutine_threadsafe", "asyncio.run", "asyncio.Runner"}
    using = {
        str(file.relative_to(PACKAGE))
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and names & {node.attr, ast.unparse(node)}
    }
    assert using == {"interruption.py"}
