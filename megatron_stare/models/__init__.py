"""Defines model families, one file each, and reads a model's shape from config.json.

The `model_type` of config.json names the family, as in transformers. Each file of this package that
has a `FAMILY` object defines one family, so no separate list of families is needed. Other installed
packages add families as entry points of the group PLUG_INS. The name of a family's entry point is
the family's model_type. Families of other packages are imported only when a model needs them.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from megatron_stare.errors import DataError
from megatron_stare.models.family import ModelFamily
from megatron_stare.models.rules import Rule, numbered
from megatron_stare.models.shape import ModelShape
from megatron_stare.process.shipped import SHIPPED


def _found() -> dict[str, ModelFamily]:
    modules = [
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    ]
    families: list[ModelFamily] = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {family.model_type: family for family in families}


FAMILIES = _found()
PLUG_INS = "megatron_stare.model_families"
_DELTA = (
    "most of its layers attend by a gated delta rule, of which there is no form for packed"
    " sequences here"
)
_IMAGES = "it reads images, and nothing here feeds or trains an encoder of them"
# well-known families without support, by model_type: their usual name, and what is missing
MISSING = {
    "gpt_oss": (
        "gpt-oss",
        (
            "attention with sinks and, in every other layer, in windows; experts with biases and a"
            " clamped activation; weights in MXFP4"
        ),
    ),
    "qwen3_next": ("Qwen3-Next", _DELTA),
    "qwen3_5": ("Qwen3.5", _DELTA),
    "qwen3_5_moe": ("Qwen3.5-MoE", _DELTA),
    "kimi_linear": ("Kimi Linear", _DELTA),
    "kimi_k2": (
        "Kimi-K2",
        (
            "weights in 8 bits; the architecture is DeepSeek V3's, and was not held against"
            " transformers under this name"
        ),
    ),
    "kimi_k25": ("Kimi-K2.5", _IMAGES),
    "deepseek_v2": (
        "DeepSeek V2",
        "groups of experts ranked by their best one, chosen by a softmax",
    ),
    "deepseek_v32": (
        "DeepSeek V3.2",
        "sparse attention, in which an indexer chooses the keys of every query",
    ),
    "glm_moe_dsa": (
        "GLM-5",
        "sparse attention, in which an indexer chooses the keys of every query",
    ),
    "glm4_moe_lite": (
        "GLM-4.7-Flash",
        "GLM-4.5's experts with latent attention were not held against transformers",
    ),
    "glm4v_moe": ("GLM-4.5V", _IMAGES),
    "qwen2_5_vl": ("Qwen2.5-VL", _IMAGES),
    "qwen3_vl": ("Qwen3-VL", _IMAGES),
    "qwen3_vl_moe": ("Qwen3-VL-MoE", _IMAGES),
    "qwen2_moe": ("Qwen1.5-MoE and Qwen2-MoE", "a gate on the experts that every token goes to"),
    "mixtral": ("Mixtral", "experts under other names"),
    "gemma3_text": (
        "Gemma 3",
        "attention in windows in most layers, four norms a layer, scaled embeddings",
    ),
}


def family_named(model_type: Any, where: str) -> ModelFamily:
    """Returns the family of a `model_type`.

    Args:
        where: file that names the family, for the error message.

    Raises:
        DataError: the family is unknown or not supported, or a plug-in cannot be loaded or is not a
            ModelFamily.
    """
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    plug_ins = {entry.name: entry for entry in entry_points(group=PLUG_INS)}
    if model_type in MISSING and model_type not in plug_ins:
        name, missing = MISSING[model_type]
        raise DataError(
            f"{name} (model family {model_type!r}) is not supported; missing: {missing}",
            where=where,
            fix=(
                "docs/howto/model_family.md shows how to add a family, also from your own package"
            ),
        )
    if model_type not in plug_ins:
        known = (
            f"known: {', '.join(sorted(FAMILIES.keys() | plug_ins.keys()))};"
            " docs/howto/model_family.md adds one"
        )
        raise DataError(f"model family {model_type!r} is unknown", where=where, fix=known)
    entry = plug_ins[model_type]
    try:
        family = entry.load()
    except Exception as error:  # whatever a user's module raises while it is imported
        said = f"{type(error).__name__}: {error}"
        raise DataError(
            f"model family {model_type!r} of {entry.value} cannot be loaded: {said}", where=where
        ) from error
    if not isinstance(family, ModelFamily) or family.model_type != model_type:
        raise DataError(
            f"{entry.value} is no ModelFamily of the model_type {model_type!r}", where=where
        )
    FAMILIES[model_type] = family
    return family


def family_of(shape: ModelShape) -> ModelFamily:
    """Returns the family of a model with the given shape. Loads the family's plug-in, if the family
    has one and this process has not yet loaded the plug-in."""
    return family_named(shape.family, "the model's family")


def read_shape(path: str | Path) -> ModelShape:
    """Reads the shape of the model in a Hugging Face folder.

    Raises:
        DataError: the folder, config.json or a field is missing, the family is unknown, or the
            family does not support a setting.
    """
    file = Path(path) / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except OSError as error:
        raise DataError(
            f"cannot read the model's config.json ({error.strerror})",
            where=str(file),
            fix=_to_download(path),
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(f"not valid JSON: {error}", where=str(file)) from error
    family = family_named(config.get("model_type"), str(file))
    try:
        family.check(config, str(file))
        return family.shape(config)
    except KeyError as error:
        raise DataError(f"the field {error} is missing or null", where=str(file)) from error


def _to_download(path: str | Path) -> str:
    """Returns a hint on how to get a missing model folder. For a path that ends in OWNER/NAME, the
    hint contains the download command."""
    parts = Path(path).parts
    if Path(path).exists() or len(parts) < 2:
        return "model.path must be a Hugging Face model folder on this machine"
    owner, name = parts[-2:]
    if owner in ("models", "..", ".", "/"):
        return (
            f"put the Hugging Face model folder there: hf download OWNER/{name} --local-dir {path}"
        )
    return (
        "model.path must be a Hugging Face model folder on this machine; where there is a network: "
        f"hf download {owner}/{name} --local-dir models/{name}, and then model.path=models/{name}"
    )


def published_shape(path: str | Path) -> ModelShape | None:
    """Returns a model shape that ships with the package. The shape makes it possible to plan or
    rehearse a run without the model. The last component of `path`, such as Qwen2.5-32B in
    `models/Qwen2.5-32B`, selects the shape. Returns None if the path exists, or if no shape of this
    name ships with the package."""
    whole = Path(path).name.lower()
    for name in (whole, whole.removeprefix("deepseek-")):
        folder = SHIPPED / "assets" / "architectures" / name
        if name and folder.is_dir() and not Path(path).exists():
            return read_shape(folder)
    return None


def rule_for(name: str, shape: ModelShape) -> Rule:
    """Returns the rule of a Megatron parameter. The names in a family's rules have placeholders {}
    for the layer number and the expert number. In the returned rule, the numbers of the parameter's
    layer and expert are filled in for the placeholders. Layers and experts are numbered as in the
    whole model.

    Raises:
        KeyError: the family's rules do not contain the parameter.
    """
    # the last pipeline stage's copy of the embedding
    if shape.tied and name == "output_layer.weight":
        return Rule(name, ("model.embed_tokens.weight",), "vocab")
    numbers, pattern = numbered(name)
    for rule in family_of(shape).rules:
        if rule.megatron == pattern:
            return replace(rule, megatron=name, hf=tuple(hf.format(*numbers) for hf in rule.hf))
    raise KeyError(f"{name} is not in the {shape.family} table")


def cost_of(shape: ModelShape) -> Callable[[int], float]:
    """Returns a function that computes the work for a sequence from the sequence's length in
    tokens. The unit of work is the work of the linear layers for one token (see
    ModelFamily.cost)."""
    return partial(family_of(shape).cost, shape)
