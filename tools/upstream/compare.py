"""What has changed, between two releases, of what is used."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from upstream.definitions import Definition, Definitions
from upstream.served import body_use, flags, request_changes
from upstream.signatures import Function, Signature, body_of, decorators
from upstream.uses import Arguments, Use

# of a finding, worst first
KINDS = {
    "gone": "is not there any more",
    "moved": "lies elsewhere now",
    "signature": "is called, made or overridden otherwise",
    "default": "has another value where we leave it out",
    "body": "does something else, where we stand in its place or count on its inside",
    "new": "is there now, and was not before",
}


@dataclass(frozen=True)
class Finding:
    """One change of one name.

    kind: key of KINDS.
    what: the change, in a few words.
    where: files and lines of ours that use the name.
    """

    kind: str
    name: str
    what: str
    where: tuple[str, ...]


class Comparison:
    """Of two releases of one upstream."""

    def __init__(self, before: Definitions, after: Definitions, concrete: dict[str, tuple[str, ...]]) -> None:
        self.before, self.after, self._concrete = before, after, concrete
        self._moved: dict[str, str | None] = {}

    def findings(self, uses: Iterable[Use]) -> list[Finding]:
        """Every change once, with all places; worst kinds first, then by name."""
        places: dict[tuple[str, str, str], list[str]] = {}
        for use in uses:
            for kind, name, what in self._of(use):
                where = places.setdefault((kind, name, what), [])
                if use.where not in where:
                    where.append(use.where)
        order = list(KINDS)
        found = [Finding(*key, tuple(where)) for key, where in places.items()]
        return sorted(found, key=lambda each: (order.index(each.kind), each.name, each.what))

    def _of(self, use: Use) -> Iterator[tuple[str, str, str]]:
        if use.kind == "request":
            yield from request_changes(self.before, self.after, use)
            if (body := body_use(self.before, use)) is not None:
                yield from self._of(body)
        elif use.kind == "flags":
            call = self._passed(use.arguments, flags(self.before), flags(self.after))
            yield from ((kind, f"{use.name}.ServerArgs", what) for kind, what in call)
        elif use.kind == "spelled":
            yield from self._spelled(use)
        else:
            yield from self._named(use)

    def _spelled(self, use: Use) -> Iterator[tuple[str, str, str]]:
        module, text = use.name.split(":")
        was, now = self.before.module(module), self.after.module(module)
        if was is not None and text in was.words and (now is None or text not in now.words):
            yield "gone", use.name, "does not occur there any more" if now else "with the whole module"

    def _named(self, use: Use) -> Iterator[tuple[str, str, str]]:
        cls, _, member = use.name.rpartition(".")
        names = [
            use.name,
            *(f"{each}.{member}" for each in self._concrete.get(cls, ()) if use.kind in ("call", "name")),
        ]
        for i, name in enumerate(names):
            before = self.before.find(name)
            if before is None or (i and before.owner is not None and before.owner.name != name.rpartition(".")[0]):
                if not i and not use.optional and use.kind in ("name", "substitute") and self._appeared(name):
                    yield "new", name, f"not in {self.before.source.title}"
                continue
            after = self.after.find(name)
            if after is None:
                yield from self._missing(use, name, before)
                if (after := self._found_elsewhere(name)) is None:
                    continue
            yield from ((kind, name, what) for kind, what in self._changed(use, name, before, after))

    def _appeared(self, name: str) -> bool:
        parent = self.before.find(name.rpartition(".")[0])
        return self.after.find(name) is not None and parent is not None and parent.kind in ("module", "class")

    def _missing(self, use: Use, name: str, before: Definition) -> Iterator[tuple[str, str, str]]:
        """What to say of a name that is not found; nothing of a part of something that is itself missing."""
        parent = name.rpartition(".")[0]
        if self.after.find(parent) is None and before.owner is not None:
            return
        if use.optional:
            yield "gone", name, "we ask whether it is there, and it is not any more"
        elif elsewhere := self.moved(name):
            yield "moved", name, f"to {elsewhere}"
        else:
            yield "gone", name, self._gone(name, before)

    def _gone(self, name: str, before: Definition) -> str:
        """Gone, and what is new beside it under a name like it."""
        parent, _, last = name.rpartition(".")
        was, now = self.before.find(parent), self.after.find(parent)
        if was is None or now is None:
            return f"with all of {parent}"
        new = sorted(_members(now) - _members(was))
        near = _renamed(last, new)
        return f"perhaps {near} now, which is new there" if near else f"from {parent.split('.')[-1]}"

    def _found_elsewhere(self, name: str) -> Definition | None:
        """Of a name that is not where it was: the same where its longest part that is known has moved to."""
        parts = name.split(".")
        for cut in range(len(parts), 1, -1):
            moved = self.moved(".".join(parts[:cut]))
            if moved is not None:
                return self.after.find(".".join([moved, *parts[cut:]]))
        return None

    def moved(self, name: str) -> str | None:
        """Where the newer release defines a class or function of this name, if it lies elsewhere."""
        if name not in self._moved:
            self._moved[name] = self._search(name)
        return self._moved[name]

    def _search(self, name: str) -> str | None:
        before = self.before.find(name)
        if before is None or before.owner is not None or before.kind not in ("class", "function"):
            return None
        last = name.rpartition(".")[2]
        pattern = re.compile(rf"^(class|def|async def) {re.escape(last)}\b", re.MULTILINE)
        source = self.after.source
        found = []
        for file in sorted(source.files):
            if last in (text := source.text(file)) and pattern.search(text):
                found.append(f"{file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}.{last}")
        known = [each for each in found if (d := self.after.find(each)) is not None and d.kind == before.kind]
        old = {f"{f.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}" for f in self.before.source.files}
        fresh = [each for each in known if not _was_there(self.before, each, old)]
        return max(fresh, key=lambda each: difflib.SequenceMatcher(None, each, name).ratio(), default=None)

    def _changed(self, use: Use, name: str, before: Definition, after: Definition) -> Iterator[tuple[str, str]]:
        if {before.kind, after.kind} > {"function"} and before.kind != after.kind and use.kind != "name":
            yield "signature", f"was a {before.kind}, is a {after.kind}"
        elif use.kind == "call":
            yield from self._called(use, before, after)
        elif use.kind in ("override", "stand-in", "relied on", "substitute"):
            yield from self._replaced(use, name, before, after)
        elif use.kind == "attribute" and isinstance(before.node, Function) and isinstance(after.node, Function):
            if (was := decorators(before.node)) != (now := decorators(after.node)):
                yield "signature", f"decorated with {_list(now)}, was with {_list(was)}"
        elif use.kind == "subclass":
            yield from self._inherited(use, before, after)
        elif use.kind == "all fields":
            was, now = (
                {each.name: each for each in d.fields(c)} for d, c in ((self.before, before), (self.after, after))
            )
            yield from (("signature", f"no longer has the field {name}") for name in was.keys() - now.keys())
            for name in now.keys() - was.keys():
                yield "new", f"field {name}, {now[name].default} where we leave it out"
        elif use.kind == "name" and (values := _literals(before, after)):
            yield "default", f"{values[0]} → {values[1]}"

    def _called(self, use: Use, before: Definition, after: Definition) -> Iterator[tuple[str, str]]:
        was, now = self.before.signature(before), self.after.signature(after)
        if was is not None and now is not None:
            yield from self._passed(use.arguments, was, now)

    def _passed(self, given: Arguments, was: Signature, now: Signature) -> Iterator[tuple[str, str]]:
        for place in range(given.places):
            old, new = was.at(place), now.at(place)
            if old is not None and new is None and not now.more_places:
                yield (
                    "signature",
                    f"takes {old.name} by name alone" if now.named(old.name) else f"no longer takes {old.name}",
                )
            elif old is not None and new is not None and old.name != new.name:
                yield "signature", f"argument {place + 1} is {new.name}, was {old.name}"
        for name in sorted(given.names | given.perhaps):
            if was.named(name) and not now.named(name):
                near = _renamed(name, [each.name for each in now.parameters if not was.named(each.name)])
                ending = f", perhaps {near} now" if near else ", only any name" if now.more_names else ""
                yield "signature", f"no longer takes {name}{ending}"
        passed = (
            given.names
            | given.perhaps
            | {each.name for each in now.parameters if (each.place or 0) < given.places and each.place is not None}
        )
        for each in () if given.more else now.parameters:
            if each.name in passed:
                continue
            old = was.named(each.name)
            if each.default is None and (old is None or old.default is not None):
                yield "signature", f"requires {each.name}"
            elif old is not None and old.default is not None and each.default != old.default:
                yield "default", f"{each.name}: {old.default} → {each.default}"
        if was.returns and now.returns and was.returns != now.returns:
            yield "signature", f"returns {now.returns}, was {was.returns}"

    def _replaced(self, use: Use, name: str, before: Definition, after: Definition) -> Iterator[tuple[str, str]]:
        parts = [("", before, after)]
        if before.kind == "class":
            methods = ("__init__", "__new__", "forward", "__call__") if use.kind == "stand-in" else ()
            parts = []
            for each in methods:
                old, new = self.before.member(before, each), self.after.member(after, each)
                if old is not None and new is not None:
                    parts.append((f"{each}: ", old, new))
        for prefix, old, new in parts:
            was, now = self.before.signature(old), self.after.signature(new)
            if was is not None and now is not None and use.kind != "relied on":
                yield from (("signature", prefix + what) for what in differences(was, now))
            functions = isinstance(old.node, Function) and isinstance(new.node, Function)
            inside = use.kind != "stand-in" and not use.optional
            if inside and functions and _acts(old.node) != _acts(new.node):
                yield "body", _size_of_change(old.node, new.node)
        if use.kind == "substitute" and self._read(self.before, name) and self._read(self.after, name) is False:
            yield "gone", f"is no longer read in {name.split('.')[-2]}, so a substitute does nothing"

    def _read(self, defs: Definitions, name: str) -> bool | None:
        """Whether functions of the module read its global of this name, as they must for a substitute to have an
        effect; None of what is no module's global."""
        owner, _, last = name.rpartition(".")
        found = defs.find(owner)
        return last in found.module.read_in_functions if found is not None and found.kind == "module" else None

    def _inherited(self, use: Use, before: Definition, after: Definition) -> Iterator[tuple[str, str]]:
        ours = use.arguments.names
        for name in sorted(_duties(self.after, after) - _duties(self.before, before) - ours):
            yield "signature", f"asks its subclasses for {name}"
        for name in sorted(ours):
            if name.startswith("__") or self.before.member(before, name) is not None:
                continue
            if self.after.member(after, name) is not None:
                yield "new", f"has a {name} of its own, which ours hides"


