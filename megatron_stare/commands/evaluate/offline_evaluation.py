"""Evaluates a checkpoint on tasks without starting a trainer. The command `megatron-stare eval`
uses this module.

The function `read` checks the configuration, the checkpoint and the tasks' prompts before any
process starts. The function `run` starts engines, loads the weights and samples the missing
responses. The module evaluation/evaluate.py computes the results, both for this command and for
training.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_stare.cluster.engines_alone import FolderWeights, make_engines
from megatron_stare.commands.evaluate.evaluation_folder import EvaluationFolder
from megatron_stare.config.engines_alone import SYNC_FOLDER, engines_alone, synced_in
from megatron_stare.config.load import dump_yaml, with_absolute_paths
from megatron_stare.config.process_settings import check_environment, check_ports, port_share
from megatron_stare.config.schema import Config
from megatron_stare.driver.evaluator import Evaluator
from megatron_stare.errors import ConfigError, UserError, unknown_name
from megatron_stare.hangs.driver_side import Watched
from megatron_stare.models.shape import ModelShape
from megatron_stare.planning.preflight import check_checkpoint_of, check_task
from megatron_stare.process.interruption import ClosingStack
from megatron_stare.process.workers import Handle
from megatron_stare.registry import Extension
from megatron_stare.rewards.known_answers import open_pool
from megatron_stare.rewards.verifier_pool import VerifierPool
from megatron_stare.rollout.engines.model_folder import (
    check_vocabulary,
    load_tokenizer,
    stop_token_ids,
)
from megatron_stare.rollout.engines.replicas import (
    replica_count,
    replica_gpus,
    replica_nodes,
)
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.rollout_source import Progress
from megatron_stare.run_dir.run_state import RUN_STATE, RunState
from megatron_stare.tasks.task import Evaluation, Task, digest, evaluation_tasks
from megatron_stare.weights.files.convert import Options, megatron_to_hf, stops_of
from megatron_stare.weights.files.hf_folder import exported_step
from megatron_stare.weights.files.torch_dist import find, is_checkpoint

OWN_TASK = "held-out"  # name of the run's own task
WEIGHTS = "weights"  # temporary Hugging Face folder, converted from a distributed checkpoint
Shown = Callable[[str], Progress]  # returns the progress callback of a task


@dataclass(frozen=True)
class Checkpoint:
    """The weights to evaluate.

    `path`: a Hugging Face folder or a distributed checkpoint.
    `distributed`: true if `path` is a distributed checkpoint.
    `step`: the number of training steps that produced the weights, or 0 if the number is unknown.
    """

    path: Path
    distributed: bool
    step: int

    @classmethod
    def at(cls, path: Path) -> Checkpoint:
        """Finds the checkpoint at a path. Raises DataError if there is no checkpoint at the
        path."""
        path = path.absolute()
        if (path / "config.json").exists() and not is_checkpoint(path):
            return cls(path, False, exported_step(path) or 0)
        path = find(path)
        return cls(path, True, RunState.read(path).step if (path / RUN_STATE).exists() else 0)

    def identity(self) -> dict[str, Any]:
        """Returns values that identify the weights. The returned values are the path, the step, and
        one digest of the weight files' names, sizes and modification times."""
        files = sorted(
            file for file in self.path.iterdir() if file.suffix in (".safetensors", ".distcp")
        )
        held = [(file.name, (found := file.stat()).st_size, found.st_mtime_ns) for file in files]
        return {"path": str(self.path), "step": self.step, "files": digest(held)}


@dataclass(frozen=True)
class Opened:
    """Checked inputs of an evaluation."""

    config: Config
    shape: ModelShape
    checkpoint: Checkpoint
    stop_ids: tuple[int, ...]
    evaluations: dict[str, Evaluation]

    def what(self) -> dict[str, Any]:
        """Returns the inputs and settings that determine the responses. The responses also depend
        on the software version of the engine and on rounding errors, which the returned dict does
        not contain."""
        config = self.config
        return {
            "checkpoint": self.checkpoint.identity(),
            "engine": {
                "name": config.rollout.engine.written(),
                "dtype": config.sglang.dtype or config.model.dtype,
                "kv_cache_dtype": config.sglang.kv_cache_dtype,
                "quantization": config.sglang.quantization,
            },
            "tasks": {name: _what(evaluation) for name, evaluation in self.evaluations.items()},
        }


