"""Checks that the weights of a Hugging Face folder match the folder's config.json. The checks read
the headers of the weight files. If the folder stores a tied head, the checks also read the whole
head and the whole embedding. The checks read the data of a tensor only to compare a tied head with
the embedding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from megatron_stare.errors import DataError
from megatron_stare.models import family_of
from megatron_stare.models.rules import Rule
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.files.hf_folder import locate
from megatron_stare.weights.files.safetensors_file import DTYPES, Entry, read_header

# tensors in old checkpoints that config.json already determines
_DERIVED = (".rotary_emb.inv_freq",)
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_PIECE = 1 << 24  # bytes compared at a time


def rules(shape: ModelShape) -> list[Rule]:
    """Returns a rule for each parameter of the model, with layer and expert numbers filled into the
    names. Several rules of a model family can name the same Hugging Face tensors. In this case, the
    function returns only the rule that comes first in the family's list of rules."""
    family = family_of(shape)
    found: dict[tuple[str, ...], Rule] = {}
    for rule in family.rules:
        counts = (range(shape.layers), range(shape.experts))[: rule.megatron.count("{}")]
        for at in itertools.product(*counts):
            hf = tuple(name.format(*at) for name in rule.hf)
            if all(family.has(name, shape) for name in hf):
                found.setdefault(hf, replace(rule, megatron=rule.megatron.format(*at), hf=hf))
    return list(found.values())


def expected(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor in a Hugging Face folder of this model, by name."""
    return {name: family_of(shape).size(name, shape) for rule in rules(shape) for name in rule.hf}


def left_out(names: Iterable[str], shape: ModelShape) -> set[str]:
    """Returns the names of tensors that a folder may hold although the model does not use these
    tensors. There are three kinds of unused tensors: tensors whose values follow from config.json,
    such as `rotary_emb.inv_freq`; a tied head, which equals the embedding; and tensors that the
    model family leaves out."""
    family = family_of(shape)
    return {
        name
        for name in names
        if name.endswith(_DERIVED)
        or (shape.tied and name == _HEAD)
        or family.leaves_out(name, shape)
    }


def check_folder(path: str | Path, shape: ModelShape) -> dict[str, Entry]:
    """Checks a folder, and returns the Entry of every tensor of the model, by tensor name. An Entry
    contains the path of the tensor's file, and the position of the tensor's first byte in this
    file.

    The names and shapes of the tensors must match config.json, the dtypes must be in `DTYPES`, and
    no file may end before its last tensor. If the folder stores a tied head besides the embedding,
    the head and the embedding are compared byte by byte. The check reads the data of a tensor only
    for this comparison of head and embedding.

    Raises:
        DataError: the first mismatch.
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
                fix=(
                    "the index and the files are not of one checkpoint: download or copy the folder"
                    " again"
                ),
            )
        if name in wanted:
            entries[name] = headers[file][name]
        elif name not in left_out([name], shape):
            raise DataError(
                f"the tensor {name!r} is not one of a {shape.family} model as config.json"
                " describes it",
                where=str(file),
                fix="config.json and the weights do not belong together",
            )
    _refuse_missing([name for name in wanted if name not in entries], path)
    if shape.tied and _HEAD in where:
        _check_tied(headers[where[_HEAD]][_HEAD], entries[_EMBEDDING])
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


def _check_tied(head: Entry, embedding: Entry) -> None:
    """Raises DataError if the folder stores a head that differs from the embedding, although
    config.json ties the head to the embedding. With such a folder, one program could use the stored
    head as the model's head, and another program could use the embedding."""
    same = (head.dtype, head.shape, head.nbytes) == (
        embedding.dtype,
        embedding.shape,
        embedding.nbytes,
    )
    if same:
        with head.file.open("rb") as one, embedding.file.open("rb") as other:
            one.seek(head.start)
            other.seek(embedding.start)
            left = head.nbytes
            while left and same:
                piece = min(left, _PIECE)
                same = one.read(piece) == other.read(piece)
                left -= piece
    if not same:
        raise DataError(
            "config.json ties the embedding and the head (tie_word_embeddings), and the folder"
            " holds a head of its own",
            where=f"{head.file}: {_HEAD}",
            fix=(
                "if the model was trained with its own head, set tie_word_embeddings to false; else"
                " take lm_head.weight out of the folder"
            ),
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
        raise DataError(
            f"{name!r} has {entry.nbytes:,} bytes, which is not the size of its shape",
            where=str(entry.file),
        )
