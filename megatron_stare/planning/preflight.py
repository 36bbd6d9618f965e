"""Checks a run before any process starts. `train` makes the same checks with and without
`--dry-run`.

driver/opening.py makes the checks that need the tokenizer, the data or the run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from megatron_stare.algorithms.method import Method
from megatron_stare.algorithms.policy import PolicyGradient
from megatron_stare.config.engines_alone import evaluation_engines
from megatron_stare.config.load import reads_files, with_absolute_paths
from megatron_stare.config.performance import check_device_performance, check_performance
from megatron_stare.config.process_settings import check_environment, check_ports
from megatron_stare.config.resolved import ResolvedRun, resolve_run
from megatron_stare.config.rules import (
    check_device,
    check_layout,
    check_moe,
    check_profile,
    check_recompute,
)
from megatron_stare.config.schema import Config
from megatron_stare.data.prompt_source import find_source
from megatron_stare.environments.environment import find_environment
from megatron_stare.errors import ConfigError
from megatron_stare.models import published_shape, read_shape
from megatron_stare.models.shape import ModelShape
from megatron_stare.planning.limits import check_limits
from megatron_stare.planning.memory import check_memory
from megatron_stare.rollout.engines.replicas import (
    check_engine,
    check_sync,
    replica_count,
    replica_gpus,
    replica_nodes,
    without_install,
)
from megatron_stare.rollout.sources.make_source import check_staleness
from megatron_stare.tasks.task import Task, evaluation_tasks
from megatron_stare.weights.files.blocks import cut
from megatron_stare.weights.files.check import check_folder
from megatron_stare.weights.files.convert import companions_of
from megatron_stare.weights.files.torch_dist import TorchDist, check_checkpoint, is_checkpoint


@dataclass(frozen=True)
class Asked:
    """Argument of a check function. The dicts CONFIGURATION and RUN contain the check functions.

    `run`: the run to check, with its configuration and the shape of its model.
    `published`: True if the checks accept a missing model whose shape ships with the package. The
        checks then read the model's shape from the copy in this package, and not from the model's
        folder. A model is missing if nothing exists at its path on this machine.
    """

    run: ResolvedRun
    published: bool = False

    @property
    def absent(self) -> bool:
        """Returns True if the model is not on this machine and the model's published shape is used
        instead."""
        return self.published and published_shape(self.config.model.path) is not None

    @property
    def config(self) -> Config:
        return self.run.config

    @property
    def shape(self) -> ModelShape:
        return self.run.shape

    @property
    def served(self) -> Config:
        """Configuration that is passed to `check_engine`, `check_tasks` and
        `check_evaluation_engines`. If this machine has neither the model nor the server software,
        the settings that only the server software can check are left out of the configuration."""
        return (without_install(self.config) if self.absent else None) or self.config


def _device(asked: Asked) -> None:
    # A cluster that the run joins may have other devices. Its ranks check them.
    if not asked.config.runtime.ray_address:
        check_device(asked.config, experts=asked.shape.experts > 0)
        check_device_performance(asked.config.performance)


# Checks in order. A check raises a UserError for settings that cannot work.
CONFIGURATION: dict[str, Callable[[Asked], None]] = {
    "weights": lambda asked: (
        None if asked.absent else check_weights(asked.config.model.path, asked.shape)
    ),
    "reference": lambda asked: check_reference(
        asked.config, asked.run.method, asked.shape, published=asked.published
    ),
    "supervised": lambda asked: check_supervised(asked.config),
    "mini-batches": lambda asked: check_updates(asked.config),
    "dynamic sampling": lambda asked: check_rounds(asked.config),
    "staleness": lambda asked: check_staleness(asked.config, asked.run.method),
    "8 bits": lambda asked: check_eight_bits(asked.config, asked.run.method),
    "statistics": lambda asked: check_statistics(asked.config, asked.run.method),
    "head": lambda asked: check_head(asked.config, asked.run.method),
    "aggregation": lambda asked: check_aggregation(asked.config, asked.run.method),
    "branches": lambda asked: check_branches(asked.config, asked.run.method),
    "optimizer": lambda asked: check_optimizer(asked.config),
    "performance": lambda asked: check_performance(asked.config, asked.shape),
    "environment variables": lambda asked: check_environment(asked.config),
    "device": _device,
    "layout": lambda asked: check_layout(asked.config.parallel, asked.shape),
    "recomputation": lambda asked: check_recompute(
        asked.config.model, asked.config.parallel, asked.shape
    ),
    "experts": lambda asked: check_moe(asked.config, asked.shape),
    "lengths": lambda asked: check_lengths(asked.config, asked.shape),
    "ports": lambda asked: check_ports(
        asked.config, replica_count(asked.config), replica_nodes(asked.config)
    ),
    "engines": lambda asked: (
        None if asked.config.supervised else check_engine(asked.served, asked.shape)
    ),
    "evaluations": lambda asked: check_tasks(asked.served, asked.shape),
    "evaluation's engines": lambda asked: check_evaluation_engines(asked.served, asked.shape),
}
# Further checks for a run, which saves checkpoints and is placed on devices.
RUN: dict[str, Callable[[Asked], None]] = {
    **CONFIGURATION,
    "weight sync": lambda asked: None if asked.config.supervised else check_sync(asked.config),
    "checkpoints": lambda asked: check_checkpoints(asked.config),
    "best checkpoints": lambda asked: check_best(asked.config),
    "runner": lambda asked: check_runner(asked.config),
    "profile": lambda asked: check_profile(asked.config),
    "memory": lambda asked: check_memory(asked.run),
    "limits": lambda asked: check_limits(asked.run),
}


def check(config: Config, *, published: bool = False) -> ResolvedRun:
    """Resolves a configuration, makes its paths absolute, and runs the checks of the dict
    CONFIGURATION.

    Args:
        published: as in resolve_run. If True, checks that need the files of an absent model are
            skipped.

    Raises:
        UserError: a check finds a fault in method, model, layout, lengths or engine. The first
            fault ends the checks.
    """
    return _checked(config, CONFIGURATION, published)


def check_run(config: Config, *, published: bool = False) -> ResolvedRun:
    """Works like `check`, but runs the checks of the dict RUN instead of the checks of the dict
    CONFIGURATION. The checks in the dict RUN need no data and no tokenizer."""
    return _checked(config, RUN, published)


def _checked(
    config: Config, checks: Mapping[str, Callable[[Asked], None]], published: bool
) -> ResolvedRun:
    run = resolve_run(with_absolute_paths(config), published=published)
    asked = Asked(run, published)
    for each in checks.values():
        each(asked)
    return run


def check_weights(path: str, shape: ModelShape) -> None:
    """Raises DataError if weights of the model are missing in a Hugging Face folder or converted
    checkpoint."""
    if is_checkpoint(Path(path)):
        check_checkpoint(TorchDist(path), shape, cut(shape))
    else:
        check_folder(path, shape)


def check_checkpoints(config: Config) -> None:
    """Raises ConfigError if the run could not save the state that a resumed run needs."""
    if config.optimizer.name == "sgd":
        raise ConfigError(
            "megatron-core cannot save the state of SGD, and every run ends with a checkpoint",
            where="optimizer.name",
            fix="use adam; tools/check_invariance.py takes single steps of SGD",
        )


def check_best(config: Config) -> None:
    """Raises ConfigError if `checkpoint.best_by` names an evaluation that does not run during
    training."""
    metric = config.checkpoint.best_by
    if metric is None or not metric.startswith("eval/"):
        return
    _, *task, _ = metric.split("/")
    tasks = [each.name for each in evaluation_tasks(config)]
    if not tasks or not config.eval.every:
        raise ConfigError(
            f"no evaluation between steps measures {metric}, so no checkpoint could be the best",
            where="checkpoint.best_by",
            fix=(
                "set eval.every, and eval.prompts or eval.tasks; or name a metric of every step,"
                " such as reward/mean"
            ),
        )
    if (task[0] if task else None) not in tasks:
        names = ", ".join("eval/..." if name is None else f"eval/{name}/..." for name in tasks)
        raise ConfigError(
            f"no task of this run has the metric {metric}",
            where="checkpoint.best_by",
            fix=f"use one of {names}",
        )


def check_runner(config: Config) -> None:
    """Raises ConfigError if a run with the inline runner has several ranks. The inline runner has
    only one process, and each rank needs a process of its own."""
    if config.runtime.runner == "inline" and config.parallel.world_size != 1:
        raise ConfigError(
            f"the inline runner has one process, the layout has {config.parallel.world_size} ranks",
            where="runtime.runner",
            fix="use runner: ray, or a layout of one rank",
        )


def check_optimizer(config: Config) -> None:
    """Raises ConfigError for an optimizer that Megatron's DistributedOptimizer does not support."""
    if config.optimizer.distributed and config.optimizer.name != "adam":
        raise ConfigError(
            f"{config.optimizer.name} has no distributed form",
            where="optimizer.distributed",
            fix="set it to false",
        )