def differences(was: Signature, now: Signature) -> list[str]:
    """What differs between two signatures, in words, for those who stand in for either."""
    found = [f"no longer takes {each.name}" for each in was.parameters if not now.named(each.name)]
    for each in now.parameters:
        old = was.named(each.name)
        if old is None:
            found.append(f"takes {each.name}" + (f"={each.default}" if each.default is not None else ", required"))
        elif old.default != each.default:
            found.append(f"{each.name}: {old.default or 'required'} → {each.default or 'required'}")
    common = [each.name for each in was.parameters if each.place is not None and now.named(each.name)]
    order = [each.name for each in now.parameters if each.place is not None and was.named(each.name)]
    if not found and common != order:
        found.append(f"takes {', '.join(order)} in this order")
    if was.returns and now.returns and was.returns != now.returns:
        found.append(f"returns {now.returns}, was {was.returns}")
    return found


def _renamed(name: str, new: Iterable[str]) -> str | None:
    """One of the new names that has the same words but for one."""
    words = set(name.split("_"))
    near = (each for each in new if len(words ^ set(each.split("_"))) <= 1 and len(words) > 1)
    return min(near, key=len, default=None)


def _members(of: Definition) -> set[str]:
    if of.kind == "module":
        return set(of.module.names)
    return {node.name for node in ast.walk(of.node) if isinstance(node, Function)} if of.node is not None else set()


