"""Parameters and fields as their source spells them, and the bodies of functions without what only people read."""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function, or field of a class.

    default: as written; None: required.
    place: among those that may be given by position, from 0; None: by name alone.
    """

    name: str
    default: str | None
    place: int | None = None


@dataclass(frozen=True)
class Signature:
    """What a call may pass. `more_names` and `more_places`: **kwargs and *args are taken; `returns`: as
    annotated, in one spelling."""

    parameters: tuple[Parameter, ...]
    more_names: bool = False
    more_places: bool = False
    returns: str | None = None

    def named(self, name: str) -> Parameter | None:
        return next((each for each in self.parameters if each.name == name), None)

    def at(self, place: int) -> Parameter | None:
        return next((each for each in self.parameters if each.place == place), None)


def signature_of(node: Function, method: bool) -> Signature:
    """Of a function; of a method without `self` or `cls`."""
    arguments = node.args
    decorators = {each.id for each in node.decorator_list if isinstance(each, ast.Name)}
    places = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(places) - len(arguments.defaults)) + list(arguments.defaults)
    skipped = 1 if method and "staticmethod" not in decorators else 0
    found = [
        Parameter(each.arg, _spelled(default), place)
        for place, (each, default) in enumerate(list(zip(places, defaults, strict=True))[skipped:])
    ]
    found += [
        Parameter(each.arg, _spelled(default))
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    more = arguments.kwarg is not None, arguments.vararg is not None
    return Signature(tuple(found), *more, returns=_one_spelling(node.returns))


def _one_spelling(annotation: ast.expr | None) -> str | None:
    """An annotation, however it writes unions, quotes and the names of typing: parts of unions in order of letters."""
    if annotation is None:
        return None
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    return "|".join(sorted(_union(annotation)))


def _union(node: ast.expr) -> set[str]:
    if isinstance(node, ast.BinOp):
        return _union(node.left) | _union(node.right)
    if isinstance(node, ast.Subscript):
        outer = ast.unparse(node.value).split(".")[-1]
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if outer in ("Union", "Optional"):
            return {each for part in parts for each in _union(part)} | ({"None"} if outer == "Optional" else set())
        inner = ",".join("|".join(sorted(_union(part))) for part in parts)
        return {f"{outer.lower()}[{inner}]"}
    return {ast.unparse(node).split(".")[-1].strip("'")}


def fields_of(node: ast.ClassDef) -> list[Parameter]:
    """The annotated fields that a class itself declares."""
    return [
        Parameter(each.target.id, _spelled(each.value))
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        if "ClassVar" not in ast.unparse(each.annotation)
    ]


def _spelled(node: ast.expr | None) -> str | None:
    return None if node is None else ast.unparse(node)


def decorators(node: Function) -> list[str]:
    return [ast.unparse(each) for each in node.decorator_list]


class _Plain(ast.NodeTransformer):
    """Takes docstrings and annotations away."""

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node, Function | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, Function):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            return ast.Assign([node.target], node.value)
        return node


def body_of(node: ast.AST) -> str:
    """What a function does, as one comparable text: without comments, docstrings and annotations."""
    plain = _Plain().visit(copy.deepcopy(node))
    return "\n".join(ast.dump(each) for each in getattr(plain, "body", []))
