"""What names of a release mean, found in its source without importing it: modules, classes, functions and members.

Names are dotted, from the package on. A name is followed through `from x import y`, `import x as y` and `y = x` to
where it is defined, in whatever branch of `if` and `try` that stands.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from upstream.signatures import Function, Parameter, Signature, fields_of, signature_of

_FOLLOWED = 20  # names handed on from module to module, at most


@dataclass(frozen=True)
class Definition:
    """What a name means.

    name: dotted, of the place where it is defined.
    module: that it is defined in.
    node: None of a module.
    owner: the class, of a member.
    method: that sets it, of a member that is set on `self`.
    """

    name: str
    module: Module
    node: ast.AST | None
    owner: Definition | None = None
    method: Function | None = None

    @property
    def kind(self) -> str:
        if self.node is None:
            return "module"
        if isinstance(self.node, ast.ClassDef):
            return "class"
        return "function" if isinstance(self.node, Function) else "value"


@dataclass
class Module:
    """One parsed file."""

    name: str
    is_package: bool
    tree: ast.Module

    @cached_property
    def names(self) -> dict[str, list[ast.AST]]:
        """What each name of the module is bound to, in order: definitions, assigned values, import statements."""
        found: dict[str, list[ast.AST]] = {}
        for node in bindings(self.tree.body):
            for name in bound_names(node):
                found.setdefault(name, []).append(node)
        return found

    @cached_property
    def words(self) -> frozenset[str]:
        """Every name, attribute, keyword and text literal of its code; docstrings count as one literal each."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            for part in ("id", "attr", "arg", "name", "value"):
                if isinstance(word := getattr(node, part, None), str):
                    found.add(word)
        return frozenset(found)

    @cached_property
    def read_in_functions(self) -> frozenset[str]:
        """Names that its functions read and do not bind themselves: those a substitution in the module reaches."""
        return frozenset(
            node.id
            for function in ast.walk(self.tree)
            if isinstance(function, Function)
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        )

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that a `from` names, dots resolved."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


