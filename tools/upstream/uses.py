"""What this project uses of an upstream, as records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "name",  # imported, or read as an attribute
    "call",  # called with `arguments`
    "attribute",  # of a function: something that only a decorator can have given it
    "subclass",  # a class of ours has it as its base; `arguments.names`: what ours defines
    "override",  # a method of ours takes its place
    "substitute",  # an object of ours is put under its name while the upstream runs
    "stand-in",  # a class of ours is made and called where the upstream would have this one
    "relied on",  # never called by us, but what it does is counted on
    "request",  # "POST /path" of SGLang's server is asked; `arguments.names`: the fields of the body
    "flags",  # SGLang's server is started with `arguments.names`
    "spelled",  # "module:text": a name or literal that the code of a module has to contain
    "all fields",  # of a class whose every field we fill in, so that a new one matters
]


@dataclass(frozen=True)
class Arguments:
    """What a call passes.

    places: arguments by position.
    names: keywords that are always passed.
    perhaps: keywords that some calls pass, out of a dict that is made elsewhere.
    more: further ones may be passed, which could not be read.
    """

    places: int = 0
    names: frozenset[str] = frozenset()
    perhaps: frozenset[str] = frozenset()
    more: bool = False


@dataclass(frozen=True)
class Use:
    """One use at one place.

    name: dotted name in the upstream.
    where: file and line of ours.
    optional: it may be missing: we ask first.
    """

    kind: Kind
    name: str
    where: str
    arguments: Arguments = field(default_factory=Arguments)
    optional: bool = False
