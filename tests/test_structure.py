"""The house keeps its shape: imports run downwards, loss code never waits for the host."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support import house
from support.house import PACKAGE, imports

from megatron_stare.models import FAMILIES as MODEL_FAMILIES

FILES = sorted(PACKAGE.rglob("*.py"))
OPENERS = {"What", "Of", "As", "That", "Those", "It", "Whether", "Who", "Where"}


def here(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


TOP = {"__init__", "cli", "errors", "registry", "train"}
SERVED = "rollout/engines/sglang"
ONLY_IN = {
    "ray": {"cluster/ray.py", "cluster/ray_tokens.py"},
    "megatron.core": {"megatron/", "select/slime.py"},  # slime's ranks are Megatron's
    # the server's environment has them, the trainer's has not
    "sglang": {
        f"{SERVED}/{name}.py"
        for name in ("cpu_platform", "cpu_platform_class", "serve", "flag_check")
    },
    "transformers": {"rollout/", "models/rope.py", "environments/tools.py"},
}

# comparisons with a string that is also the name of something registered, and why each may be
COMPARED = {
    (
        "algorithms/grpo_s.py",
        "arithmetic",
    ): "a kind of mean, not the verifier or the source of that name",
    (
        "config/load.py",
        "jsonl",
    ): "whether data.path and data.eval_path are files, whose names are made to hold in any folder",
    (
        "environments/environment.py",
        "environment",
    ): "whether the verifier of that name stands for the environment, which then must judge",
    ("config/load.py", "files"): "the same source by its newer name",
    (
        "config/formats.py",
        "sglang",
    ): "whether an older configuration's section of that name had a reader",
    (
        "config/schema.py",
        "sglang",
    ): "whether the section of that name, config's own, has a reader in this run",
}


def test_every_file_says_what_it_is_for() -> None:
    silent = [here(file) for file in FILES if not ast.get_docstring(ast.parse(file.read_text()))]
    assert silent == []


def opened_badly(source: str) -> list[str]:
    """First lines of the docstrings that open with one of OPENERS."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, documented))
    docs = [doc for node in nodes if (doc := ast.get_docstring(node))]
    return [
        doc.splitlines()[0]
        for doc in docs
        if (word := re.match(r"\w+", doc)) and word[0] in OPENERS
    ]