def bindings(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body that bind names, those in branches too."""
    for node in body:
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for each in getattr(node, part, []):
                    yield from bindings(each.body if isinstance(each, ast.ExceptHandler) else [each])
        else:
            yield node


def bound_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef | Function):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
    if isinstance(node, (ast.AnnAssign, ast.AugAssign)) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    return []


class Source(Protocol):
    """Python files by their paths from where packages are installed."""

    @property
    def files(self) -> Collection[str]: ...

    def text(self, file: str) -> str: ...

    def holds(self, name: str) -> bool:
        """Whether a dotted name would be one of its own."""

    def top(self, name: str) -> str:
        """The module that a dotted name is looked up from."""


@dataclass
class Definitions:
    """The names of a release, or of this project.

    unread: files that this Python cannot parse, which count as absent.
    """

    source: Source
    unread: list[str] = field(default_factory=list)
    _modules: dict[str, Module | None] = field(default_factory=dict)

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> Module | None:
        stem = name.replace(".", "/")
        for file in (f"{stem}/__init__.py", f"{stem}.py"):
            if file in self.source.files:
                try:
                    return Module(name, file.endswith("__init__.py"), ast.parse(self.source.text(file)))
                except SyntaxError:
                    self.unread.append(file)
                    return None
        if any(file.startswith(stem + "/") for file in self.source.files):
            return Module(name, True, ast.Module([], []))  # a folder without __init__.py
        return None

    def find(self, name: str) -> Definition | None:
        """What a dotted name means; a member of a class may be one that it inherits, or sets on itself."""
        return self._find(name, _FOLLOWED)

    def _find(self, name: str, left: int) -> Definition | None:
        if not left or not self.source.holds(name):
            return None
        top, parts = self.source.top(name), name.split(".")
        for cut in range(len(parts) - 1, len(top.split(".")) - 1, -1):
            # what a package binds to a name goes before its module of that name
            module = self.module(".".join(parts[:cut]))
            found = Definition(module.name, module, None) if module is not None else None
            for part in parts[cut:]:
                found = self._part(found, part, left - 1) if found is not None else None
            if found is not None:
                return found
        module = self.module(name)
        return Definition(name, module, None) if module is not None else None

    def _part(self, of: Definition, name: str, left: int) -> Definition | None:
        if of.kind == "class":
            return self.member(of, name)
        if of.kind == "module":
            return self._global(of.module, name, left)
        return None

    def _global(self, module: Module, name: str, left: int) -> Definition | None:
        """A global of a module. Of several bindings the first that leads anywhere: others are fallbacks."""
        value: Definition | None = None
        for node in module.names.get(name, []):
            found = self._bound(module, name, node, left)
            if found is not None and found.kind != "value":
                return found
            value = value or found
        if value is not None:
            return value
        for star in module.names.get("*", []):
            source = self.module(module.absolute(star)) if isinstance(star, ast.ImportFrom) and left else None
            if source is not None and source is not module and (found := self._global(source, name, left - 1)):
                return found
        return self._submodule(module, name)

    def _submodule(self, module: Module, name: str) -> Definition | None:
        inner = self.module(f"{module.name}.{name}") if module.is_package else None
        return Definition(inner.name, inner, None) if inner is not None else None

    def _bound(self, module: Module, name: str, node: ast.AST, left: int) -> Definition | None:
        here = Definition(f"{module.name}.{name}", module, node)
        if isinstance(node, ast.ImportFrom):
            (alias,) = (each for each in node.names if (each.asname or each.name) == name)
            path = module.absolute(node)
            if not self.source.holds(path):
                return here  # of another package: the name is there, and no more is known
            if path == module.name:
                return self._submodule(module, alias.name)
            source = self.module(path)
            return self._global(source, alias.name, left - 1) if source is not None and left else None
        if isinstance(node, ast.Import):
            (alias,) = (a for a in node.names if (a.asname or a.name.split(".")[0]) == name)
            return self._find(alias.name if alias.asname else name, left) or here
        if isinstance(node, ast.Assign) and (path := dotted(node.value)):
            return self.in_module(module, path, left) or here
        return here

    def in_module(self, module: Module, path: str, left: int = _FOLLOWED) -> Definition | None:
        """What a dotted expression means in a module's code."""
        first, *rest = path.split(".")
        found = self._global(module, first, left - 1) if left else None
        for part in rest:
            found = self._part(found, part, left - 1) if found is not None else None
        return found

    def bases(self, cls: Definition) -> list[Definition]:
        """A class and all it inherits from in this release, nearest first."""
        found, waiting = [], [cls]
        while waiting:
            each = waiting.pop(0)
            if each.name in {known.name for known in found} or not isinstance(each.node, ast.ClassDef):
                continue
            found.append(each)
            paths = (dotted(base.value if isinstance(base, ast.Subscript) else base) for base in each.node.bases)
            waiting[:0] = [base for path in paths if path and (base := self.in_module(each.module, path))]
        return found

    def member(self, cls: Definition, name: str) -> Definition | None:
        """A method, field or attribute of a class, own or inherited; also one that a method sets on `self`."""
        for base in self.bases(cls):
            assert isinstance(base.node, ast.ClassDef)
            node = next((n for n in bindings(base.node.body) if name in bound_names(n)), None)
            if node is not None:
                return Definition(f"{base.name}.{name}", base.module, node, base)
            for method in (n for n in bindings(base.node.body) if isinstance(n, Function)):
                if (node := _set_on_self(method, name)) is not None:
                    return Definition(f"{base.name}.{name}", base.module, node, base, method)
        return None

    def signature(self, what: Definition) -> Signature | None:
        """How a function is called or a class made; None where the source does not say."""
        if what.kind == "function":
            return self._signature_of(what)
        if what.kind != "class":
            return None
        for name in ("__init__", "__new__"):
            if (made := self.member(what, name)) is not None and made.kind == "function":
                return self._signature_of(made, bound=True)
        fields = self.fields(what)
        return Signature(tuple(fields)) if fields else None

    def _signature_of(self, what: Definition, bound: bool = False) -> Signature:
        assert isinstance(what.node, Function)
        for decorator in what.node.decorator_list:
            if isinstance(decorator, ast.Call) and (dotted(decorator.func) or "").endswith("copy_signature"):
                path = dotted(decorator.args[0]) if decorator.args else None
                source = self.in_module(what.module, path) if path else None
                if source is not None and source.kind == "function":
                    copied = self._signature_of(source)
                    return replace(copied, returns=signature_of(what.node, False).returns)
        return signature_of(what.node, method=bound or what.owner is not None)

    def fields(self, cls: Definition) -> list[Parameter]:
        """The annotated fields of a dataclass or struct, inherited ones first; a class that redeclares one keeps its
        place."""
        found: dict[str, Parameter] = {}
        for base in reversed(self.bases(cls)):
            assert isinstance(base.node, ast.ClassDef)
            found |= {each.name: each for each in fields_of(base.node)}
        return list(found.values())


def dotted(node: ast.AST | None) -> str | None:
    """`a.b.c` of an expression that is names and dots alone."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _set_on_self(method: Function, name: str) -> ast.AST | None:
    """The first assignment to `self.name` in a method."""
    for node in ast.walk(method):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(
                dotted(each) == f"self.{name}" for target in targets for each in [target, *getattr(target, "elts", [])]
            ):
                return node
    return None