def read(config: Config, checkpoint: Path, tasks: Sequence[str]) -> Opened:
    """Reads and checks the inputs of an evaluation before engines start.

    Args:
        checkpoint: a Hugging Face folder, a run directory or a distributed checkpoint.
        tasks: the names of the tasks to evaluate. If `tasks` is empty, all tasks of the
            configuration are evaluated.

    Raises:
        UserError: the first fault found.
    """
    found = Checkpoint.at(checkpoint)
    config = with_absolute_paths(config)
    shape = check_checkpoint_of(found.path, config)
    config = engines_alone(config, None if found.distributed else str(found.path))
    if replica_gpus(config):
        # this process, which sends the weights, shares no GPU and no NCCL group with the servers
        sglang = config.sglang.model_copy(update={"sync": "disk"})
        config = config.model_copy(update={"sglang": sglang})
    if replica_nodes(config) > 1:
        raise ConfigError(
            "an evaluation can only start engines that lie on one node",
            where="sglang.nodes",
            fix=(
                "start the servers yourself and name them in sglang.urls, or set sglang.nodes=1 on"
                " GPUs that hold the model"
            ),
        )
    chosen = _chosen(config, tasks)
    for task in chosen.values():
        check_task(task, shape)
    check_environment(config)
    check_ports(config, replica_count(config))
    tokenizer = load_tokenizer(config.model.path)
    check_vocabulary(tokenizer, shape, config.model.path)
    return Opened(
        config,
        shape,
        found,
        tuple(sorted({*stop_token_ids(config.model.path, tokenizer), *stops_of(found.path)})),
        {
            name: Evaluation(t, t.problems(tokenizer), t.environment(tokenizer))
            for name, t in chosen.items()
        },
    )


