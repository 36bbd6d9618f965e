"""Reads and checks the inputs of a run before any process starts. Also rehearses a run
(`--dry-run`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_stare.config.load import load_recorded
from megatron_stare.config.performance import hints
from megatron_stare.config.resolved import ResolvedRun, resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.data.prompt_source import (
    PromptSource,
    find_source,
    first_prompt,
    held_out,
    make_source,
    told,
)
from megatron_stare.data.records import read_records
from megatron_stare.driver.resuming import (
    check_resume,
    find_run,
    prompt_inputs,
    refuse_other_inputs,
    resume_point,
)
from megatron_stare.environments.chat import ChatFormat
from megatron_stare.environments.environment import Environment, find_environment
from megatron_stare.errors import ConfigError
from megatron_stare.models import published_shape
from megatron_stare.observability.metrics.own_metrics import OwnMetric, load_metrics
from megatron_stare.observability.sink import Sink, make_sinks
from megatron_stare.planning.limits import limits_not_checked
from megatron_stare.planning.memory import activation_memory
from megatron_stare.planning.preflight import check_run, not_checked, prompt_files
from megatron_stare.process.interruption import poll
from megatron_stare.records.batch import Prompt
from megatron_stare.registry import Extension
from megatron_stare.rewards.known_answers import open_pool
from megatron_stare.rollout.engines.model_folder import (
    check_vocabulary,
    load_tokenizer,
    stop_token_ids,
)
from megatron_stare.run_dir.run_files import evaluated_steps
from megatron_stare.run_dir.run_state import CONFIG, check_place
from megatron_stare.tasks.task import Evaluation, Task, evaluation_tasks, training_task
from megatron_stare.weights.files.hf_folder import exported_step


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run. The configuration in `run` has passed the checks of `check_run`."""

    run: ResolvedRun
    tokenizer: Any
    stop_ids: tuple[int, ...]
    task: Task  # the training task
    source: PromptSource
    environment: Environment
    evaluations: list[Evaluation]
    sinks: dict[str, Sink]
    metrics: dict[str, OwnMetric]  # defined by the user
    held_out: list[Prompt]  # demonstrations for the held-out loss

    def verifiers(self) -> dict[Extension, Task]:
        """Maps each verifier to the first task that uses it; the training task comes before the
        evaluation tasks. Returns {} for supervised fine-tuning."""
        if self.config.supervised:
            return {}
        return verifiers_of([self.task, *(evaluation.task for evaluation in self.evaluations)])

    def data_remarks(self) -> list[str]:
        """Returns remarks about the data. A remark describes a property of the data that is often
        unintended. Each remark is one line. Only some sources provide remarks."""
        batch = self.config.batch
        found = [f"data: {line}" for line in told(self.source)]
        for each in self.evaluations:
            found += [f"data: {line}" for line in each.told()]
        for line in getattr(self.held_out, "told", ()):
            found.append(f"data: data.eval_path: {line}")
        most: int | None = getattr(self.source, "problems", None)
        name = "batch.prompts" if batch.generate_prompts is None else "batch.generate_prompts"
        asked = batch.generate_prompts or batch.prompts
        if most is not None and asked > most:
            found.append(
                f"data: {name} is {asked}, but there are only {most} problems: a step repeats some"
                " of them"
            )
        counted = getattr(self.source, "trained_on", lambda prompts: 0)
        for each in self.evaluations:
            if same := counted(prompt.text for prompt in each.prompts):
                task = (
                    "the evaluation" if each.task.name is None else f"eval.tasks[{each.task.name}]"
                )
                found.append(
                    f"warning: {same} of {len(each.prompts)} problems of {task} are trained on;"
                    " name its file in data.decontaminate to leave them out of training"
                )
        return found + self._bos_remark() + self._turn_end_remark()

    def _bos_remark(self) -> list[str]:
        """Returns a remark if prompts lack the BOS token with which the tokenizer begins texts, and
        [] otherwise. The function checks only prompts that are made without a chat template,
        because a chat template decides itself whether a text begins with BOS. If
        `data.chat_template` is true, or if the run is supervised fine-tuning, the function returns
        [] without a check."""
        if self.config.data.chat_template or self.config.supervised:
            return []
        lead = self.tokenizer("a").input_ids[:1]
        if lead != [self.tokenizer.bos_token_id]:
            return []
        if list(first_prompt(self.source).token_ids[:1]) == lead:
            return []
        return [
            f"warning: this model's tokenizer begins texts with {self.tokenizer.bos_token}, prompts"
            " do not: begin data.template with it"
        ]

    def _turn_end_remark(self) -> list[str]:
        """Returns a remark if responses do not stop at the token with which the chat template ends
        a turn, and [] otherwise. Some published base models have such a chat template. For example,
        the template of Qwen2.5-7B ends a turn with <|im_end|>, but the model's only end-of-sequence
        token is <|endoftext|>. A response can then continue with a second turn after <|im_end|>. A
        verifier reads the response as text without special tokens, and therefore cannot see where
        the first turn ends."""
        if not self.config.data.chat_template or self.config.supervised:
            return []
        try:
            end = ChatFormat(self.tokenizer, [], self.config.data.chat_template_kwargs).end
        except ConfigError:  # the template has one turn, or ends turns with no special token
            return []
        if end in self.stop_ids:
            return []
        here = self.tokenizer.convert_ids_to_tokens([*self.stop_ids])
        return [
            "warning: the chat template ends turns with"
            f" {self.tokenizer.convert_ids_to_tokens(end)}, but responses continue after it until"
            f" {' or '.join(map(str, here))}; to end them there, set eos_token_id to"
            f" {sorted({*self.stop_ids, end})} in generation_config.json"
        ]

    @property
    def config(self) -> Config:
        """Checked configuration with absolute paths."""
        return self.run.config


