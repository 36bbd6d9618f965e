"""What expressions of this project's source are: names of the upstream or of ours, or made of their classes.

Types come from calls of classes, from annotations of ours and upstream's, from what upstream's methods set on `self`,
and from declared.py.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from upstream.definitions import Definition, Definitions, Module, dotted
from upstream.signatures import Function


@dataclass(frozen=True)
class Named:
    """A module, class or function."""

    name: str


@dataclass(frozen=True)
class Made:
    """An instance of a class."""

    cls: str


@dataclass(frozen=True)
class Many:
    """A list, or anything to go through, of one kind of thing."""

    each: Value


@dataclass(frozen=True)
class Several:
    """A tuple."""

    parts: tuple[Value, ...]


@dataclass(frozen=True)
class Either:
    """One of some, which one depends on the run."""

    parts: tuple[Named | Made, ...]


Value = Named | Made | Many | Several | Either | None
Names = dict[str, Value]


class Types:
    """What names and annotations mean, ours and the upstream's together."""

    def __init__(self, own: Definitions, upstream: Definitions, content: Mapping[str, tuple[str, ...]]) -> None:
        """`content`: see declared.py."""
        self.own, self.upstream, self._declared = own, upstream, content

    def of(self, name: str) -> Definitions:
        return self.upstream if self.upstream.source.holds(name) else self.own

    def find(self, name: str) -> Definition | None:
        return self.of(name).find(name)

    def named(self, module: Module, path: str) -> Value:
        """What a dotted path means in the code of a module."""
        first, *rest = path.split(".")
        for node in module.names.get(first, []):
            if isinstance(node, ast.ImportFrom):
                (alias,) = (each for each in node.names if (each.asname or each.name) == first)
                return self.reached(".".join([f"{module.absolute(node)}.{alias.name}", *rest]))
            if isinstance(node, ast.Import):
                (alias,) = (a for a in node.names if (a.asname or a.name.split(".")[0]) == first)
                return self.reached(".".join([alias.name if alias.asname else first, *rest]))
        return self.reached(f"{module.name}.{path}") if first in module.names else None

    def reached(self, name: str) -> Value:
        known = self.upstream.source.holds(name) or self.own.source.holds(name)
        return Named(name) if known else None

    def annotated(self, node: ast.AST | None, module: Module) -> Value:
        """What has this annotation. Of a union, the first part that is known."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.annotated(ast.parse(node.value, mode="eval").body, module)
        if isinstance(node, ast.BinOp):
            return self.annotated(node.left, module) or self.annotated(node.right, module)
        if isinstance(node, ast.Subscript):
            outer = (dotted(node.value) or "").split(".")[-1]
            if outer in ("Literal", "Callable"):
                return None
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            inner = tuple(self.annotated(part, module) for part in parts)
            if outer in ("Optional", "Union", "Annotated", "Final", "ClassVar"):
                return next((part for part in inner if part), None)
            if outer in ("tuple", "Tuple") and not (len(parts) == 2 and ast.unparse(parts[1]) == "..."):
                return Several(inner) if any(inner) else None
            return Many(inner[-1] if outer in ("dict", "Dict", "Mapping") else inner[0]) if any(inner) else None
        path = dotted(node)
        value = self.named(module, path) if path else None
        found = self.find(value.name) if isinstance(value, Named) else None
        return Made(value.name) if isinstance(value, Named) and found is not None and found.kind == "class" else None

    def member(self, cls: str, name: str) -> tuple[str, Value] | None:
        """The dotted name of a member and what it is; None if the class, as far as it can be read, has none."""
        for base in self.lineage(cls):
            defs = self.of(base)
            definition = defs.find(base)
            found = defs.member(definition, name) if definition is not None else None
            if found is not None:
                return f"{base}.{name}", self._content(f"{base}.{name}", found)
        return None

    def lineage(self, cls: str) -> list[str]:
        """A class and its nearest ancestors of the other side: those of ours end where upstream's begin."""
        definition = self.find(cls)
        if definition is None or not isinstance(definition.node, ast.ClassDef):
            return []
        found = [cls]
        if not self.upstream.source.holds(cls):
            for base in definition.node.bases:
                value = self.named(definition.module, dotted(base) or "")
                found += self.lineage(value.name) if isinstance(value, Named) else []
        return found

    def upstream_base(self, cls: str) -> str | None:
        return next((base for base in self.lineage(cls) if self.upstream.source.holds(base)), None)

    def declared(self, name: str, found: Definition) -> Value:
        """What declared.py says that this is, or answers."""
        given = self._declared.get(name) or self._declared.get(found.name) or ()
        of = [self.find(each) for each in given if each != "each"]
        parts = tuple(
            Named(each.name) if each.kind == "function" else Made(each.name) for each in of if each is not None
        )
        value = (parts[0] if len(parts) == 1 else Either(parts)) if parts else None
        return Many(value) if "each" in given else value

    def _content(self, name: str, found: Definition) -> Value:
        node = found.node
        if (declared := self.declared(name, found)) is not None:
            return declared
        if isinstance(node, Function):
            if any("property" in ast.unparse(each) for each in node.decorator_list):
                return self.annotated(node.returns, found.module)
            return Named(name)
        if isinstance(node, ast.AnnAssign):
            return self.annotated(node.annotation, found.module)
        if isinstance(node, ast.Assign):
            if isinstance(node.value, ast.Call) and (path := dotted(node.value.func)):
                value = self.named(found.module, path)
                definition = self.find(value.name) if isinstance(value, Named) else None
                return (
                    Made(value.name) if isinstance(value, Named) and definition and definition.kind == "class" else None
                )
            if isinstance(node.value, ast.Name) and found.method is not None:
                given = [each for each in ast.walk(found.method.args) if isinstance(each, ast.arg)]
                same = (each for each in given if each.arg == node.value.id)
                return next((self.annotated(each.annotation, found.module) for each in same), None)
        return None

    def answer(self, name: str) -> Value:
        """What a call of this function or class gives."""
        found = self.find(name)
        if found is None:
            return None
        if found.kind == "class":
            return Made(name)
        if (declared := self.declared(name, found)) is not None:
            return declared
        return self.annotated(found.node.returns, found.module) if isinstance(found.node, Function) else None