def _was_there(before: Definitions, name: str, modules: set[str]) -> bool:
    """Whether the older release had it there already: then it is another of the same name."""
    return name.rpartition(".")[0] in modules and before.find(name) is not None


def _literals(before: Definition, after: Definition) -> tuple[str, str] | None:
    """Two values that are written out, if they differ."""
    nodes = [each.node.value if isinstance(each.node, ast.Assign) else None for each in (before, after)]
    if all(isinstance(node, ast.Constant) for node in nodes):
        was, now = (ast.unparse(node) for node in nodes if node is not None)
        return (was, now) if was != now else None
    return None


def _duties(defs: Definitions, cls: Definition) -> set[str]:
    """Methods that a subclass has to bring: abstract ones, and those that only raise NotImplementedError."""
    found: dict[str, bool] = {}
    for base in defs.bases(cls):
        for node in base.node.body if isinstance(base.node, ast.ClassDef) else ():
            if isinstance(node, Function):
                statements = [each for each in node.body if not isinstance(each, ast.Expr)]
                raises = (
                    len(statements) == 1
                    and isinstance(statements[0], ast.Raise)
                    and "NotImplemented" in ast.unparse(statements[0])
                )
                found.setdefault(node.name, raises or any("abstract" in each for each in decorators(node)))
    return {name for name, asked in found.items() if asked}


def _acts(function: ast.AST) -> tuple[str, list[str]]:
    return body_of(function), decorators(function)


def _size_of_change(old: ast.AST, new: ast.AST) -> str:
    """How much of a body differs, in lines of code without comments."""
    was, now = (ast.unparse(each).splitlines() for each in (old, new))
    lines = [line for line in difflib.ndiff(was, now) if line[:2] in ("- ", "+ ")]
    added = sum(line.startswith("+ ") for line in lines)
    return f"its code: {len(lines) - added} of {len(was)} lines taken out, {added} put in"


def _list(names: list[str]) -> str:
    return ", ".join(names) or "nothing"