def check_reference(
    config: Config, method: Method, shape: ModelShape, *, published: bool = False
) -> None:
    """Raises UserError in three cases: a reference policy is configured although the method uses
    none, the reference's weights are missing, or the reference and the model differ in shape.

    Args:
        published: as in `check`.
    """
    path = config.model.reference_path
    for name in ("reference_path", "reference_refresh_every"):
        if getattr(config.model, name) is not None and not method.needs_reference:
            raise ConfigError(
                "the method uses no reference policy",
                where=f"model.{name}",
                fix="set algorithm.reference_kl={coef: ...}, or set it to null",
            )
    if path is None:
        return
    ships = published_shape(path) if published else None
    if (ships or read_shape(path)) != shape:
        raise ConfigError(
            f"{path} is not a model of the same shape as {config.model.path}",
            where="model.reference_path",
        )
    if ships is None:
        check_weights(path, shape)


def check_supervised(config: Config) -> None:
    """Raises ConfigError if a run with supervised fine-tuning has a setting that supervised
    fine-tuning does not support, or a data source without conversations. Also raises ConfigError if
    a run without supervised fine-tuning has a data source with conversations."""
    factory, _ = find_source(config)
    written = getattr(factory, "demonstrates", False)
    if not config.supervised:
        if written:
            raise ConfigError(
                f"the source {config.data.source.name!r} holds responses that are written already,"
                f" and {config.algorithm.name} learns from sampled ones",
                where="data.source",
                fix="start the run with `megatron-stare sft`, or name a source of prompts",
            )
        return
    if not written:
        raise ConfigError(
            f"the source {config.data.source.name!r} has no conversations to learn from",
            where="data.source",
            fix="data.source=messages",
        )
    batch, rollout = config.batch, config.rollout
    for where, value, wanted, why in (
        ("batch.samples_per_prompt", batch.samples_per_prompt, 1, "a row is one conversation"),
        ("batch.updates", batch.updates, 1, "a step makes one optimizer step over batch.prompts"),
        ("batch.generate_prompts", batch.generate_prompts, None, "nothing is sampled"),
        ("partial.tokens", config.partial.tokens, None, "nothing is sampled"),
        ("rollout.staleness", rollout.staleness, None, "nothing is sampled"),
        ("rollout.temperature", rollout.temperature, 1.0, "the loss is that of the policy itself"),
        ("sglang.colocated", config.sglang.colocated, False, "there are no engines"),
        ("moe.routing_replay", config.moe.routing_replay, False, "there are no engines"),
        ("model.reference_path", config.model.reference_path, None, "there is no reference"),
        ("eval.tasks", len(config.eval.tasks), 0, "evaluate the exported policy afterwards"),
        ("eval.prompts", config.eval.prompts, 0, "evaluate the exported policy afterwards"),
        ("data.deduplicate", config.data.deduplicate, False, "conversations are not compared"),
        ("data.decontaminate", config.data.decontaminate, [], "conversations are not compared"),
    ):
        if value == wanted:
            continue
        fix = f"{where}={'null' if wanted is None else str(wanted).lower()}"
        if where == "batch.updates":
            where, fix = "batch.epochs", "batch.epochs=1 batch.mini_batch_prompts=null"
        if where == "eval.tasks":
            fix = "leave it out, and use megatron-stare eval"
        raise ConfigError(f"supervised fine-tuning: {why}", where=where, fix=fix)


