"""Holds names, arguments and minimum versions that megatron-core and this project ask of
Transformer Engine against facts of its release, which were read from its Python source: importing
it needs a GPU's libraries.

    pip download --no-deps transformer_engine==2.20.2 PYTHONPATH=.:tests python
    tests/megatron/test_transformer_engine_facts.py transformer_engine-2.20.2-*.whl FOLDER...

writes the facts anew, of the names that the megatron.core in each FOLDER asks for.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from packaging.version import Version as PkgVersion
from support import transformer_engine_stub as stub
from support.runs import ROOT

from megatron_stare.megatron.batching.packing import pack

FACTS = Path(__file__).parent / "transformer_engine_2_20.json"
TE = "transformer_engine"


class Asked(ast.NodeVisitor):
    """Names of Transformer Engine in one file, and its calls, but for branches that are for
    releases before ours.

    names: dotted -> whether it may be missing: imported in a `try`, or looked for first.
    calls: dotted name of what is called, "Class.forward" for `super().forward`; how many arguments
        it is given by place; the names of others.
    versions: all that a release is compared with.
    """

    def __init__(self, tree: ast.AST) -> None:
        self.names: dict[str, bool] = {}
        self.calls: list[tuple[str, int, list[str]]] = []
        self.versions: set[str] = set()
        self._aliases: dict[str, str] = {}
        self._bases: list[str | None] = [None]
        self._tried = 0
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self._aliases |= {
                    a.asname: a.name for a in node.names if a.asname and a.name.split(".")[0] == TE
                }
                if any(not a.asname and a.name.split(".")[0] == TE for a in node.names):
                    self._aliases[TE] = TE
            elif (
                isinstance(node, ast.ImportFrom)
                and not node.level
                and (node.module or "").split(".")[0] == TE
            ):
                self._aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        self.visit(tree)

    def visit_Try(self, node: ast.Try) -> None:
        self._tried += 1
        for each in (*node.body, *node.handlers):
            self.visit(each)
        self._tried -= 1
        for each in (*node.orelse, *node.finalbody):
            self.visit(each)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        known = _of_release(node.test)
        for each in (
            *(node.body if known is not False else ()),
            *(node.orelse if known is not True else ()),
        ):
            self.visit(each)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if (dotted := self._aliases.get(alias.asname or alias.name)) and not node.level:
                self._name(dotted)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if dotted := self._dotted(node):
            self._name(dotted)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._bases.append(next(filter(None, map(self._dotted, node.bases)), None))
        self.generic_visit(node)
        self._bases.pop()

    def visit_Call(self, node: ast.Call) -> None:
        by_place = sum(not isinstance(each, ast.Starred) for each in node.args)
        keywords = [each.arg for each in node.keywords if each.arg]
        if dotted := self._dotted(node.func):
            self.calls.append((dotted, by_place, keywords))
        function = ast.unparse(node.func)
        if (base := self._bases[-1]) and function in ("super().__init__", "super().forward"):
            self.calls.append(
                (
                    base + function.removeprefix("super()").replace(".__init__", ""),
                    by_place,
                    keywords,
                )
            )
        if function.endswith("is_te_min_version") and isinstance(node.args[0], ast.Constant):
            self.versions.add(str(node.args[0].value))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if "get_te_version()" in ast.unparse(node):
            self.versions |= {
                str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant)
            }
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """A keyword that is given by `extra_kwargs` to the base's constructor."""
        base = self._bases[-1]
        written = isinstance(node.ctx, ast.Store) and isinstance(node.slice, ast.Constant)
        if base and written and ast.unparse(node.value) == "extra_kwargs":
            self.calls.append((base, 0, [node.slice.value]))  # type: ignore[attr-defined]
        self.generic_visit(node)

    def _name(self, dotted: str) -> None:
        dotted = dotted.removesuffix(".__init__")
        self.names[dotted] = self.names.get(dotted, True) and self._tried > 0

    def _dotted(self, node: ast.AST) -> str | None:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        first = self._aliases.get(node.id) if isinstance(node, ast.Name) else None
        return ".".join([first, *reversed(parts)]) if first else None