def verifiers_of(tasks: Iterable[Task]) -> dict[Extension, Task]:
    """Maps each verifier to the first task in `tasks` that uses it."""
    found: dict[Extension, Task] = {}
    for task in tasks:
        found.setdefault(task.verifier, task)
    return found


def read_inputs(config: Config) -> Inputs:
    """Reads and checks all inputs of a run, before the run starts.

    Raises:
        UserError: the first fault in the configuration, the model or the prompts.
        KeyboardInterrupt: a signal arrived.
    """
    run = check_run(config)
    config = run.config
    tokenizer = load_tokenizer(config.model.path)
    check_vocabulary(tokenizer, run.shape, config.model.path)
    task = training_task(config)
    poll()
    source = make_source(config, tokenizer, "train")
    poll()
    return Inputs(
        run,
        tokenizer,
        stop_token_ids(config.model.path, tokenizer),
        task,
        source,
        task.environment(tokenizer),
        [
            Evaluation(each, each.problems(tokenizer), each.environment(tokenizer))
            for each in evaluation_tasks(config)
        ],
        make_sinks(config.observability.sinks),
        load_metrics(config.observability.metrics),
        _held_out(config, tokenizer),
    )


def _held_out(config: Config, tokenizer: Any) -> list[Prompt]:
    """Returns all demonstrations of `data.eval_path` if the run is supervised fine-tuning, and []
    otherwise."""
    if not config.supervised or config.data.eval_path is None:
        return []
    return held_out(config, tokenizer, None)


class Rehearsal(NamedTuple):
    """Result of a rehearsal.

    `config`: the resolved configuration.
    `said`: remarks on the data, one line of text each.
    """

    config: Config
    said: list[str]


def rehearse(
    config: Config, *, resume: bool, from_step: int | None = None, dump_step: int | None = None
) -> Rehearsal:
    """Performs all checks that a run performs before the run starts its workers. Leaves behind no
    files and no processes.

    As in a run, the rehearsal starts every verifier in its own process and tests the verifier. The
    rehearsal does not check whether external servers answer. If the memory size of the GPUs is
    unknown, the rehearsal does not check whether the run fits into this memory. The function
    `rehearse` does not query a Ray cluster, but the function `remarks` does.

    If the model is not on this machine but the package knows the model's shape, the rehearsal skips
    the checks that need more than the shape. `remarks` lists the skipped checks.

    Raises:
        UserError: the first fault found.
    """
    if published_shape(config.model.path) and not resume:
        return Rehearsal(_rehearse_without_model(config, dump_step), [])
    inputs = read_inputs(config)
    done = 0
    if resume:
        _, state = check_resume(inputs.config, from_step)
        if state:
            made_with = prompt_inputs(inputs.config, inputs.tokenizer, inputs.source)
            refuse_other_inputs(state.inputs, made_with, inputs.config)
            inputs.source.restore(state.data)
            done = state.step
    else:
        check_place(inputs.config)
    check_dump_step(inputs.config, dump_step, done)
    _try_verifiers(inputs.verifiers(), config)
    return Rehearsal(inputs.config, inputs.data_remarks())


