"""Makes the rollout source and the group selection that a configuration describes. Checks that the
settings of the rollout source fit the other settings."""

from __future__ import annotations

from collections.abc import Callable

from megatron_stare.algorithms.method import Method
from megatron_stare.algorithms.policy import PolicyGradient
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.sources.ages import Ages
from megatron_stare.rollout.sources.asynchronous_source import AsynchronousSource
from megatron_stare.rollout.sources.group_sampling import (
    EveryGroup,
    Groups,
    InformativeGroups,
    ReturnablePrompts,
)
from megatron_stare.rollout.sources.partial_sampling import PartialGroups
from megatron_stare.rollout.sources.rollout_source import Progress, Rollouts
from megatron_stare.rollout.sources.synchronous_source import SynchronousSource


def make_groups(config: Config, prompts: ReturnablePrompts) -> Groups:
    """Makes the object that selects a step's prompt groups."""
    batch, partial = config.batch, config.partial
    if partial.tokens is not None:
        under_way = partial.groups_under_way(batch.prompts, batch.generate_prompts)
        refills = None if batch.generate_prompts is None else batch.max_rounds
        return PartialGroups(
            prompts, batch.prompts, batch.samples_per_prompt, under_way, partial.tokens, refills
        )
    if batch.generate_prompts is None:
        return EveryGroup(prompts, batch.prompts, batch.samples_per_prompt)
    return InformativeGroups(
        prompts, batch.prompts, batch.samples_per_prompt, batch.generate_prompts, batch.max_rounds
    )


def make_source(
    config: Config,
    rollouts: Rollouts,
    groups: Groups,
    sampling: Callable[[int], SamplingParams],
    prompts: Callable[[], dict[str, int]],
    progress: Progress,
    idle: Callable[[], None],
) -> SynchronousSource | AsynchronousSource:
    """Makes the rollout source that the configuration describes. Only a SynchronousSource calls the
    callback `idle`, because the engines of an AsynchronousSource do not become idle."""
    rollout = config.rollout
    masked_from = rollout.stale_from if rollout.stale_tokens == "mask" else None
    if rollout.staleness is None:
        ages = None if config.partial.tokens is None else Ages(masked_from=masked_from)
        return SynchronousSource(rollouts, groups, sampling, prompts, progress, idle, ages)
    return AsynchronousSource(
        rollouts,
        groups,
        sampling,
        prompts,
        rollout.staleness,
        config.run.steps,
        progress,
        masked_from,
    )


def check_staleness(config: Config, method: Method) -> None:
    """Checks the settings for stale tokens, which are tokens that older weights sampled. Raises
    ConfigError if these settings contradict each other, or contradict other settings."""
    rollout, cut = config.rollout, config.partial.tokens is not None
    if cut:
        check_partial(config)
    if rollout.staleness is not None and config.sglang.colocated:
        raise ConfigError(
            "engines that share the trainer's device rest while it computes, and cannot sample"
            " ahead of it",
            where="rollout.staleness",
            fix="set sglang.colocated=false, or rollout.staleness=null",
        )
    if rollout.stale_tokens == "correct" and rollout.stale_from > 1:
        raise ConfigError(
            "no token is masked for its age, so this setting has no effect",
            where="rollout.stale_from",
            fix="set rollout.stale_tokens=mask, or rollout.stale_from=1",
        )
    if not (rollout.staleness or cut) or (
        rollout.stale_tokens == "mask" and rollout.stale_from == 1
    ):
        return
    if isinstance(method, PolicyGradient) and method.correction is None:
        allowed = (
            f"{rollout.staleness} steps old"
            if rollout.staleness
            else "older than those a step trains"
        )
        raise ConfigError(
            f"tokens may be sampled by weights that are {allowed}, and nothing corrects the loss"
            " for it",
            where="rollout.staleness" if rollout.staleness else "partial.tokens",
            fix=(
                "set algorithm.correction={mode: truncate} or another of its modes, or"
                " rollout.stale_tokens=mask"
            ),
        )


def check_partial(config: Config) -> None:
    """Raises ConfigError if the settings for cutting long responses (section `partial`) contradict
    other settings."""
    partial, batch, longest = config.partial, config.batch, config.rollout.max_new_tokens
    assert partial.tokens is not None
    if config.rollout.staleness is not None:
        raise ConfigError(
            "responses that are sampled ahead of training continue over weight updates, and are"
            " never cut",
            where="partial.tokens",
            fix="set it to null, or rollout.staleness=null",
        )
    if partial.tokens >= longest:
        raise ConfigError(
            f"responses of up to {longest} tokens are never cut after {partial.tokens}",
            where="partial.tokens",
            fix="a fraction of rollout.max_new_tokens, or null",
        )
    if partial.prompts is not None and batch.generate_prompts is not None:
        raise ConfigError(
            "with dynamic sampling batch.generate_prompts sets the number of prompt groups under"
            " way",
            where="partial.prompts",
            fix="set one of them to null",
        )
    under_way = partial.groups_under_way(batch.prompts, batch.generate_prompts)
    if under_way < batch.prompts:
        raise ConfigError(
            f"a step takes {batch.prompts} prompt groups, but only {under_way} are under way",
            where="partial.prompts" if batch.generate_prompts is None else "batch.generate_prompts",
            fix=f"at least {batch.prompts}; twice as many let long responses take their time",
        )