def _of_release(test: ast.AST) -> bool | None:
    """Says if a condition on the release holds for ours, newer than any that is asked for; None: no
    such condition."""
    said = ast.unparse(test)
    if re.fullmatch(r"(HAVE_TE and )?is_te_min_version\([^()]*\)", said):
        return True
    return False if re.fullmatch(r"get_te_version\(\) < PkgVersion\([^()]*\)", said) else None


def asked_in(folder: Path) -> Iterator[tuple[str, Asked]]:
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text()
        if TE in text or "is_te_min_version" in text:
            yield str(file.relative_to(folder)), Asked(ast.parse(text))


class Source:
    """Transformer Engine's Python files, out of its wheel, and what a dotted name is in them."""

    def __init__(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            names = [
                name for name in archive.namelist() if name.startswith(TE) and name.endswith(".py")
            ]
            self.files = {name: archive.read(name) for name in names}

    def find(
        self, dotted: str, seen: frozenset[str] = frozenset()
    ) -> tuple[str, ast.AST | None] | None:
        """The file that a name is defined in, and its definition, if it is a class or a
        function."""
        module, _, name = dotted.rpartition(".")
        for file in (f"{dotted.replace('.', '/')}.py", f"{dotted.replace('.', '/')}/__init__.py"):
            if file in self.files:
                return file, None
        if not module or dotted in seen:
            return None
        seen |= {dotted}
        own = self._module(module)
        if own is None:
            return self._member(self.find(module, seen), name)
        file, tree = own
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return file, node
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                    return file, None
        package = module.split(".") if file.endswith("__init__.py") else module.split(".")[:-1]
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            start = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                if alias.name == "*" or (alias.asname or alias.name) == name:
                    if origin == f"{TE}_torch" and alias.name != "*":
                        return file, None  # compiled
                    target = name if alias.name == "*" else alias.name
                    if found := self.find(f"{origin}.{target}", seen):
                        return found
        return None

    def _member(
        self, owner: tuple[str, ast.AST | None] | None, name: str
    ) -> tuple[str, ast.AST | None] | None:
        """A method or a field of a class; any, where a base is not Transformer Engine's."""
        if owner is None or not isinstance(owner[1], ast.ClassDef):
            return None
        for node in owner[1].body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return owner[0], node
            if (
                isinstance(node, ast.Assign | ast.AnnAssign)
                and name in ast.unparse(node).split("=")[0]
            ):
                return owner[0], None
        return (owner[0], None) if "torch." in "".join(map(ast.unparse, owner[1].bases)) else None

    def _module(self, dotted: str) -> tuple[str, ast.Module] | None:
        for file in (f"{dotted.replace('.', '/')}.py", f"{dotted.replace('.', '/')}/__init__.py"):
            if file in self.files:
                return file, ast.parse(self.files[file])
        return None

    def parameters(self, file: str, node: ast.AST, method: str) -> list[str] | None:
        """Parameters of a function, or of a class's method, its base's where it has none of its
        own. "x=" may be left out, "*" stands before those that are given by name, "*x" and "**x"
        take any."""
        if isinstance(node, ast.FunctionDef):
            taken = _parameters(node.args)
            return taken[1:] if taken and taken[0] in ("self", "cls") else taken
        assert isinstance(node, ast.ClassDef)
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == method:
                return _parameters(each.args)[1:]
        declared = [
            each
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]
        if method == "__init__" and "dataclass" in "".join(map(ast.unparse, node.decorator_list)):
            return [f"{ast.unparse(each.target)}{'=' if each.value else ''}" for each in declared]
        for base in node.bases:
            found = self.find(f"{file.removesuffix('.py').replace('/', '.')}.{ast.unparse(base)}")
            if found and found[1] and (taken := self.parameters(*found, method)) is not None:
                return taken
        return None


def _parameters(args: ast.arguments) -> list[str]:
    places = [*args.posonlyargs, *args.args]
    least = len(places) - len(args.defaults)
    taken = [f"{each.arg}{'=' if i >= least else ''}" for i, each in enumerate(places)]
    if args.vararg or args.kwonlyargs:
        taken.append(f"*{args.vararg.arg if args.vararg else ''}")
    taken += [
        f"{each.arg}{'=' if d else ''}"
        for each, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    return [*taken, f"**{args.kwarg.arg}"] if args.kwarg else taken


def read_facts(wheel: Path, cores: list[Path]) -> dict[str, Any]:
    """Facts of every name that these megatron.core ask for: where it is, its parameters, None where
    it is nowhere."""
    source = Source(wheel)
    asked = [each for core in cores for _, each in asked_in(core)]
    dotted = {name for each in asked for name in each.names} | {
        call for each in asked for call, _, _ in each.calls
    }
    names: dict[str, Any] = {}
    for name in sorted(re.sub(r"\.(forward|__init__)$", "", each) for each in dotted):
        found = source.find(name)
        names[name] = None if found is None else {"file": found[0]}
        if found and found[1]:
            if (taken := source.parameters(*found, "__init__")) is not None:
                names[name]["takes"] = taken
            if forward := (
                source.parameters(*found, "forward") if isinstance(found[1], ast.ClassDef) else None
            ):
                names[name]["forward"] = forward
    files = {each["file"] for each in names.values() if each}
    return {
        "release": wheel.name.split("-")[1],
        "files": {file: hashlib.sha256(source.files[file]).hexdigest() for file in sorted(files)},
        "names": names,
    }


CORE = Path(megatron.core.__file__).parent
# asked for as a release before 2.20 had it, in a `try` whose other branch does without
GONE = {
    "transformer_engine.pytorch.attention._SplitAlongDim": (
        "SplitAlongDim of pytorch/utils.py; torch splits instead"
    ),
    "transformer_engine.pytorch.attention.apply_rotary_pos_emb": (
        "tried after attention.rope, which has it"
    ),
    "transformer_engine.pytorch.module.base.get_workspace": "the GEMM makes its own",
}
# from the compiled library, by a star import, so Python's source does not say whether they are
# there
COMPILED = {"transformer_engine.pytorch.cpp_extensions.rmsnorm_fwd"}
# what megatron-core gives and 2.20 does not take: each raises a TypeError there, and nothing here
# comes by
REFUSED = {
    (
        "transformer_engine.common.recipe.DelayedScaling",
        "override_linear_precision",
    ): "FP8 with delayed scaling",
    # of 0.16.1, which does without this product where `get_workspace` is missing, imported beside
    # it
    ("transformer_engine.pytorch.cpp_extensions.general_gemm", "workspace"): "routers' logits",
}


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return json.loads(FACTS.read_text())


@pytest.fixture(scope="module")
def asked() -> dict[str, Asked]:
    return dict(asked_in(CORE))


def test_every_name_is_there_or_may_be_missing(
    facts: dict[str, Any], asked: dict[str, Asked]
) -> None:
    names = {(name, tried) for each in asked.values() for name, tried in each.names.items()}
    # else: read the facts anew, for this megatron-core
    assert {name for name, _ in names} <= facts["names"].keys()
    missing = {(name, tried) for name, tried in names if facts["names"][name] is None}
    assert {name for name, _ in missing} - COMPILED - {
        f"{name}.apply" for name in GONE
    } <= GONE.keys()
    assert {name for name, tried in missing if not tried} <= COMPILED


def test_every_argument_is_taken(facts: dict[str, Any], asked: dict[str, Asked]) -> None:
    calls = [call for each in asked.values() for call in each.calls]
    assert (
        any(name.endswith("DotProductAttention.forward") for name, _, _ in calls)
        and len(calls) > 100
    )
    refused = set()
    for name, by_place, keywords in calls:
        method = re.fullmatch(r"(.*)\.(forward|__init__)", name)
        found = facts["names"][method[1] if method else name]
        takes = (found or {}).get("forward" if method and method[2] == "forward" else "takes")
        if takes is None:
            continue
        plain = [each.rstrip("=") for each in takes]
        places = plain[
            : next((i for i, each in enumerate(plain) if each.startswith("*")), len(plain))
        ]
        if not any(re.match(r"\*\w", each) for each in plain):
            assert by_place <= len(places), name
        if not any(each.startswith("**") for each in plain):
            refused |= {(name, keyword) for keyword in keywords if keyword not in plain}
    assert refused == REFUSED.keys() & {
        (name, keyword) for name, _, given in calls for keyword in given
    }


def test_packed_sequences_reach_the_attention(facts: dict[str, Any]) -> None:
    """Every field of packed sequences that megatron-core does not discard is given to the
    attention; ours has more fields, which are not Megatron's."""
    tree = ast.parse((CORE / "extensions/transformer_engine.py").read_text())
    attention = next(
        x
        for x in ast.walk(tree)
        if isinstance(x, ast.ClassDef) and x.name == "TEDotProductAttention"
    )
    discarded = set(
        re.findall(r"kept_packed_seq_params\.discard\(['\"](\w+)", ast.unparse(attention))
    )
    older = {
        "max_seqlen_q",
        "max_seqlen_kv",
        "cu_seqlens_q_padded",
        "cu_seqlens_kv_padded",
        "pad_between_seqs",
    }
    given = {field.name for field in fields(PackedSeqParams)} - (discarded - older)
    takes = {
        each.rstrip("=") for each in facts["names"][f"{TE}.pytorch.DotProductAttention"]["forward"]
    }
    assert given <= takes
    ours = pack([3, 5], torch.device("cpu")).to(torch.device("cpu"), bounds=True)
    bounds = {"cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "qkv_format"}
    assert {name for name in given if getattr(ours, name) is not None} == bounds
    # left at None: ours are padded in the lengths
    assert {"cu_seqlens_q_padded", "cu_seqlens_kv_padded"} <= given


def test_no_release_is_asked_for_that_is_newer(
    facts: dict[str, Any], asked: dict[str, Asked]
) -> None:
    """So that every condition on a release holds, as the other tests take it."""
    versions = {PkgVersion(each) for one in asked.values() for each in one.versions}
    assert len(versions) > 20
    assert max(versions) < PkgVersion(facts["release"])


def test_the_project_asks_for_what_the_release_has(facts: dict[str, Any]) -> None:
    image = (ROOT / "scripts/Containerfile").read_text()
    assert f"TRANSFORMER_ENGINE={facts['release']}" in image
    assert facts["release"] == stub.VERSION
    for one in (stub.Linear, stub.LayerNormLinear, stub.GroupedLinear, stub.RMSNorm):
        named = {
            each
            for kind in one.__mro__
            if kind.__module__ == stub.__name__
            for each in _named(kind)
        }
        takes = {
            each.rstrip("=") for each in facts["names"][f"{TE}.pytorch.{one.__name__}"]["takes"]
        }
        if one is stub.RMSNorm:
            named -= {"device"}  # goes through **kwargs to the norm in pytorch/ops
        assert named and named <= takes, one
    adam = {
        each.rstrip("=") for each in facts["names"][f"{TE}.pytorch.optimizers.FusedAdam"]["takes"]
    }
    # what megatron/optimizer/distributed_optimizer.py counts on: masters kept as the bits that a
    # parameter lacks
    assert {
        "master_weights",
        "use_decoupled_grad",
        "store_param_remainders",
        "exp_avg_dtype",
    } <= adam


def _named(kind: type) -> set[str]:
    """Names of the arguments that a class takes by itself."""
    taken = inspect.signature(vars(kind).get("__init__", lambda: None)).parameters.values()
    return {
        each.name
        for each in taken
        if each.name != "self" and each.kind is not inspect.Parameter.VAR_KEYWORD
    }


if __name__ == "__main__":
    wheel, *cores = map(Path, sys.argv[1:])
    facts = read_facts(wheel, cores)
    one_a_line = [
        f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in facts.pop("names").items()
    ]
    text = json.dumps(facts, indent=1).removesuffix("\n}")
    FACTS.write_text(f'{text},\n "names": {{\n' + ",\n".join(one_a_line) + "\n }\n}\n")