def check_updates(config: Config) -> None:
    """Raises ConfigError if the rollout batch cannot be split into mini-batches of equal size."""
    prompts, mini_batch = config.batch.prompts, config.batch.mini_batch_prompts
    if mini_batch is None or prompts % mini_batch == 0:
        return
    divisors = [n for n in range(1, prompts + 1) if prompts % n == 0]
    nearest = min(divisors, key=lambda n: (abs(n - mini_batch), n))
    raise ConfigError(
        f"{prompts} prompt groups cannot be cut into mini-batches of {mini_batch}",
        where="batch.mini_batch_prompts",
        fix=f"use a divisor of batch.prompts; the nearest is {nearest}",
    )


def check_rounds(config: Config) -> None:
    """Raises ConfigError if dynamic sampling cannot produce enough prompt groups for a step."""
    batch = config.batch
    if batch.generate_prompts is None or batch.generate_prompts * batch.max_rounds >= batch.prompts:
        return
    raise ConfigError(
        f"{batch.max_rounds} rounds of {batch.generate_prompts} prompt groups cannot give the"
        f" step's {batch.prompts}",
        where="batch.generate_prompts",
        fix=(
            f"at least {-(-batch.prompts // batch.max_rounds)}; published recipes make three times"
            " batch.prompts"
        ),
    )


