"""SGLang as it is spoken to: the paths of its HTTP server, the bodies they take, and the flags it is started with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from upstream.definitions import Definition, Definitions, dotted
from upstream.reading import dict_keys
from upstream.signatures import Function, Parameter, Signature, fields_of
from upstream.uses import Arguments, Use

_SERVER = "sglang.srt.entrypoints.http_server"
_ARGUMENTS = "sglang.srt.server_args"
_FLAGS = "sglang.srt.arg_groups.fields"  # a package of classes whose fields are the server's arguments
_FLAG = re.compile(r"--[a-z][a-z0-9-]+")


@dataclass(frozen=True)
class Route:
    """What answers a path: the function, and the class of the body it takes (None: it takes none)."""

    function: str
    body: Definition | None


def route(defs: Definitions, request: str) -> Route | None:
    """That of "POST /path"."""
    method, path = request.split()
    server = defs.module(_SERVER)
    for node in server.tree.body if server is not None else ():
        for decorator in node.decorator_list if isinstance(node, Function) else ():
            if not (isinstance(decorator, ast.Call) and decorator.args and isinstance(decorator.args[0], ast.Constant)):
                continue
            kind = (dotted(decorator.func) or "").split(".")[-1]
            methods = [ast.literal_eval(each.value) for each in decorator.keywords if each.arg == "methods"]
            answered = {kind.upper(), *(methods[0] if methods else ())}
            if decorator.args[0].value == path and method in answered:
                assert server is not None
                taken = (_body(defs, each.annotation) for each in node.args.args)
                return Route(node.name, next((each for each in taken if each is not None), None))
    return None


def _body(defs: Definitions, annotation: ast.expr | None) -> Definition | None:
    server = defs.module(_SERVER)
    for node in ast.walk(annotation) if annotation is not None else ():
        path = dotted(node)
        found = defs.in_module(server, path) if path and server is not None else None
        if found is not None and found.kind == "class" and defs.fields(found):
            return found
    return None


def request_changes(before: Definitions, after: Definitions, use: Use) -> Iterator[tuple[str, str, str]]:
    """Of a path that is asked. Its body's fields are compared as a call of the body's class is."""
    was, now = route(before, use.name), route(after, use.name)
    if was is not None and now is None:
        other = {"GET": "POST", "POST": "GET"}[use.name.split()[0]]
        by_other = route(after, use.name.replace(use.name.split()[0], other))
        yield ("gone", use.name, f"only {other} is answered now" if by_other else "the server does not know the path")
    elif was is None and now is not None:
        yield "new", use.name, "is not answered by the older release"
    elif was is not None and now is not None and was.body is not None and now.body is None:
        yield "signature", use.name, "takes no body now"


def body_use(defs: Definitions, use: Use) -> Use | None:
    """The call of the class that a request's body becomes."""
    found = route(defs, use.name)
    if found is None or found.body is None:
        return None
    return Use("call", found.body.name, use.where, use.arguments)


def flags(defs: Definitions) -> Signature:
    """All arguments of the server as those of a call, by the name of the flag with underscores."""
    found: dict[str, Parameter] = {}
    classes = [defs.find(f"{_ARGUMENTS}.ServerArgs")]
    for file in sorted(defs.source.files):
        if file.startswith(_FLAGS.replace(".", "/") + "/"):
            module = defs.module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
            for node in module.tree.body if module is not None else ():
                if isinstance(node, ast.ClassDef):
                    classes.append(Definition(node.name, module, node))
    for each in classes:
        if each is not None and isinstance(each.node, ast.ClassDef):
            internal = {
                field.target.id
                for field in each.node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if "no_cli=True" in ast.unparse(field.annotation)
            }
            found |= {field.name: field for field in fields_of(each.node) if field.name not in internal}
    return Signature(tuple(Parameter(each.name, each.default or "None") for each in found.values()))


def flags_used(trees: dict[str, ast.AST]) -> list[Use]:
    """The flags that servers are started with, of files by their names: `--flag` as it stands, and keys of the dict in
    a function called `arguments`."""
    names: dict[str, str] = {}
    for shown, tree in trees.items():
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and _FLAG.fullmatch(text):
                names.setdefault(text[2:].replace("-", "_"), f"{shown}:{node.lineno}")
            if isinstance(node, Function) and node.name == "arguments":
                for key in dict_keys(node):
                    names.setdefault(key.replace("-", "_"), f"{shown}:{node.lineno}")
    if not names:
        return []
    return [Use("flags", _ARGUMENTS, sorted(names.values())[0], Arguments(names=frozenset(names)))]
