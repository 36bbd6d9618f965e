"""The section `eval`: what is evaluated, and how."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from megatron_stare.config.performance_section import Section
from megatron_stare.config.template import check_template


class EvalTask(Section):
    """A task that the policy is evaluated on. What it leaves out, or sets to null, is the run's own."""

    name: str = Field(pattern=r"^[\w.@+-]+$", description="in eval.jsonl, the report and TensorBoard; each has its own")
    source: str | None = Field(None, description="as data.source")
    path: str | None = Field(None, description="as data.eval_path")
    template: str | None = Field(None, description="as data.template; the template '{prompt}' adds nothing")
    chat_template: bool | None = Field(None, description="as data.chat_template")
    max_prompt_tokens: int | None = Field(None, ge=1, description="as rollout.max_prompt_tokens")
    truncate_prompt: Literal["error", "drop", "left"] | None = Field(None, description="as rollout.truncate_prompt")
    verifier: str | None = Field(None, description="as reward.verifier")
    environment: str | None = Field(None, description="as rollout.environment")
    prompts: int | None = Field(None, ge=1, description="problems; null: eval.prompts, and where that is 0, all")
    samples: int | None = Field(None, ge=1, description="as eval.samples")
    k: list[int] | None = Field(None, description="as eval.k")
    offline: bool = Field(False, description="leave it out of training: `megatron-stare eval` alone asks it")
    temperature: float | None = Field(None, gt=0, description="as rollout.temperature")
    top_p: float = Field(
        1.0, gt=0, le=1, description="only the likeliest tokens are drawn, as few as together have this probability"
    )
    max_new_tokens: int | None = Field(None, ge=1, description="as rollout.max_new_tokens")
    greedy: bool | None = Field(None, description="as eval.greedy")

    _template = field_validator("template")(check_template)


class EvalConfig(Section):
    """Results on held-out problems, before and after training and in between; see docs/evaluation.md."""

    prompts: int = Field(0, ge=0, description="problems; 0: no evaluation, unless there are tasks")
    every: int = Field(0, ge=0, description="steps between evaluations; 0: only before and after")
    greedy: bool = Field(True, description="also decode greedily")
    samples: int = Field(1, ge=1, description="responses a problem; its result is their mean (avg@k)")
    k: list[int] = Field(
        [], description="of pass@k and maj@k, none above `samples`; empty: the powers of two up to it, and it"
    )
    seed: int = Field(
        20_240_917, ge=0, lt=2**31, description="keys the sampling noise of every evaluation, which is not the run's"
    )
    engines: int = Field(
        0, ge=0, description="engines that evaluations have to themselves, started beside rollout.engines; 0: none"
    )
    urls: list[str] = Field([], description="likewise, running servers, as sglang.urls")
    tasks: list[EvalTask] = Field(
        [], description="what is evaluated, see below; empty: the run's own task, on held-out problems"
    )

    @field_validator("tasks")
    @classmethod
    def _names_differ(cls, tasks: list[EvalTask]) -> list[EvalTask]:
        names = [task.name for task in tasks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two tasks are called {name!r}: their results could not be told apart")
        return tasks