def check_eight_bits(config: Config, method: Method) -> None:
    """Raises ConfigError if two conditions both hold: the servers store the weights or the KV cache
    in 8 bits, and the method has no importance correction. Servers with 8-bit weights or an 8-bit
    KV cache sample from a policy that differs from the trainer's policy. An importance correction
    accounts for this difference in the loss."""
    asked = config.sglang
    if config.supervised or not isinstance(method, PolicyGradient) or method.correction is not None:
        return
    for setting, held in (
        ("kv_cache_dtype", f"a cache of {asked.kv_cache_dtype}"),
        ("quantization", f"weights of {asked.quantization}"),
    ):
        if getattr(asked, setting) is not None:
            raise ConfigError(
                f"servers with {held} sample from another policy than the trainer's, and nothing"
                " corrects the loss for it",
                where=f"sglang.{setting}",
                fix=(
                    "set algorithm.correction={mode: truncate} or another of its modes, or"
                    f" sglang.{setting}=null"
                ),
            )


def check_statistics(config: Config, method: Method) -> None:
    """Raises ConfigError if the lagged gate skips the log-prob pass, but the method or another
    setting needs the log-prob pass. Also raises ConfigError in two cases for a method that needs
    the entropy change of one update: a step has several updates, or `statistics.scope` is
    `micro_batch`."""
    if method.measures_every and config.batch.updates > 1:
        raise ConfigError(
            f"{config.algorithm.name} learns from the entropy change of one update, and a rollout"
            f" batch has {config.batch.updates}",
            where="batch.mini_batch_prompts",
            fix="batch.mini_batch_prompts=null and batch.epochs=1",
        )
    if method.measures_every and config.statistics.scope == "micro_batch":
        raise ConfigError(
            f"{config.algorithm.name} forecasts the entropy change of a selection over the whole"
            " batch",
            where="statistics.scope",
            fix="statistics.scope=global",
        )
    if not config.skips_log_prob_pass or config.supervised:
        return
    exact = "set statistics.gate=exact"
    if config.statistics.surprisal != "rollout":
        raise ConfigError(
            f"statistics.surprisal={config.statistics.surprisal} needs a log-prob pass, which"
            " gives the exact gate at no extra cost",
            where="statistics.gate",
            fix=f"{exact}, or statistics.surprisal=rollout as well",
        )
    if config.batch.updates > 1:
        raise ConfigError(
            f"{config.batch.updates} optimizer steps a rollout batch need old log-probs, and their"
            " log-prob pass gives the exact gate at no extra cost",
            where="statistics.gate",
            fix=f"{exact}, or batch.mini_batch_prompts=null and batch.epochs=1",
        )
    if method.reads_log_prob_pass is not None:
        raise ConfigError(
            f"{method.reads_log_prob_pass}, which this setting skips",
            where="statistics.gate",
            fix=exact,
        )
    if method.needs_second_moment:
        raise ConfigError(
            f"{config.algorithm.name} reads sums over the vocabulary of the log-prob pass, which"
            " this setting skips",
            where="statistics.gate",
            fix=exact,
        )
    if config.observability.entropy_forecast:
        raise ConfigError(
            "the entropy forecast is made from the log-prob pass, which this setting skips",
            where="statistics.gate",
            fix=f"{exact}, or observability.entropy_forecast=false",
        )


