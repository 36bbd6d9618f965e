"""Where a line of the package can be made wrong, and how: small changes of the syntax tree, one at a time.

Left out is what no number depends on: docstrings and other strings, annotations, what an error says, imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

Place = tuple[int, int]  # line, from 1, and column, from 0, in characters

# an operator's sign, and the one put in its place
OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
LOGIC = {ast.BitAnd, ast.BitOr}
# calls whose other one takes the same arguments
NAMES = {
    "min": "max",
    "max": "min",
    "all": "any",
    "any": "all",
    "amin": "amax",
    "amax": "amin",
    "sum": "mean",
    "mean": "sum",
    "clamp_min": "clamp_max",
    "clamp_max": "clamp_min",
    "minimum": "maximum",
    "maximum": "minimum",
    "exp": "expm1",
    "log": "log1p",
    "zeros": "ones",
    "zeros_like": "ones_like",
    "ones": "zeros",
    "ones_like": "zeros_like",
    "logical_and": "logical_or",
    "logical_or": "logical_and",
}
# methods without arguments that may be left out
DROPPED = {"detach", "abs", "clone", "exp", "log", "float", "double", "contiguous", "isfinite", "neg", "sqrt", "square"}


@dataclass(frozen=True)
class Mutant:
    """One change: `before` at (line, column) of a file becomes `after`. Lines count from 1, columns from 0, in
    characters; `end` is where `before` ends."""

    file: str
    line: int
    column: int
    end: Place
    kind: str
    before: str
    after: str

    def apply(self, source: str) -> str:
        """The file with the change.

        Raises:
            ValueError: the file is another than the one the mutant was drawn from.
        """
        lines = source.splitlines(keepends=True)
        start, end = _offset(lines, self.line, self.column), _offset(lines, *self.end)
        if source[start:end] != self.before:
            raise ValueError(f"{self.file}:{self.line} is no longer {self.before!r}")
        return source[:start] + self.after + source[end:]


def mutants_of(path: Path, name: str) -> list[Mutant]:
    """Every change of a file, in the order of its text; each still parses."""
    source = path.read_text()
    found = sorted(_Text(source, name).mutants(), key=lambda m: (m.line, m.column, m.kind, m.after))
    return [mutant for mutant in found if mutant.before != mutant.after and _parses(mutant.apply(source))]


class _Text:
    """A file, by places in it."""

    def __init__(self, source: str, name: str) -> None:
        self._source, self._name = source, name
        self._lines = source.splitlines(keepends=True)

    def mutants(self) -> Iterator[Mutant]:
        for node in _counting(ast.parse(self._source)):
            if isinstance(node, ast.BinOp):
                kind = "logic" if type(node.op) in LOGIC else "arithmetic"
                yield from self._operator(kind, node.left, node.op, node.right)
            elif isinstance(node, ast.BoolOp):
                for left, right in pairwise(node.values):
                    yield from self._operator("logic", left, node.op, right)
            elif isinstance(node, ast.Compare):
                for (left, right), op in zip(pairwise([node.left, *node.comparators]), node.ops, strict=True):
                    yield from self._operator("comparison", left, op, right)
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not, ast.Invert)):
                yield self._change("sign", self._span(node), f"({self._between(*self._span(node.operand))})")
            elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
                yield self._change("constant", self._span(node), str(not node.value))
            elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
                adds = isinstance(node.value, int) or node.value == 0
                yield self._change("constant", self._span(node), repr(node.value + 1 if adds else node.value * 2))
            elif isinstance(node, (ast.If, ast.While, ast.IfExp)) and _turned_whole(node):
                test = self._span(node.test)
                yield self._change("condition", test, f"not ({self._between(*test)})")
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                yield self._change("call left out", self._span(node.value), "pass")
            elif isinstance(node, ast.Call):
                yield from self._calls(node)

    def _operator(self, kind: str, left: ast.expr, op: ast.AST, right: ast.expr) -> Iterator[Mutant]:
        """The operator between two operands, as another."""
        if type(op) not in OPERATORS:
            return
        sign, other = OPERATORS[type(op)]
        gap = self._span(left)[1], self._span(right)[0]
        if (between := self._between(*gap)).count(sign) == 1:
            yield self._change(kind, gap, between.replace(sign, other))

    def _calls(self, node: ast.Call) -> Iterator[Mutant]:
        function = node.func
        if isinstance(function, ast.Attribute):
            after_value, end = self._span(function.value)[1], self._span(function)[1]
            if function.attr in NAMES:
                yield self._change("call", (after_value, end), f".{NAMES[function.attr]}")
            if function.attr in DROPPED and not node.args and not node.keywords:
                yield self._change("call left out", (after_value, self._span(node)[1]), "")
        elif isinstance(function, ast.Name) and function.id in NAMES:
            yield self._change("call", self._span(function), NAMES[function.id])

    def _change(self, kind: str, span: tuple[Place, Place], after: str) -> Mutant:
        start, end = span
        return Mutant(self._name, *start, end, kind, self._between(start, end), after)

    def _between(self, start: Place, end: Place) -> str:
        return self._source[_offset(self._lines, *start) : _offset(self._lines, *end)]

    def _span(self, node: ast.expr) -> tuple[Place, Place]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._place(node.lineno, node.col_offset), self._place(node.end_lineno, node.end_col_offset)

    def _place(self, line: int, column: int) -> Place:
        """The parser counts bytes."""
        return line, len(self._lines[line - 1].encode()[:column].decode())


def _turned_whole(node: ast.If | ast.While | ast.IfExp) -> bool:
    """Whether a condition has no operator that is changed in its place."""
    return isinstance(node, ast.IfExp) or isinstance(node.test, (ast.Name, ast.Attribute, ast.Call))


def _counting(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes under one, itself included, that something computed depends on."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Raise, ast.Assert, ast.JoinedStr, ast.arg)):
        return
    yield node
    parts: Iterable[ast.AST | None] = ast.iter_child_nodes(node)
    if isinstance(node, ast.AnnAssign):
        parts = [node.value]
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        parts = [*node.args.defaults, *node.args.kw_defaults, *node.body]
    elif isinstance(node, ast.ClassDef):  # not its decorators: whether a class is frozen moves no number
        parts = node.body
    for part in parts:
        if part is not None:
            yield from _counting(part)


def _offset(lines: list[str], line: int, column: int) -> int:
    return sum(map(len, lines[: line - 1])) + column


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
