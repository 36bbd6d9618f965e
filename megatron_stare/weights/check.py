"""Holds a Hugging Face folder's weights against its config.json, reading nothing but the files' headers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

from megatron_stare.errors import DataError
from megatron_stare.models import family_of
from megatron_stare.models.rules import Rule
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.hf_folder import locate
from megatron_stare.weights.safetensors_file import DTYPES, Entry, read_header

# tensors that old checkpoints hold although they follow from config.json
_DERIVED = (".rotary_emb.inv_freq",)


def rules(shape: ModelShape) -> list[Rule]:
    """The rules of every parameter this model has, with numbers filled in; a parameter of two names comes once."""
    family = family_of(shape)
    found: dict[tuple[str, ...], Rule] = {}
    for rule in family.rules:
        counts = (range(shape.layers), range(shape.experts))[: rule.megatron.count("{}")]
        for at in itertools.product(*counts):
            hf = tuple(name.format(*at) for name in rule.hf)
            if all(family.has(name, shape) for name in hf):
                found.setdefault(hf, Rule(rule.megatron.format(*at), hf, rule.layout))
    return list(found.values())


def expected(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a Hugging Face folder of this model holds, by name."""
    return {name: family_of(shape).size(name, shape) for rule in rules(shape) for name in rule.hf}


def check_folder(path: str | Path, shape: ModelShape) -> dict[str, Entry]:
    """Where every tensor of the model lies. Names, shapes, dtypes and the files' lengths are those expected.

    Raises:
        DataError: the first thing that is not so.
    """
    path = Path(path)
    where = locate(path)
    headers = {file: read_header(file) for file in sorted(set(where.values()))}
    wanted, entries = expected(shape), {}
    for name, file in where.items():
        if name not in headers[file]:
            raise DataError(
                f"the index says that {file.name} holds {name!r}, but it does not",
                where=str(path / "model.safetensors.index.json"),
                fix="the index and the files are not of one checkpoint: download or copy the folder again",
            )
        if name in wanted:
            entries[name] = headers[file][name]
        elif not (name.endswith(_DERIVED) or (shape.tied and name == "lm_head.weight")):
            raise DataError(
                f"the tensor {name!r} is not one of a {shape.family} model as config.json describes it",
                where=str(file),
                fix="config.json and the weights do not belong together",
            )
    _refuse_missing([name for name in wanted if name not in entries], path)
    for name, entry in entries.items():
        _check_entry(name, entry, wanted[name])
    return entries


def _refuse_missing(names: list[str], path: Path) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise DataError(
            f"missing: the tensor {names[0]!r}{more}",
            where=str(path),
            fix="config.json and the weights do not belong together, or the folder is not complete",
        )


def _check_entry(name: str, entry: Entry, wanted: tuple[int, ...]) -> None:
    if entry.shape != wanted:
        raise DataError(
            f"{name!r} has the shape {entry.shape}, config.json makes it {wanted}",
            where=str(entry.file),
            fix="config.json and the weights do not belong together",
        )
    if entry.dtype not in DTYPES:
        raise DataError(
            f"{name!r} is of dtype {entry.dtype}; weights must be {', '.join(DTYPES)}",
            where=str(entry.file),
            fix="use the checkpoint that was not quantised",
        )
    if entry.nbytes != math.prod(entry.shape) * DTYPES[entry.dtype].itemsize:
        raise DataError(f"{name!r} has {entry.nbytes:,} bytes, which its shape does not make", where=str(entry.file))