def test_docstrings_open_with_a_verb_or_with_the_noun_that_they_define() -> None:
    """None of the nine words of OPENERS says what a function does or gives."""
    folders = ("megatron_stare", "tools", "tests", "benchmarks")
    listed = ["git", "ls-files", *(f"{folder}/*.py" for folder in folders)]
    files = subprocess.run(
        listed, cwd=house.ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {file.partition("/")[0] for file in files} == {*folders}
    bad = {
        file: lines for file in files if (lines := opened_badly((house.ROOT / file).read_text()))
    }
    assert bad == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""What a module is for."""', ["What a module is for."]),
        ('class Of:\n """It: a class.\n\n Whole.\n """', ["It: a class."]),
        ('class Step:\n async def at(self):\n  """Where it is."""', ["Where it is."]),
        ('def end():\n """Ends what is begun."""\n def ended():\n  """Asks, as it is."""', []),
        ('"""Italic words, Asked for."""', []),
        ("'What is no docstring' and 1", []),
    ],
)
def test_a_docstring_that_opens_badly_is_seen(source: str, found: list[str]) -> None:
    assert opened_badly(source) == found


def test_upstreams_are_imported_where_they_may_be() -> None:
    found = {name: set() for name in ONLY_IN}
    for file in FILES:
        for name in imports(file):
            for upstream, places in ONLY_IN.items():
                if name == upstream or name.startswith(upstream + "."):
                    found[upstream].add(here(file))
                    assert any(here(file).startswith(place) for place in places), (
                        f"{here(file)} imports {name}"
                    )
    assert all(found.values()), "the rule looks for nothing"


def test_at_top_level_is_nothing_new() -> None:
    assert {file.stem for file in PACKAGE.glob("*.py")} == TOP


def test_what_is_no_module_is_part_of_a_wheel() -> None:
    """A file that moves takes its line of package-data along."""
    lines = (
        (house.ROOT / "pyproject.toml").read_text().partition("[tool.setuptools.package-data]")[2]
    )
    patterns = re.findall(
        r'^"megatron_stare\.([\w.]+)" = \[(.+)\]$', lines.partition("\n\n")[0], re.MULTILINE
    )
    packed = {
        file for folder, globs in patterns for glob in re.findall('"(.+?)"', globs)
        for file in (PACKAGE / folder.replace(".", "/")).glob(glob)
    }  # fmt: skip
    left = {
        file for file in PACKAGE.rglob("*") if file.is_file() and file.suffix not in {".py", ".pyc"}
    }
    assert packed == left - {*(PACKAGE / "share").rglob("*")}


def test_the_command_line_starts_without_what_takes_long_to_import() -> None:
    """Nor has a supervisor, which is the command line alone, threads of such a library."""
    code = (
        "import sys, megatron_stare.cli; print([name for name in ('torch', 'ray', 'numpy') if name"
        " in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=house.ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_imports_run_downwards() -> None:
    """Between folders; within one, files may import each other."""
    assert house.circle() == []


def test_the_picture_of_the_house_is_true() -> None:
    """A new arrow is a decision: whoever adds one draws the house again and sees it in the page."""
    page = house.PAGE.read_text()
    drawn = page.partition(house.BEGIN)[2].partition(house.END)[0]
    assert drawn.strip() == house.picture().strip(), "python tests/support/house.py draws it again"


def test_a_circle_between_folders_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert house.circle() == []
    drawn = {**house.arrows(), "errors": frozenset({"driver"})}
    monkeypatch.setattr(house, "arrows", lambda: drawn)
    way = house.circle()
    assert way[0] == way[-1] and {"errors", "driver"} <= {*way}


def test_files_of_tests_have_names_of_their_own() -> None:
    """Two of one name, in whatever folders, end a collection: pytest imports them as modules of
    that name."""
    names = Counter(file.name for file in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, files in names.items() if files > 1] == []


def test_algorithms_and_ops_do_not_know_each_other() -> None:
    for file in FILES:
        for name in imports(file):
            assert not (house.room(file) == "algorithms" and name.startswith("megatron_stare.ops"))
            assert not (house.room(file) == "ops" and name.startswith("megatron_stare.algorithms"))


def test_a_model_family_is_named_in_its_own_file_alone() -> None:
    naming: dict[str, set[str]] = {family: set() for family in MODEL_FAMILIES}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                naming.get(node.value, set()).add(here(file))
    assert naming == {family: {f"models/{family}.py"} for family in MODEL_FAMILIES}


def registries() -> dict[str, set[str]]:
    """The names that every file registers: the keys of its tables of dotted paths, and the families
    by their files."""
    found = {f"models/{family}.py": {family} for family in MODEL_FAMILIES}
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            table = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
            if isinstance(table, ast.Dict) and table.values and all(map(dotted_path, table.values)):
                names = {key.value for key in table.keys if isinstance(key, ast.Constant)}
                found.setdefault(here(file), set()).update(names)
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
    literals = (
        node.value for side in sides for node in ast.walk(side) if isinstance(node, ast.Constant)
    )
    return {value for value in literals if isinstance(value, str)}


def test_what_is_registered_is_found_by_its_registry_and_named_in_no_if() -> None:
    """Families, tasks, environments, methods, engines, verifiers and sinks: one more of them is no
    branch elsewhere."""
    registered = registries()
    assert {
        "algorithms/__init__.py",
        "environments/__init__.py",
        "rewards/verifier.py",
        "rollout/engines/replicas.py",
    } < {*registered}
    names = set().union(*registered.values())
    assert {"stare", "single_turn", "math", "sglang", "qwen3_moe"} < names
    compared = {
        (here(file), name)
        for file in FILES
        for name in compared_strings(ast.parse(file.read_text()))
        & (names - registered.get(here(file), set()))
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


def test_the_driver_reads_like_the_algorithm() -> None:
    """Its loop is four verbs, and nothing else in the file is a loop."""
    source = (PACKAGE / "train.py").read_text()
    assert len(source.splitlines()) <= 60
    (loop,) = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.For | ast.While)
    )
    assert ast.unparse(loop).splitlines() == [
        "for step in run.steps():",
        "    batch = run.rollouts.next(step)",
        "    result = run.trainer.step(batch)",
        "    run.rollouts.publish(run.trainer.weights(), step)",
        "    run.monitor.log(step, batch, result)",
    ]


def test_loss_code_does_not_wait_for_the_host() -> None:
    files = [file for file in FILES if house.room(file) in {"algorithms", "ops"}]
    assert len(files) > 30
    for file in files:
        calls = {
            node.func.attr
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        assert not calls & {"item", "tolist", "cpu", "synchronize"}, here(file)


@pytest.mark.parametrize(
    ("name", "places"),
    [
        # a shape that ships is read like any; a reference is held against the policy's; conversion
        # has no run
        (
            "read_shape",
            {
                "models/__init__.py",
                "config/resolved.py",
                "planning/preflight.py",
                "weights/files/convert.py",
            },
        ),
        ("algorithm.method", {"config/resolved.py"}),
    ],
)
def test_a_run_s_model_and_method_are_resolved_in_one_place(name: str, places: set[str]) -> None:
    using = {
        here(file)
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node).endswith(name)
    }
    assert using == places


def test_event_loops_are_run_where_signals_are_known() -> None:
    """Elsewhere a signal would not end what the loop runs."""
    names = {"run_until_complete", "asyncio.run", "asyncio.Runner"}
    using = {
        here(file)
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and names & {node.attr, ast.unparse(node)}
    }
    assert using == {"process/interruption.py"}


UPSTREAM = PACKAGE / "megatron/upstream"


def test_releases_of_megatron_core_differ_in_one_folder() -> None:
    """Elsewhere in the package that imports it nothing asks for its release, or looks for what it
    may lack. A file of Transformer Engine's is looked for as a whole."""
    asked = {"hasattr", "inspect.signature", "importlib.metadata.version"}
    found = set()
    for file in sorted((PACKAGE / "megatron").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())) if UPSTREAM not in file.parents else ():
            called = isinstance(node, ast.Call) and ast.unparse(node.func) in asked
            version = isinstance(node, ast.ImportFrom) and "__version__" in {
                name.name for name in node.names
            }
            caught = isinstance(node, ast.ExceptHandler) and "ImportError" in ast.unparse(
                node.type or ast.Name("all")
            )
            if called or version or caught:
                found.add((here(file), ast.unparse(node)[:60]))
    assert found == set()


def test_every_release_of_megatron_core_has_the_same_names() -> None:
    """Read, not imported: only one release is installed."""
    trees = {file.stem: ast.parse(file.read_text()) for file in UPSTREAM.glob("core_*.py")}
    names = {
        stem: {
            name
            for node in tree.body
            for name in (
                [node.name]
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
                else (
                    [
                        ast.unparse(target)
                        for target in getattr(node, "targets", [getattr(node, "target", None)])
                        if target
                    ]
                    if isinstance(node, ast.Assign | ast.AnnAssign)
                    else []
                )
            )
            if not name.startswith("_")
        }
        for stem, tree in trees.items()
    }
    taken = {
        name.name
        for node in ast.walk(ast.parse((UPSTREAM / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron_stare")
        for name in node.names
    }
    assert len(names) == 2 and all(own == taken for own in names.values()), names