def check_head(config: Config, method: Method) -> None:
    """Raises ConfigError if the setting `model.head` is `gradient_in_forward`, and the loss of a
    token depends on other tokens of the same response. With `gradient_in_forward`, the gradient of
    a token is computed in the forward pass, before the log-probs of later tokens are known."""
    if config.model.head == "gradient_in_forward" and method.coupling == "sequence":
        raise ConfigError(
            f"{config.algorithm.name} couples the tokens of a response, so the gradient for one"
            " token's log-prob needs the log-probs of all others first",
            where="model.head",
            fix="use recompute, which saves as much memory, or auto",
        )


def check_branches(config: Config, method: Method) -> None:
    """Raises ConfigError if the environment can split a response into branches, but the method or
    routing replay does not support branches."""
    environment, settings = find_environment(config.rollout.environment)
    if not environment.branches(settings):
        return
    where = "rollout.environment"
    if method.coupling == "sequence":
        raise ConfigError(
            "responses of this environment may have several branches, which are trained apart, but"
            f" the loss of {config.algorithm.name} couples all tokens of a response",
            where=where,
            fix="use another method, or another environment",
        )
    if config.moe.routing_replay:
        raise ConfigError(
            "responses of this environment may have several branches, whose routing cannot be"
            " replayed",
            where=where,
            fix="moe.routing_replay=false",
        )


def check_aggregation(config: Config, method: Method) -> None:
    """Raises ConfigError if two conditions hold: the loss is divided by the number of tokens in a
    micro-batch, and context parallelism spreads these tokens over several ranks."""
    aggregation = method.aggregation if isinstance(method, PolicyGradient) else ""
    if aggregation == "micro_batch_mean" and config.parallel.context > 1:
        raise ConfigError(
            "micro_batch_mean counts the tokens of a micro-batch, and context-parallel ranks hold a"
            " part of them each",
            where="algorithm.aggregation",
            fix="use token_mean, which is the same in every layout, or parallel.context=1",
        )


def prompt_files(config: Config) -> list[str]:
    """Returns the paths of all prompt files of training and evaluation, without duplicates. Each
    path is written in the same way as in the configuration."""
    tasks = [task.config.data for task in evaluation_tasks(config)]
    trained: list[str | None] = [each.path for each in config.data.mixture] or [config.data.path]
    read = [*trained, *config.data.decontaminate] if reads_files(config.data.source.name) else []
    read += [data.eval_path for data in tasks if reads_files(data.source.name)]
    return list(dict.fromkeys(path for path in read if path))


def not_checked(config: Config) -> list[str]:
    """Returns one line for each check that was skipped because the model is not on this machine.
    Returns [] if the model is on this machine.

    Args:
        config: a configuration that was passed to `check` with `published`.
    """
    path = config.model.path
    if published_shape(path) is None:
        return []
    found = [
        (
            "not checked: weights, tokenizer, chat template and stop tokens of the model, which is"
            f" not on this machine: {path} (its published shape is used)"
        ),
        "not checked: lengths of prompts, and everything else that needs a tokenizer",
    ]
    reference = config.model.reference_path
    if reference and published_shape(reference):
        found.append(f"not checked: the reference {reference}, which is not on this machine")
    if without_install(config) is not None:
        found.append(
            "not checked: the servers' software, which is not on this machine, and flags that only"
            " this software can check"
        )
    missing = [each for each in prompt_files(config) if not Path(each).exists()]
    return found + [f"not checked: {each}, which is not on this machine" for each in missing]


def notices(config: Config) -> list[str]:
    """Returns one line of warning for each setting that is allowed but unusual."""
    if config.statistics.scope == "micro_batch":
        return [
            "warning: statistics.scope=micro_batch selects tokens by micro-batch and rank, so a run"
            " depends on its layout; use it only to compare with published code"
        ]
    return []


