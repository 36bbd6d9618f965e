"""From the configuration to tasks: the one a run trains on, and those it is evaluated on.

A task names its parts, each found where its kind is registered: the prompt source
(data/prompt_source.py), the verifier (rewards/verifier.py), the environment
(environments/environment.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_stare.config.rollout_sections import EvalTask
from megatron_stare.config.schema import Config
from megatron_stare.data.prompt_source import held_out
from megatron_stare.environments.environment import Environment, make_environment
from megatron_stare.errors import ConfigError, UserError
from megatron_stare.evaluation.results import default_ks
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.registry import Extension

# what a task of `eval.tasks` may have of its own, and the run's setting that it takes the place of
OWN = {
    "source": "data.source",
    "path": "data.eval_path",
    "template": "data.template",
    "chat_template": "data.chat_template",
    "max_prompt_tokens": "rollout.max_prompt_tokens",
    "truncate_prompt": "rollout.truncate_prompt",
    "verifier": "reward.verifier",
    "environment": "rollout.environment",
    "prompts": "eval.prompts",
    "temperature": "rollout.temperature",
    "max_new_tokens": "rollout.max_new_tokens",
    "greedy": "eval.greedy",
    "samples": "eval.samples",
    "k": "eval.k",
}


@dataclass(frozen=True)
class Task:
    """Data, prompt template, verifier and environment, and how responses are sampled.

    name: None of a run's own task.
    config: the run's, in which the settings of OWN are this task's. So whatever is made of a
        configuration, a source or an environment of the user's own too, is made for any task and
        need not know of tasks.
    own: the task's settings by the run's that they take the place of.
    """

    config: Config
    name: str | None = None
    top_p: float = 1.0
    own: Mapping[str, str] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Responses a problem."""
        return self.config.eval.samples

    @property
    def ks(self) -> tuple[int, ...]:
        """Values of k for pass@k and maj@k, ascending."""
        return tuple(sorted(set(self.config.eval.k))) or default_ks(self.samples)

    def check_ks(self) -> None:
        """Raises ConfigError where there are no k responses to a problem."""
        if wrong := [k for k in self.ks if not 1 <= k <= self.samples]:
            with self.blamed():
                raise ConfigError(
                    f"pass@{wrong[0]} cannot be computed from {self.samples} responses a problem",
                    where="eval.k",
                    fix=f"use k from 1 to {self.samples}, or raise eval.samples",
                )

    @property
    def verifier(self) -> Extension:
        """Its name or dotted path, and its settings."""
        return self.config.reward.verifier

    def environment(self, tokenizer: Any) -> Environment:
        """Raises ConfigError where there is none of this name."""
        with self.blamed():
            return make_environment(self.config.rollout.environment, self.config, tokenizer)

    def problems(self, tokenizer: Any) -> list[Prompt]:
        """Problems of every evaluation. Raises UserError where they are missing, malformed or fewer
        than asked for."""
        # None: a task of `eval.tasks` that is asked for 0 problems would be left out
        wanted = self.config.eval.prompts or None
        with self.blamed():
            return held_out(self.config, tokenizer, wanted)

    def sampling(
        self, step: int, seed: int, stop_token_ids: Collection[int], greedy: bool = False
    ) -> SamplingParams:
        """How an engine samples the responses."""
        return SamplingParams(
            temperature=self.config.rollout.temperature,
            max_new_tokens=self.config.rollout.max_new_tokens,
            seed=seed,
            step=step,
            stop_token_ids=tuple(stop_token_ids),
            greedy=greedy,
            top_p=self.top_p,
        )

    def about(self) -> dict[str, Any]:
        """Entries on the task for the record of an evaluation.

        Empty for the run's own task where each problem is answered once: config.yaml has that.
        """
        if self.name is None and self.samples == 1:
            return {}
        return ({} if self.name is None else {"task": self.name}) | {"decoding": self.decoding()}

    def decoding(self) -> dict[str, Any]:
        """How responses are sampled, in a word each."""
        return {
            "samples": self.samples,
            "temperature": self.config.rollout.temperature,
            "top_p": self.top_p,
            "max_new_tokens": self.config.rollout.max_new_tokens,
        }

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """A UserError from inside names this task, and its own setting in place of the run's."""
        try:
            yield
        except UserError as error:
            if self.name is None:
                raise
            where, fix = error.where, error.fix
            for setting, key in self.own.items():
                if where and (where == setting or where.startswith(f"{setting}.")):
                    where = f"{self._where}.{key}" + where.removeprefix(setting)
                fix = fix and fix.replace(setting, f"{self._where}.{key}")
            if where and not where.startswith(self._where):
                where = f"{self._where}, {where}"
            raise type(error)(error.what, where=where or self._where, fix=fix) from error

    @property
    def _where(self) -> str:
        return f"eval.tasks[{self.name}]"


@dataclass(frozen=True)
class Evaluation:
    """A task, made and checked: the problems that every evaluation asks, and what makes responses
    of them."""

    task: Task
    prompts: list[Prompt]
    environment: Environment


def training_task(config: Config) -> Task:
    """Task that the run trains on."""
    return Task(config)


def evaluation_tasks(config: Config, offline: bool = False) -> list[Task]:
    """Tasks of `eval.tasks`; where there are none and `eval.prompts` is above 0, the run's own
    task.

    Args:
        offline: those too that training leaves out.
    """
    if not config.eval.tasks:
        return [Task(config)] if config.eval.prompts else []
    return [
        _task(config, section) for section in config.eval.tasks if offline or not section.offline
    ]


def _task(config: Config, section: EvalTask) -> Task:
    """The task of a section, which lies over the run's own settings."""
    given = {key: value for key in OWN if (value := getattr(section, key)) is not None}
    changed: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        room, _, setting = OWN[key].partition(".")
        changed.setdefault(room, {})[setting] = value
    laid = {
        room: getattr(config, room).model_copy(update=settings)
        for room, settings in changed.items()
    }
    return Task(
        config=config.model_copy(update=laid),
        name=section.name,
        top_p=section.top_p,
        own={OWN[key]: key for key in given},
    )
