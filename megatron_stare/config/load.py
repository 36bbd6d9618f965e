"""Loads a Config from a YAML file and dotted overrides, and checks the Config. If the Config has
several faults, the error describes only one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatron_stare.config.algorithm import AlgorithmConfig
from megatron_stare.config.formats import (
    FORMAT,
    KEY,
    config_up_to_date,
    names_met,
    names_now,
    without_former_defaults,
)
from megatron_stare.config.layers import (
    DEFAULTS,
    Layer,
    Override,
    breadth,
    layers_of,
    merged,
    read_layers,
    read_yaml,
)
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError, in_words, unknown_name

if TYPE_CHECKING:
    from megatron_stare.algorithms.method import Method


class _WithoutMethod(Config):
    """A configuration whose section `algorithm` is not read, because reading `algorithm` would
    import torch."""

    algorithm: Any = None


def load_config(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str | Override] = (),
    *,
    before_method: Callable[[], object] = lambda: None,
    beneath: Sequence[Layer] = (),
) -> Config:
    """Merges the configuration layers of `source` on top of the layers in `beneath`, applies the
    overrides `key.sub=value`, and validates the result.

    Args:
        source: a file, the name of a configuration that ships with the package, or the sections
            themselves. The files that a shipped configuration names are found from any folder.
        overrides: settings above all layers, in any order. Of two values for one key, the last
            holds. Paths in overrides are relative to the current folder.
        before_method: a function that is called when everything except the method has been checked.
            The method is read after the call; reading the method imports torch.
        beneath: layers beneath the layers of `source`, lowest first.

    Raises:
        ConfigError: a file is missing or is not valid YAML, a key is unknown, or a value is out of
            range. For an unknown key, the message suggests a known key.
    """
    layers = layers_of(source) if isinstance(source, Mapping) else read_layers(source)
    laid = [each if isinstance(each, Override) else Override(each) for each in overrides]
    return _validated([*beneath, *layers, *sorted(laid, key=breadth)], before_method)


def load_section(path: str | Path, name: str) -> Any:
    """Returns one section of a configuration file, merged with the same section of the
    configuration layers beneath the file. Does not check the configuration's other sections.

    Raises:
        ConfigError: a file is missing or is not valid YAML, or a value of the section is wrong.
    """
    layers = read_layers(path)
    field = Config.model_fields[name]
    section = merged(layers).get(name)
    try:
        kind: type[BaseModel] = field.annotation  # type: ignore[assignment]
        return field.get_default() if section is None else kind.model_validate(section)
    except ValidationError as error:
        raise config_error(error, layers) from error


def load_recorded(path: str | Path) -> Config:
    """Reads a run's config.yaml in the current format or in an earlier format.

    Raises:
        UserError: as in load_config, or a newer release wrote the file.
    """
    return validate(config_up_to_date(read_yaml(path), path), str(path))


def former_names(path: str | Path) -> list[str]:
    """Returns a list with one message if a configuration file refers to sections by former names.
    For each of these sections, the message contains the former name and the current name. Returns
    [] if the configuration file uses only current section names.

    Raises:
        ConfigError: the file is missing or is not YAML.
    """
    met = names_met(read_yaml(path))
    return [f"{path} is of an earlier format: {', '.join(met)}"] if met else []


def validate(tree: dict[str, Any], source: str) -> Config:
    """Validates a tree of sections. If there are faults, raises a ConfigError that describes one
    fault and gives `source` as the fault's place."""
    return _validated([Layer(source, tree)])


def _validated(
    layers: Sequence[Layer | Override], before_method: Callable[[], object] = lambda: None
) -> Config:
    tree = without_former_defaults(merged(layers))
    try:
        _WithoutMethod.model_validate(tree)
        before_method()
        return Config.model_validate(tree)
    except ValidationError as error:
        raise config_error(error, layers) from error