def run(
    opened: Opened, out: Path, shown: Shown, note: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Evaluates every task. Returns a dict that maps the name of each task to the record of the
    task's results. Samples only the responses that are not stored in `out`. If a verifier needs all
    responses to a prompt at once and one of these responses is not stored, `run` samples all
    responses to this prompt again.

    Raises:
        UserError: `out` belongs to another evaluation, or engines, verifiers or the disk fail.
            Responses that were sampled before the failure stay stored.
    """
    config, step = opened.config, opened.checkpoint.step
    records: dict[str, dict[str, Any]] = {}
    for each in opened.evaluations.values():
        for line in each.told():
            note(line)
    with ClosingStack() as stack:
        pools: dict[Extension, VerifierPool] = {}
        for evaluation in opened.evaluations.values():
            verifier = evaluation.task.verifier
            if verifier not in pools:
                with evaluation.task.blamed():
                    pools[verifier] = open_pool(verifier, config, config.reward.workers)
                stack.callback(pools[verifier].close)
            stack.callback(evaluation.environment.close)
        folder = EvaluationFolder(out, opened.what(), dump_yaml(config))
        stack.callback(folder.close)
        missing = {name: _missing(folder, name, each) for name, each in opened.evaluations.items()}
        if kept := sum(each.wanted for each in missing.values()) - sum(
            each.left for each in missing.values()
        ):
            note(f"{kept} responses are in {out} already")
        watched = Watched(config, out, step, port_share(config, 0, replica_count(config)))
        stack.callback(watched.close)
        engines: EnginePool | None = None
        if any(each.left for each in missing.values()):
            stack.callback(_remove_if_empty, out / SYNC_FOLDER)
            with watched.phase("start"):
                runner = make_engines(synced_in(config, out), note)
            stack.callback(runner.close)
            for line in runner.notes():
                note(line)
            engines = runner.engines
            _load(opened, engines, runner.share, out / WEIGHTS, watched)
        stack.callback(watched.last_phase, "closing")
        evaluator = Evaluator(engines, pools, config.reward, opened.stop_ids)
        for name, evaluation in opened.evaluations.items():
            told = _both(shown(name), watched.progress)
            with watched.phase("eval"):
                found = evaluator.evaluate(evaluation, step, step, told, folder.task(name))
            found.record["decoding"] = evaluation.task.decoding() | {"seed": config.eval.seed}
            folder.finish(name, found)
            records[name] = found.record
    shutil.rmtree(out / WEIGHTS, ignore_errors=True)
    return records


def _both(one: Progress, other: Progress) -> Progress:
    def told(done: int, wanted: int) -> None:
        one(done, wanted)
        other(done, wanted)

    return told


@dataclass(frozen=True)
class _Missing:
    wanted: int
    left: int


def _missing(folder: EvaluationFolder, name: str, evaluation: Evaluation) -> _Missing:
    """Counts the responses that a task needs, and how many of these responses the folder lacks."""
    task = evaluation.task
    wanted = left = 0
    for greedy, samples in ((False, task.samples), (True, int(task.config.eval.greedy))):
        known = folder.known(name, greedy)
        keys = [(prompt.cursor, index) for prompt in evaluation.prompts for index in range(samples)]
        wanted, left = wanted + len(keys), left + sum(key not in known for key in keys)
    return _Missing(wanted, left)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # there is none, or a server has not removed its files
        folder.rmdir()


def _load(
    opened: Opened,
    engines: EnginePool,
    share: Callable[[Any], Handle],
    converted: Path,
    watched: Watched,
) -> None:
    """Sends the weights to the engines and verifies the sync."""
    folder, config = opened.checkpoint.path, opened.config
    if opened.checkpoint.distributed:
        # An existing folder comes from a killed evaluation. It is complete, since conversion never
        # leaves a partial folder.
        if not converted.exists():
            with watched.phase("conversion"):
                megatron_to_hf(folder, converted, Path(config.model.path), Options())
        folder = converted
    dtype = getattr(torch, config.model.dtype)
    weights = FolderWeights(
        folder, opened.shape, dtype, config.rollout.sync_bucket_mb * 10**6, share
    )
    with watched.phase("sync"):
        engines.update_weights(opened.checkpoint.step, weights)


def _chosen(config: Config, names: Sequence[str]) -> dict[str, Task]:
    """Returns a dict that maps the name of each chosen task to the task. Raises ConfigError if the
    name of a task is unknown, or if the configuration contains no tasks."""
    known = {task.name or OWN_TASK: task for task in evaluation_tasks(config, offline=True)}
    if not known:
        raise ConfigError(
            "there is nothing to evaluate: eval.tasks is empty and eval.prompts is 0",
            where="eval",
            fix="list tasks in eval.tasks, or set eval.prompts",
        )
    for name in names:
        if name not in known:
            raise unknown_name(name, known, "--tasks")
    return {name: known[name] for name in names or known}


def _what(evaluation: Evaluation) -> dict[str, Any]:
    """Returns all settings and inputs that a task's responses depend on. The returned dict does not
    contain the number of samples, so that a resumed evaluation can use more samples."""
    task, prompts = evaluation.task, evaluation.prompts
    decoding = {name: value for name, value in task.decoding().items() if name != "samples"}
    asked = [(prompt.cursor, prompt.token_ids, prompt.answer) for prompt in prompts]
    return {
        **decoding,
        "seed": task.config.eval.seed,
        "verifier": task.verifier.written(),
        "environment": task.config.rollout.environment.written(),
        "problems": len(prompts),
        "prompts": digest(asked),
    }


def default_out(config: Config, checkpoint: Path) -> Path:
    """Returns evals/NAME, where NAME consists of the run's name and the last folders of the
    checkpoint's path."""
    parts = [
        part
        for part in checkpoint.absolute().parts[-3:]
        if part not in ("/", "checkpoints", "runs")
    ]
    return Path("evals") / "-".join([config.run.name, *parts])


def refuse_missing(checkpoint: Path) -> None:
    """Raises UserError if the path does not exist."""
    if not checkpoint.exists():
        raise UserError(
            "there is no such folder", where=f"--checkpoint {checkpoint}", fix="correct the path"
        )