def _rehearse_without_model(config: Config, dump_step: int | None) -> Config:
    config = check_run(config, published=True).config
    tasks = [training_task(config), *evaluation_tasks(config)]
    for task in tasks:
        with task.blamed():
            find_source(task.config)
            find_environment(task.config.rollout.environment)
    for path in prompt_files(config):
        if Path(path).exists() and not config.supervised:  # rows are rendered by the tokenizer
            read_records(path, config.data.prompt_key, config.data.answer_key, config.data.columns)
    make_sinks(config.observability.sinks)
    load_metrics(config.observability.metrics)
    check_place(config)
    check_dump_step(config, dump_step, 0)
    if not config.supervised:
        _try_verifiers(verifiers_of(tasks), config)
    return config


def _try_verifiers(verifiers: dict[Extension, Task], config: Config) -> None:
    for verifier, task in verifiers.items():
        with task.blamed():
            open_pool(verifier, config, workers=1).close()


def remarks(config: Config) -> list[str]:
    """Returns the lines that a dry run prints in addition to the configuration.

    The lines describe the run's activation memory, and the placement of the run on the Ray cluster.
    The lines also name the `performance` settings that are disabled on this device, and the
    performance features of Megatron that this package does not support. The lines also list the
    checks that were skipped because the model, a file or the servers' software is not on this
    machine, or because the kind of GPU is unknown.

    Raises:
        UserError: the run cannot join the Ray cluster, or the nodes of the cluster can never hold
            the layout.
    """
    found = placement(config)
    micro_batch = config.batch.micro_batch_tokens
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    rows = 1 if config.batch.packed else max(micro_batch // longest, 1)
    shape = resolve_run(config, published=True).shape
    memory = activation_memory(config, shape, micro_batch, longest, rows)
    found.append(
        f"activations: a rank keeps about {memory.kept / 1e9:.3g} GB of a micro-batch for the"
        " backward pass"
        + (f", which recomputes up to {memory.again / 1e9:.3g} GB more" if memory.again else "")
    )
    return found + hints(config) + not_checked(config) + limits_not_checked(config)


def placement(config: Config) -> list[str]:
    """See `preview`. Imports Ray only if the run joins a cluster."""
    if config.runtime.runner != "ray" or not config.runtime.ray_address:
        return []
    from megatron_stare.cluster.ray_runner import preview

    return preview(config)


def check_dump_step(config: Config, dump_step: int | None, done: int) -> None:
    """Raises ConfigError if the step to dump is not among the run's remaining steps."""
    if dump_step is None or done < dump_step <= config.run.steps:
        return
    left = f"{done + 1} to {config.run.steps}" if done < config.run.steps else "none"
    raise ConfigError(
        f"this run will not make step {dump_step}; the remaining steps: {left}", where="--dump-step"
    )


def finished_run(config: Config, from_step: int | None = None) -> Path | None:
    """Finds the configured run. Returns the run's directory if nothing is left to do, and None
    otherwise. Nothing is left to do if the run has finished its last step, and the resulting policy
    has been exported and evaluated on every task.

    Args:
        from_step: see resume_point.

    Raises:
        UserError: the run does not exist or cannot be resumed.
    """
    path = find_run(config)
    _, state = resume_point(path, config, from_step)
    if state is None:
        return None
    planned = load_recorded(path / CONFIG).run.steps
    whole = state.step == config.run.steps == planned and exported_step(path / "hf") == state.step
    if not whole:
        return None
    done = evaluated_steps(path)
    evaluated = all((state.step, task.name) in done for task in evaluation_tasks(config))
    return path if evaluated else None