def build_method(settings: Mapping[str, Any] | str) -> Method:
    """Builds the method of an `algorithm` section without the rest of a configuration, for tests.

    Raises:
        ConfigError: the method or a setting is unknown, or a value is out of range. For an unknown
            setting, the message suggests a known setting.
    """
    try:
        return AlgorithmConfig.read(settings).method
    except ValidationError as error:
        raise config_error(error, [Layer("algorithm", {})]) from error


def config_error(error: ValidationError, layers: Sequence[Layer | Override]) -> ConfigError:
    """Converts a ValidationError of pydantic into a ConfigError. If pydantic reports several
    errors, the ConfigError describes only one error. The message names the configuration layer or
    the override that causes this error."""
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    loc = [str(part) for part in first["loc"]]
    source = _to_blame(first, layers)
    where = f"{source}: {'.'.join(loc)}" if loc else source
    told = first.get("ctx", {}).get("error")
    if isinstance(told, ConfigError):
        return ConfigError(told.what, where=where, fix=told.fix)
    if first["type"] == "extra_forbidden":
        if len(loc) == 1 and names_now(loc[0]):
            now = [names_now(each) for each in _dotted(loc[0], first["input"])]
            return ConfigError(
                f"unknown name {loc[0]!r}", where=where, fix=f"use {' and '.join(now)}"
            )
        near = _elsewhere(loc[-1])
        if near and loc[0] != "algorithm":
            return ConfigError(
                f"unknown name {loc[-1]!r}", where=where, fix=f"use {' or '.join(near)}"
            )
        return unknown_name(loc[-1], _keys_at(loc[:-1]), where)
    if first["type"] == "missing":
        return ConfigError("this key is required and missing", where=where)
    # the message names the settings that contradict each other
    if first["type"] == "value_error" and isinstance(first["input"], Mapping):
        return ConfigError(in_words(first), where=where)
    return ConfigError(f"{in_words(first)} (got {first['input']!r})", where=where)


# settings here by their names in other trainers; docs/from_trl.md, from_verl.md and from_slime.md
# list more
_ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "lr_scheduler_type": "optimizer.schedule",
    "max_grad_norm": "optimizer.clip_grad",
    "grad_clip": "optimizer.clip_grad",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "max_steps": "run.steps",
    "total_training_steps": "run.steps",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "save_steps": "run.checkpoint_every",
    "save_freq": "run.checkpoint_every",
    "eval_steps": "eval.every",
    "test_freq": "eval.every",
    "report_to": "observability.sinks",
    "logger": "observability.sinks",
    "model_name_or_path": "model.path",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "gradient_checkpointing": "model.recompute",
    "num_generations": "batch.samples_per_prompt",
    "rollout_n": "batch.samples_per_prompt",
    "train_batch_size": "batch.prompts",
    "batch_size": "batch.prompts",
    "ppo_mini_batch_size": "batch.mini_batch_prompts",
    "num_iterations": "batch.epochs",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "reward_funcs": "reward.verifier",
    "train_files": "data.path",
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "beta": "algorithm.reference_kl",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "loss_agg_mode": "algorithm.aggregation",
    "entropy_coeff": "algorithm.entropy_bonus",
}


def _elsewhere(name: str) -> list[str]:
    """Returns the dotted names of the settings that a user probably meant by the unknown name
    `name`. If `name` is a setting of another training library, returns the corresponding setting of
    this project. For any other `name`, returns the settings called `name` in all sections of this
    project's configuration."""
    if name in _ELSEWHERE:
        return [_ELSEWHERE[name]]
    return _having(name, Config)


def _having(name: str, model: type[BaseModel], above: str = "") -> list[str]:
    """Returns the dotted name of every setting called `name` in the nested sections of the pydantic
    class `model`."""
    found = []
    for key, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            found += [f"{above}{key}.{name}"] if name in section.model_fields else []
            found += _having(name, section, f"{above}{key}.")
    return found


def _dotted(name: str, value: Any) -> list[str]:
    """Returns the dotted names of all settings inside a section, or [name] if `value` is not a
    section."""
    if not isinstance(value, Mapping) or not value:
        return [name]
    return [each for key, inner in value.items() for each in _dotted(f"{name}.{key}", inner)]


