"""Reads one of this project's files for what it uses of an upstream, with as much of types as annotations tell.

An expression is a name of the upstream or of ours, something made of such a class, many of them, or unknown. Types come
from calls of classes, from annotations of ours and upstream's, and from what upstream's methods set on `self`.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Container, Iterator

from upstream.definitions import Module, bindings, bound_names
from upstream.signatures import Function
from upstream.uses import Arguments, Use
from upstream.values import Either, Made, Many, Named, Names, Several, Types, Value

_SCRIPT = re.compile(r"\b(from|import) (megatron\.core|sglang)\b")
_LIKE_ITS_ARGUMENT = {"enumerate": 1, "list": 0, "tuple": 0, "reversed": 0, "sorted": 0, "iter": 0, "next": -1}
_ASKING = {"get", "post", "_call"}  # of an HTTP client
_PATH = re.compile(r"/[a-z_]+")
_SAME = {"to", "cuda", "cpu", "eval", "train", "requires_grad_", "half", "bfloat16", "float"}  # of torch's modules


class Reader:
    """Goes through one file once; `uses` is what it found."""

    def __init__(self, types: Types, module: Module, shown: str, plugs_in: bool = True) -> None:
        """`plugs_in`: full names of the upstream in texts, and paths that an HTTP client asks, are uses too."""
        self.types, self.module, self.shown, self._plugs_in = types, module, shown, plugs_in
        self.uses: list[Use] = []
        self._line = 0
        self._class: str | None = None
        self._enclosing: str | None = None  # class, for super()
        self._assigned: dict[str, list[ast.expr]] = {}  # values of local names

    def read(self) -> list[Use]:
        self._block(self.module.tree.body, {})
        return self.uses

    def _use(self, kind: str, name: str, node: ast.AST, arguments: Arguments = Arguments(), **more: bool) -> None:  # noqa: B008
        if self.types.upstream.source.holds(name):
            line = self._line + getattr(node, "lineno", 0)
            self.uses.append(Use(kind, name, f"{self.shown}:{line}", arguments, **more))

    # statements

    def _block(self, body: list[ast.stmt], names: Names) -> None:
        for node in body:
            self._statement(node, names)

    def _statement(self, node: ast.stmt, names: Names) -> None:
        if isinstance(node, ast.ImportFrom | ast.Import):
            self._import(node, names)
        elif isinstance(node, Function):
            self._function(node, names)
        elif isinstance(node, ast.ClassDef):
            self._class_of_ours(node, names)
        elif isinstance(node, ast.Assign):
            value = self._value(node.value, names)
            for target in node.targets:
                self._bind(target, value, names)
                if isinstance(target, ast.Name):
                    self._assigned.setdefault(target.id, []).append(node.value)
        elif isinstance(node, ast.AnnAssign):
            value = self._value(node.value, names) if node.value is not None else None
            self._bind(node.target, self.types.annotated(node.annotation, self.module) or value, names)
            if isinstance(node.target, ast.Name) and node.value is not None:
                self._assigned.setdefault(node.target.id, []).append(node.value)
        elif isinstance(node, ast.For | ast.AsyncFor):
            self._bind(node.target, _each(self._value(node.iter, names)), names)
            self._block([*node.body, *node.orelse], names)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                value = self._value(item.context_expr, names)
                if item.optional_vars is not None:
                    self._bind(item.optional_vars, value, names)
            self._block(node.body, names)
        else:
            for _, part in ast.iter_fields(node):
                for each in part if isinstance(part, list) else [part]:
                    if isinstance(each, ast.stmt):
                        self._statement(each, names)
                    elif isinstance(each, ast.ExceptHandler):
                        self._value(each.type, names)
                        self._block(each.body, names)
                    elif isinstance(each, ast.expr):
                        self._value(each, names)
                    elif isinstance(each, ast.match_case):
                        self._block(each.body, names)

    def _import(self, node: ast.ImportFrom | ast.Import, names: Names) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                name = f"{self.module.absolute(node)}.{alias.name}"
                self._use("name", name, node)
                names[alias.asname or alias.name] = self.types.reached(name)
            else:
                self._use("name", alias.name, node)
                first = alias.asname or alias.name.split(".")[0]
                names[first] = Named(alias.name if alias.asname else first)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, names: Names) -> None:
        inside, arguments = dict(names), node.args
        for default in [*arguments.defaults, *arguments.kw_defaults, *node.decorator_list]:
            self._value(default, names)
        places = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for each in places:
            inside[each.arg] = self.types.annotated(each.annotation, self.module)
        is_static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in node.decorator_list)
        if self._class is not None and places and not is_static:
            inside[places[0].arg] = Made(self._class)
        outer, self._class, assigned = self._class, None, self._assigned
        self._assigned = {name: list(values) for name, values in assigned.items()}
        self._block(node.body, inside)
        self._class, self._assigned = outer, assigned

    def _class_of_ours(self, node: ast.ClassDef, names: Names) -> None:
        for base in node.bases:
            self._value(base, names)
        name = f"{self.module.name}.{node.name}"
        base = self.types.upstream_base(name)
        for each in bindings(node.body) if base else ():
            overridden = each.name if isinstance(each, Function) else None
            if isinstance(each, ast.Assign | ast.AnnAssign):
                target = each.targets[0] if isinstance(each, ast.Assign) else each.target
                if isinstance(target, ast.Name) and self.types.member(base, target.id):
                    self._use("name", f"{base}.{target.id}", each)
            if overridden and self.types.member(base, overridden):
                self._use("override", f"{base}.{overridden}", each)
        if base:
            ours = frozenset(each for part in bindings(node.body) for each in bound_names(part))
            self._use("subclass", base, node, Arguments(names=ours))
        outer, self._class = self._class, name
        around, inside = self._enclosing, dict(names)
        for each in node.body:
            self._class = self._enclosing = name
            self._statement(each, inside)
        self._class, self._enclosing = outer, around

    def _bind(self, target: ast.AST, value: Value, names: Names) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            parts = value.parts if isinstance(value, Several) else (_each(value),) * len(target.elts)
            for each, part in zip(target.elts, parts, strict=False):
                self._bind(each, part, names)
        elif isinstance(target, ast.expr):
            self._value(target, names)

    # expressions

    def _value(self, node: ast.AST | None, names: Names) -> Value:
        """What an expression is; all uses within it are noted."""
        if node is None:
            return None
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is not None:
            return method(node, names)
        found: list[Value] = [
            self._value(child, names) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context)
        ]
        if isinstance(node, ast.BoolOp | ast.IfExp | ast.Await | ast.NamedExpr | ast.Starred):
            return next((each for each in found if each), None)
        return None

    def _name(self, node: ast.Name, names: Names) -> Value:
        return names[node.id] if node.id in names else self.types.named(self.module, node.id)

    def _constant(self, node: ast.Constant, names: Names) -> Value:
        text = node.value
        if isinstance(text, str) and re.fullmatch(r"\w+(\.\w+)+", text):
            # SGLang's plug-ins are told by their full names what to replace
            found = self.types.upstream.find(text) if self._plugs_in else None
            if found is not None and found.kind in ("function", "class"):
                self._use("substitute", text, node)
        elif isinstance(text, str) and _SCRIPT.search(text):
            try:
                script = ast.parse(textwrap.dedent(text))
            except SyntaxError:
                return None
            line, self._line = self._line, self._line + node.lineno - 1
            self._block(script.body, {})
            self._line = line
        return None

    def _attribute(self, node: ast.Attribute, names: Names) -> Value:
        return self._part(self._value(node.value, names), node.attr, node)

    def _part(self, of: Value, name: str, node: ast.AST, optional: bool = False) -> Value:
        if isinstance(of, Either):
            found_parts = [self._part(each, name, node, optional) for each in of.parts]
            return next((each for each in found_parts if each), None)
        if isinstance(of, Named):
            found = self.types.find(of.name)
            if found is not None and found.kind == "function":
                self._use("attribute", of.name, node)
                return None
            self._use("name", f"{of.name}.{name}", node, optional=optional)
            inner = self.types.find(f"{of.name}.{name}")
            return Named(f"{of.name}.{name}") if inner is not None else None
        if isinstance(of, Made):
            if name in _SAME and self.types.member(of.cls, name) is None:
                return Named(f"{of.cls}.{name}")  # torch's, which gives the module itself
            if (member := self.types.member(of.cls, name)) is not None:
                self._use("name", member[0], node, optional=optional)
                return member[1]
        return None

    def _subscript(self, node: ast.Subscript, names: Names) -> Value:
        value = self._value(node.value, names)
        self._value(node.slice, names)
        return value if isinstance(node.slice, ast.Slice) else _each(value)

    def _tuple(self, node: ast.Tuple, names: Names) -> Value:
        return Several(tuple(self._value(each, names) for each in node.elts))

    def _list(self, node: ast.List, names: Names) -> Value:
        parts = [self._value(each, names) for each in node.elts]
        return Many(parts[0]) if parts and parts[0] else None

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, names: Names) -> Value:
        inside = self._generators(node.generators, names)
        return Many(self._value(node.elt, inside))

    _generatorexp = _setcomp = _listcomp

    def _dictcomp(self, node: ast.DictComp, names: Names) -> Value:
        inside = self._generators(node.generators, names)
        self._value(node.key, inside)
        return Many(self._value(node.value, inside))

    def _generators(self, generators: list[ast.comprehension], names: Names) -> Names:
        inside = dict(names)
        for each in generators:
            self._bind(each.target, _each(self._value(each.iter, inside)), inside)
            for condition in each.ifs:
                self._value(condition, inside)
        return inside

    def _lambda(self, node: ast.Lambda, names: Names) -> Value:
        inside = {**names, **{each.arg: None for each in ast.walk(node.args) if isinstance(each, ast.arg)}}
        self._value(node.body, inside)
        return None

    def _call(self, node: ast.Call, names: Names) -> Value:
        function = node.func.id if isinstance(node.func, ast.Name) and node.func.id not in names else None
        callee = None if function == "super" else self._value(node.func, names)
        given = [self._value(each, names) for each in node.args]
        for keyword in node.keywords:
            self._value(keyword.value, names)
        if function == "super" and not node.args:
            base = self.types.upstream_base(self._enclosing or "")
            return Made(base) if base else None
        if function == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            value = self._part(given[0], str(node.args[1].value), node, optional=len(node.args) > 2)
            return value or (given[2] if len(given) > 2 else None)
        if function in _LIKE_ITS_ARGUMENT and given:
            value = given[0]
            return {1: Many(Several((None, _each(value)))), 0: value, -1: _each(value)}[_LIKE_ITS_ARGUMENT[function]]
        if function == "zip":
            return Many(Several(tuple(_each(each) for each in given)))
        if isinstance(node.func, ast.Attribute) and node.func.attr in _ASKING:
            self._request(node)
        answers = [
            self._called(each.name, node, given)
            for each in (callee.parts if isinstance(callee, Either) else [callee])
            if isinstance(each, Named)
        ]
        return answers[0] if answers else None

    def _request(self, node: ast.Call) -> None:
        """Notes a call of SGLang's server: a path, and the body that follows it."""
        texts = [each.value if isinstance(each, ast.Constant) else None for each in node.args]
        place = next((i for i, text in enumerate(texts) if isinstance(text, str) and _PATH.fullmatch(text)), None)
        if place is None or not self._plugs_in or not self.types.upstream.source.holds("sglang.srt"):
            return
        assert isinstance(node.func, ast.Attribute)
        method = texts[0] if place else node.func.attr.upper()
        body = node.args[place + 1] if len(node.args) > place + 1 else None
        keys = self._keys(body, 3) if body is not None else set()
        where = f"{self.shown}:{node.lineno}"
        arguments = Arguments(names=frozenset(keys or ()), more=keys is None)
        self.uses.append(Use("request", f"{method} {texts[place]}", where, arguments))

    def _called(self, name: str, node: ast.Call, given: list[Value]) -> Value:
        cls, _, method = name.rpartition(".")
        if method in _SAME and self.types.find(name) is None:
            return Made(cls)
        found = self.types.find(name)
        if self.types.upstream.source.holds(name):
            self._use("call", name, node, self._arguments(node))
        elif found is not None and found.kind == "class":
            base = self.types.upstream_base(name)
            if base and self.types.own.member(found, "__init__") is None:
                fields = {each.name for each in self.types.own.fields(found)}
                self._use("call", base, node, self._arguments(node, without=fields))
        elif name.endswith(".substituted") and isinstance(given[0], Named) and isinstance(node.args[1], ast.Constant):
            absent = any(keyword.arg == "absent" for keyword in node.keywords)
            self._use("substitute", f"{given[0].name}.{node.args[1].value}", node, optional=absent)
        return self.types.answer(name)

    def _arguments(self, node: ast.Call, without: set[str] = frozenset()) -> Arguments:
        spread = [keyword.value for keyword in node.keywords if keyword.arg is None]
        keys = [self._keys(each, 3) for each in spread]
        return Arguments(
            sum(not isinstance(each, ast.Starred) for each in node.args),
            frozenset(keyword.arg for keyword in node.keywords if keyword.arg and keyword.arg not in without),
            frozenset(key for each in keys for key in each or ()),
            any(isinstance(each, ast.Starred) for each in node.args) or any(each is None for each in keys),
        )

    def _keys(self, node: ast.expr, left: int) -> set[str] | None:
        """The text keys that a dict may have: of literals, of a local name, or of what functions of ours make."""
        if isinstance(node, ast.Subscript):
            return self._keys(node.value, left)
        if isinstance(node, ast.Name) and left:
            found = [self._keys(each, left - 1) for each in self._assigned.get(node.id, [])]
            return {key for keys in found for key in keys or ()} if found else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name) and left:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            bodies = list(self._functions_named(called))
            return {key for each in bodies for key in dict_keys(each)} if bodies else None
        if isinstance(node, ast.Dict | ast.IfExp | ast.BinOp):
            inner = [each for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)]
            return dict_keys(node) | {
                key for each in inner for key in (self._keys(each, left - 1) if left else None) or ()
            }
        return None

    def _functions_named(self, name: str) -> Iterator[ast.AST]:
        own = self.types.own
        for file in own.source.files:
            if f"def {name}(" in own.source.text(file):
                module = own.module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
                for node in ast.walk(module.tree) if module else ():
                    if isinstance(node, Function) and node.name == name:
                        yield node

    def made_by(self, names: Container[str]) -> Iterator[tuple[str, ast.AST, set[str]]]:
        """Functions of the file with one of these names, and the keys of the dicts they make."""
        for node in ast.walk(self.module.tree):
            if isinstance(node, Function) and node.name in names:
                yield node.name, node, dict_keys(node)


def dict_keys(node: ast.AST) -> set[str]:
    """All text keys of the dict literals in a piece of code."""
    return {
        key.value
        for each in ast.walk(node)
        if isinstance(each, ast.Dict)
        for key in each.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }


def _each(value: Value) -> Value:
    return value.each if isinstance(value, Many) else None
