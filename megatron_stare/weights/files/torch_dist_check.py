"""Holds a distributed checkpoint's tensors against a model's config.json, reading nothing but its metadata."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_stare.errors import DataError
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.files.blocks import Block, places
from megatron_stare.weights.files.safetensors_file import NAMES
from megatron_stare.weights.files.torch_dist import TorchDist

_OF_THE_MODEL = re.compile(r"(decoder|embedding|output_layer)\.")
_FIX = "config.json and the checkpoint do not belong together"


def check_checkpoint(checkpoint: TorchDist, shape: ModelShape, blocks: Sequence[Block]) -> None:
    """Every parameter of the model is there in its shape, and no other one. Other tensors (of optimizers) are left.

    Raises:
        DataError: the first thing that is not so.
    """
    used = set()
    for rule, size in {block.rule: block.size for block in blocks}.items():
        place = checkpoint.place(rule.megatron)
        used |= {candidate.key for candidate in places(rule.megatron)}
        found = checkpoint.sizes[place.key]
        counts = tuple(shape.experts if n == "experts" else shape.layers for n in place.dims)
        lead, own = found[: len(counts)], found[len(counts) :]
        if lead != counts:
            raise DataError(
                f"{place.key!r} stacks {lead}, config.json has {counts} {' x '.join(place.dims)}",
                where=str(checkpoint.path),
                fix=_FIX,
            )
        padded = rule.layout == "vocab" and len(own) == len(size) and own[0] >= size[0] and own[1:] == size[1:]
        if own != size and not padded:
            raise DataError(
                f"{place.key!r} has the shape {own}, config.json makes it {size}",
                where=str(checkpoint.path),
                fix=_FIX,
            )
        if checkpoint.dtypes[place.key] not in NAMES:
            raise DataError(f"{place.key!r} is of dtype {checkpoint.dtypes[place.key]}", where=str(checkpoint.path))
    for key in checkpoint.sizes:
        if _OF_THE_MODEL.match(key) and key not in used and not key.endswith("_extra_state"):
            raise DataError(
                f"the tensor {key!r} is not one of a {shape.family} model as config.json describes it",
                where=str(checkpoint.path),
                fix=_FIX,
            )
