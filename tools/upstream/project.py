"""All that this project uses of a release."""

from __future__ import annotations

from pathlib import Path

from upstream.declared import CONTENT, DECLARED
from upstream.definitions import Definitions
from upstream.own_source import PACKAGE, OwnSource
from upstream.reading import Reader
from upstream.served import flags_used
from upstream.uses import Arguments, Use
from upstream.values import Types

_SERVERS = "megatron_stare/rollout/sglang/"
# functions of ours that make a body, or a part of one, which is handed on before it is sent
_BODIES = {
    "generate_body": "sglang.srt.managers.io_struct.GenerateReqInput",
    "sampling_fields": "sglang.srt.sampling.sampling_params.SamplingParams",
}


def uses_of(root: Path, upstream: Definitions, more: tuple[Path, ...] = (), alone: bool = False) -> list[Use]:
    """What the checkout at `root`, and the files of `more`, use of a release.

    Args:
        alone: of the files of `more` alone.
    """
    source = OwnSource(root, more)
    own = Definitions(source)
    types = Types(own, upstream, CONTENT)
    found: list[Use] = []
    trees = {}
    for file, path in source.paths.items():
        if alone and path not in more:
            continue
        module = own.module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        if module is None:
            continue
        reader = Reader(types, module, source.shown(file), path in more or file.startswith(f"{PACKAGE}/"))
        found += reader.read()
        if upstream.source.holds("sglang.srt") and source.shown(file).startswith(_SERVERS):
            trees[source.shown(file)] = module.tree
            found += [
                Use("call", _BODIES[name], f"{source.shown(file)}:{node.lineno}", Arguments(names=frozenset(keys)))
                for name, node, keys in reader.made_by(_BODIES)
            ]
    if not alone:
        found += flags_used(trees)
        found += [each.use for each in DECLARED if upstream.source.holds(each.name.split(":")[0])]
    return found