def check_lengths(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError if the longest prompt and the longest response together have more tokens
    than the model or a micro-batch allows."""
    check_positions(config, shape)
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    multiple = config.parallel.sequence_multiple
    padded = longest + -longest % multiple
    if padded > config.batch.micro_batch_tokens:
        padding = f", padded to a multiple of {multiple}," if padded > longest else ""
        raise ConfigError(
            f"{rollout.max_prompt_tokens} prompt + {rollout.max_new_tokens} new tokens{padding}"
            f" exceed a micro-batch of {config.batch.micro_batch_tokens} tokens",
            where="batch.micro_batch_tokens",
            fix=f"at least {padded}",
        )


def check_tasks(config: Config, shape: ModelShape) -> None:
    """Calls `check_task` for every evaluation task that runs during training."""
    for task in evaluation_tasks(config):
        check_task(task, shape)


def check_task(task: Task, shape: ModelShape) -> None:
    """Raises ConfigError if an evaluation's responses are too long for the model or an engine, or
    if a k of pass@k exceeds the number of responses per problem. Evaluation responses may be longer
    than a micro-batch, because they are not used for training."""
    with task.blamed():
        check_positions(task.config, shape)
        check_engine(task.config, shape)
    task.check_ks()


def check_evaluation_engines(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError if the engines that serve only evaluations could not run."""
    if (engines := evaluation_engines(config)) is None:
        return
    if config.eval.engines and config.eval.urls:
        raise ConfigError(
            "eval.engines starts engines and eval.urls names running ones: only one of them can"
            " be used",
            where="eval.engines",
            fix="set one",
        )
    if config.eval.engines and replica_nodes(engines) > 1:
        raise ConfigError(
            "the evaluation's own engines must lie on one machine each",
            where="sglang.nodes",
            fix=(
                "start servers yourself and name them in eval.urls, or evaluate with the servers"
                " of training: eval.engines=0"
            ),
        )
    if config.eval.engines and replica_gpus(engines):
        raise ConfigError(
            "the evaluation's own engines are started on this machine, and cannot be placed on"
            " GPUs",
            where="eval.engines",
            fix=(
                "start servers yourself and name them in eval.urls, or evaluate with the servers"
                " of training: eval.engines=0"
            ),
        )
    try:
        check_engine(engines, shape)
    except ConfigError as error:
        where = (error.where or "eval.engines").replace("sglang.urls", "eval.urls")
        raise ConfigError(error.what, where=where, fix=error.fix) from error


def check_checkpoint_of(path: Path, config: Config) -> ModelShape:
    """Checks that the weights at `path` belong to the model in model.path. Returns the shape of the
    model in model.path.

    Args:
        path: a Hugging Face folder or a distributed checkpoint with the weights for an evaluation.

    Raises:
        UserError: the weights are incomplete, or belong to another model.
    """
    shape = read_shape(config.model.path)
    if (theirs := _shape_beside(path)) not in (None, shape):
        differing = [
            each.name
            for each in fields(shape)
            if getattr(theirs, each.name) != getattr(shape, each.name)
        ]
        said = ", ".join(
            f"{name} {getattr(theirs, name)}, not {getattr(shape, name)}" for name in differing[:3]
        )
        raise ConfigError(
            f"{path} is another model than {config.model.path}: {said}",
            where="--checkpoint",
            fix="give another checkpoint, or set model.path to the model of this checkpoint",
        )
    check_weights(str(path), shape)
    return shape


def _shape_beside(path: Path) -> ModelShape | None:
    """Reads the model's shape from the config.json that belongs to the weights at `path`. Returns
    None if the shape cannot be read."""
    try:
        return read_shape(companions_of(path) if is_checkpoint(path) else path)
    except ConfigError:  # for example Megatron-LM's checkpoints, or a run whose model is gone
        return None


def check_positions(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError if the longest prompt and the longest response together have more tokens
    than the model has positions."""
    rollout = config.rollout
    if rollout.max_prompt_tokens >= shape.max_positions:
        raise ConfigError(
            f"prompts of {rollout.max_prompt_tokens} tokens leave no room for a response in the"
            f" model's {shape.max_positions} positions",
            where="rollout.max_prompt_tokens",
            fix=f"at most {shape.max_positions - 1}, less the tokens of a response",
        )
    if rollout.max_prompt_tokens + rollout.max_new_tokens > shape.max_positions:
        raise ConfigError(
            f"{rollout.max_prompt_tokens} prompt + {rollout.max_new_tokens} new tokens exceed the"
            f" model's {shape.max_positions} positions",
            where="rollout.max_new_tokens",
            fix=f"at most {shape.max_positions - rollout.max_prompt_tokens}",
        )