def _to_blame(wrong: ErrorDetails, layers: Sequence[Layer | Override]) -> str:
    """Returns the source (a file or an override) of the configuration layer that causes a
    validation error.

    If the error concerns a single setting, the function returns the source of the highest layer
    that sets this setting.

    An error can also concern a whole section. In this case, the function examines all layers that
    set a part of the section, from the highest layer to the lowest layer. For each examined layer,
    the function merges only the layers that are lower than the examined layer. If these lower
    layers alone do not lead to the error, the examined layer causes the error. The function returns
    the source of the first examined layer that causes the error.

    If the function finds no such layer, the function returns the source of the highest layer that
    is not an override.
    """
    loc = [str(part) for part in wrong["loc"]]
    for number, layer in reversed(list(enumerate(layers))):
        if not loc or not layer.sets(loc):
            continue
        if not isinstance(wrong["input"], Mapping) or not _has_error(
            merged(layers[:number]), wrong
        ):
            return layer.source
    return next(layer.source for layer in reversed(layers) if isinstance(layer, Layer))


def _has_error(tree: dict[str, Any], wrong: ErrorDetails) -> bool:
    model = Config if wrong["loc"][:1] == ("algorithm",) else _WithoutMethod
    try:
        model.model_validate(tree)
    except ValidationError as error:
        return any(
            all(each[key] == wrong[key] for key in ("loc", "type", "msg"))
            for each in error.errors()
        )
    return False


def _keys_at(loc: list[str]) -> list[str]:
    model: type[BaseModel] = Config
    for part in loc:
        if part.isdigit():  # index in a list of sections
            continue
        annotation = model.model_fields[part].annotation
        annotation = next(iter(get_args(annotation)), annotation)  # a list's element type
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
    return [*model.model_fields, *([] if loc else [DEFAULTS])]


def with_absolute_paths(config: Config) -> Config:
    """Makes the paths of all files and folders absolute. Does not resolve symbolic links. In a
    virtual environment, `python` is a symbolic link to the base interpreter. If the link were
    resolved, the servers would run with the base interpreter, which does not find the packages of
    the virtual environment."""
    data: dict[str, Any] = {}
    # a user's source may interpret these settings differently
    if reads_files(config.data.source.name):
        data = {
            "path": _absolute(config.data.path),
            "eval_path": _absolute(config.data.eval_path),
            "mixture": [
                file.model_copy(update={"path": _absolute(file.path)})
                for file in config.data.mixture
            ],
            "decontaminate": [_absolute(path) for path in config.data.decontaminate],
        }
    tasks = [
        task.model_copy(update={"path": _absolute(task.path)})
        if reads_files((task.source or config.data.source).name)
        else task
        for task in config.eval.tasks
    ]
    python = config.sglang.python
    found: dict[str, dict[str, Any]] = {
        "model": {key: _absolute(getattr(config.model, key)) for key in ("path", "reference_path")},
        "reward": {"known_answers": _absolute(config.reward.known_answers)},
        "data": data,
        "sglang": {"python": _absolute(python)} if python and os.sep in python else {},
    }
    sections = {
        section: getattr(config, section).model_copy(update=paths)
        for section, paths in found.items()
    }
    return config.model_copy(
        update=sections | {"eval": config.eval.model_copy(update={"tasks": tasks})}
    )


def reads_files(source: str) -> bool:
    """Tells whether a prompt source interprets data.path and similar settings as file names."""
    return source in ("files", "jsonl")


def _absolute(path: str | None) -> str | None:
    return path if not path or path.startswith("hf:") else os.path.abspath(path)


def dump_yaml(config: Config) -> str:
    """Returns the resolved configuration as YAML that load_config and load_recorded can read."""
    return yaml.safe_dump({KEY: FORMAT, **config.model_dump(mode="json")}, sort_keys=False)
