"""Makes tasks from the configuration: the task on which a run trains, and the tasks on which the
run is evaluated.

A task names a prompt source, a verifier and an environment. The registries are
data/prompt_source.py for sources, rewards/verifier.py for verifiers and environments/__init__.py
for environments.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
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

# settings that a task of `eval.tasks` may have, and the run's setting that each overrides
OWN = {
    "source": "data.source",
    "path": "data.eval_path",
    "template": "data.template",
    "chat_template": "data.chat_template",
    "chat_template_kwargs": "data.chat_template_kwargs",
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
# settings of the environment that say where programs run; they do not affect the responses
_PLACES = ("sandbox_url", "sandbox_workers")


@dataclass(frozen=True)
class Task:
    """Data, prompt template, verifier, environment and sampling settings under one name.

    `config`: the run's configuration, in which the task's own settings replace the run's settings.
        The dict `OWN` lists the settings that a task may have. Sources and environments, including
        user-defined ones, are built from `config`. Sources and environments therefore need no
        special code for tasks.
    `name`: the task's name in the list `eval.tasks`. `name` is None for the run's own task, which
        uses only the run's settings.
    `own`: names of the settings that the task overrides. The dict maps the setting's name in the
        run's configuration to the setting's name in a task of `eval.tasks`: for example,
        `data.eval_path` to `path`.
    """

    config: Config
    name: str | None = None
    top_p: float = 1.0
    own: Mapping[str, str] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Number of responses per problem."""
        return self.config.eval.samples

    @property
    def ks(self) -> tuple[int, ...]:
        """Values of k for pass@k and maj@k, ascending."""
        return tuple(sorted(set(self.config.eval.k))) or default_ks(self.samples)

    def check_ks(self) -> None:
        """Raises ConfigError if any value in `ks` is below 1 or exceeds the number of responses to
        a problem."""
        if wrong := [k for k in self.ks if not 1 <= k <= self.samples]:
            with self.blamed():
                raise ConfigError(
                    f"pass@{wrong[0]} cannot be computed from {self.samples} responses a problem",
                    where="eval.k",
                    fix=f"use k from 1 to {self.samples}, or raise eval.samples",
                )

    @property
    def verifier(self) -> Extension:
        """Name or dotted path of the task's verifier, with the verifier's settings."""
        return self.config.reward.verifier

    def environment(self, tokenizer: Any) -> Environment:
        """Builds the task's environment. Raises ConfigError in the same cases as
        `make_environment`."""
        with self.blamed():
            return make_environment(self.config.rollout.environment, self.config, tokenizer)

    def problems(self, tokenizer: Any) -> list[Prompt]:
        """Returns the problems that every evaluation of this task uses. Raises UserError if the
        problems are missing, malformed or fewer than requested."""
        # 0 means all: nobody lists a task of `eval.tasks` to ask 0 problems
        wanted = self.config.eval.prompts or None
        with self.blamed():
            return held_out(self.config, tokenizer, wanted)

    def sampling(
        self, step: int, seed: int, stop_token_ids: Collection[int], greedy: bool = False
    ) -> SamplingParams:
        """Returns the task's sampling settings in the form that engines take."""
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
        """Returns the entries that describe this task in the record of an evaluation: the task's
        name, if the task has one, and the task's sampling settings. A resume may change the name
        and the sampling settings, so config.yaml does not tell which values an earlier evaluation
        had."""
        return ({} if self.name is None else {"task": self.name}) | {"decoding": self.decoding()}

    def decoding(self) -> dict[str, Any]:
        """Returns the sampling settings that the record of an evaluation contains."""
        return {
            "samples": self.samples,
            "temperature": self.config.rollout.temperature,
            "top_p": self.top_p,
            "max_new_tokens": self.config.rollout.max_new_tokens,
        }

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Context manager that rewrites a UserError raised in its `with` block. The rewritten error
        names this task, and names the task's setting instead of the run's setting."""
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
    """A checked task, with the problems that every evaluation uses and the environment that makes
    the responses."""

    task: Task
    prompts: list[Prompt]
    environment: Environment

    def told(self) -> list[str]:
        """Returns messages for the user about the task's prompts. For example, a message says how
        many prompts were left out, and why."""
        name = "the evaluation" if self.task.name is None else f"eval.tasks[{self.task.name}]"
        return [f"{name}: {line}" for line in getattr(self.prompts, "told", ())]

    def about(self) -> dict[str, Any]:
        """Returns the entries that describe this evaluation in its record. The entry `asked`
        identifies four parts of the evaluation: the problems (including their answers), the prompt
        template, the verifier, and the environment. The results of two evaluations can be compared
        problem by problem only if all four parts are the same in both evaluations.

        The token ids of the prompts are left out, so that models with different tokenizers can be
        compared.
        """
        data, environment = self.task.config.data, self.task.config.rollout.environment
        settings = {key: value for key, value in environment.settings.items() if key not in _PLACES}
        template = (data.template, data.chat_template, sorted(data.chat_template_kwargs.items()))
        return self.task.about() | {
            "asked": {
                "problems": digest([(prompt.text, prompt.answer) for prompt in self.prompts]),
                "template": digest(template),
                "verifier": str(self.task.verifier),
                "environment": str(Extension(environment.name, settings)),
            }
        }


def digest(thing: Any) -> str:
    """Returns 16 hexadecimal digits that identify a value that JSON can hold."""
    # YAML may also give dates, as values for a chat template
    return hashlib.sha256(json.dumps(thing, default=str).encode()).hexdigest()[:16]


def training_task(config: Config) -> Task:
    """Returns the task that the run trains on."""
    return Task(config)


def evaluation_tasks(config: Config, offline: bool = False) -> list[Task]:
    """Returns the tasks of `eval.tasks`. If `eval.tasks` is empty and `eval.prompts` is above 0,
    the only returned task is the run's own task.

    Args:
        offline: whether to include the tasks that are not evaluated during training.
    """
    if not config.eval.tasks:
        return [Task(config)] if config.eval.prompts else []
    return [
        _task(config, section) for section in config.eval.tasks if offline or not section.offline
    ]


def _task(config: Config, section: EvalTask) -> Task:
    """Returns the task of one section of `eval.tasks`. The settings in `section` replace the run's
    settings."""
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
