"""Selects the run to resume and the checkpoint to resume from, before any process of the run
starts. Checks whether the configuration allows the resume.

A resumed run must have the same values of most settings as the original run. The tokenizer, the
chat template, the system prompt and the stop tokens must also be the same, because a replaced file
would silently change every prompt or response. Every checkpoint contains digests that reveal a
change of the tokenizer, the chat template, the system prompt or the stop tokens.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from megatron_stare.config.layers import by_dotted_key
from megatron_stare.config.load import load_recorded, with_absolute_paths
from megatron_stare.config.rollout_sections import PRECISIONS
from megatron_stare.config.schema import Config
from megatron_stare.data.prompt_source import PromptSource, first_prompt
from megatron_stare.errors import ConfigError, DataError, UnusableCheckpointError, UserError
from megatron_stare.rollout.engines.model_folder import stop_token_ids
from megatron_stare.run_dir.json_lines import read_jsonl
from megatron_stare.run_dir.run_files import METRICS_FILE, STARTS_FILE, read_metrics
from megatron_stare.run_dir.run_state import (
    CONFIG,
    RunState,
    check_whole,
    complete_checkpoints,
    refuse_busy,
    step_of,
)
from megatron_stare.weights.files.hf_folder import exported_step

# settings that a resume may change: where and how fast a run computes, and when it gives up; all
# others affect what is trained
FREE_TO_CHANGE = (
    "run.",
    "parallel.",
    "performance.",
    "memory.",
    "plan.",
    "sglang.",
    "checkpoint.",
    "eval.",
    "observability.",
    "runtime.",
    "faults.",
    "agreement.",
    "model.recompute",  # and recompute_...
    "model.head",  # and head_chunk_tokens
    "model.reference_offload",
    "batch.micro_batch_tokens",
    "batch.packed",
    "reward.workers",
    "reward.timeout_s",
    "reward.max_failure_rate",
    "rollout.threads",
    "rollout.engines",
    "rollout.max_batch",
    "rollout.prove_every",
    "rollout.sync_bucket_mb",
    "rollout.environment.sandbox_url",
    "rollout.environment.sandbox_workers",
)
NOT_FREE = ("run.seed", "sglang.seeds", *PRECISIONS)
# not free either if the loss depends on which tokens share a micro-batch
_DIVISION = ("parallel.", "batch.micro_batch_tokens", "batch.packed")
# names of the digests that are not of files
FIRST_PROMPT = "first prompt"
CHAT_TEMPLATE = "chat template"
STOP_TOKENS = "set of stop tokens"
_FILES = (  # tokenizer files
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def find_run(config: Config) -> Path:
    """Returns the directory of the run to resume. If run.dir is set, returns run.dir. If run.dir is
    not set, selects among the runs under runs/ that have the configured name and have finished at
    least one step. If no run with this name has finished a step, selects among all runs with this
    name. The selected run is the run that was started or resumed last.

    Raises:
        UserError: there is no run to resume.
    """
    path = _selected(config)
    if not (path / CONFIG).exists():
        raise UserError(
            "there is no run to resume", where=str(path), fix="give its directory as run.dir=..."
        )
    return path


def _selected(config: Config) -> Path:
    """Returns the directory that `find_run` selects. The directory may not exist."""
    if config.run.dir:
        return Path(config.run.dir)
    named = Path("runs").glob(f"{glob.escape(config.run.name)}-*/{CONFIG}")
    # a run's name may be the beginning of another's
    runs = [file.parent for file in named if _name_in(file) == config.run.name]
    runs.sort(key=lambda run: (_started(run), run))
    begun = [run for run in runs if _has_begun(run)]  # skips starts that were killed
    return (begun or runs or [Path("runs") / config.run.name])[-1]


def refuse_other_run(file: Path, config: Config) -> None:
    """Raises ConfigError if `file` is the config.yaml of one run, but `config` selects another run
    to resume.

    For example, a user copies a run directory whose config.yaml sets `run.dir`. The copied
    config.yaml still contains the path of the original directory. A resume with the copied file
    would continue the run in the original directory, and could delete records there. The error asks
    the user to set `run.dir` to the directory of the run to resume.

    Args:
        file: the configuration file that the user gave.
        config: the configuration in `file`. The user gave no other `run.dir`.
    """
    folder = file.parent
    begun = _has_begun(folder) or (folder / STARTS_FILE).exists()
    if file.name != CONFIG or not begun:  # not the record of a run
        return
    selected = _selected(config)
    if selected.exists() and selected.samefile(folder):
        return
    raise ConfigError(
        f"{file} is the configuration of the run in {folder}, but selects {selected} to resume",
        where="run.dir",
        fix=f"give the directory of the run to resume, such as run.dir={folder}",
    )


def _name_in(file: Path) -> str | None:
    """Returns the `run.name` that a config.yaml records, or None if the file cannot be read."""
    try:
        return str(yaml.safe_load(file.read_text())["run"]["name"])
    except (OSError, ValueError, TypeError, LookupError, yaml.YAMLError):
        return None


def _started(run: Path) -> float:
    """Returns the time of a run's last start or resume in seconds since 1970, or 0 if the run has
    not recorded the time. The default name of a run directory contains the local time of the start.
    If the clock is set back when summer time ends, or if two runs started in different time zones,
    the order of the names can differ from the order of the starts."""
    try:
        date = read_jsonl(run / STARTS_FILE)[-1]["date"]
        return datetime.strptime(date, "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (OSError, ValueError, TypeError, LookupError, DataError):
        return 0.0


def resume_point(
    path: Path, config: Config, from_step: int | None = None
) -> tuple[Path | None, RunState | None]:
    """Returns the checkpoint to resume from, and the run state that this checkpoint contains.

    Args:
        from_step: step of the checkpoint; None: the newest complete checkpoint.

    Returns:
        The checkpoint and its state; (None, None) if the run ended before its first checkpoint was
        complete and must start over.

    Raises:
        UserError: a setting that must not change has changed, checkpoints are missing, the
            checkpoint is damaged, or the checkpoint's step is above run.steps.
    """
    old = load_recorded(path / CONFIG)
    refuse_changes(old, config)
    checkpoints = complete_checkpoints(path)
    if not checkpoints:
        made = max((row["step"] for row in read_metrics(path / METRICS_FILE)), default=0)
        # a background save is complete at the latest when the next save begins
        due = (old.run.checkpoint_every or old.run.steps) * (2 if old.checkpoint.background else 1)
        # starting over would delete its metrics, and hf/, which is written after a checkpoint
        if made > min(due, old.run.steps) or exported_step(path / "hf") is not None:
            raise DataError(
                f"the run has no complete checkpoint, though it made {made} steps",
                where=str(path),
                fix="put its checkpoints back, or start a new run in another run.dir",
            )
        if from_step is None:
            return None, None
    checkpoint = checkpoints[-1] if from_step is None else _of_step(from_step, checkpoints, path)
    with offering_older(checkpoint):
        check_whole(checkpoint)
        state = RunState.read(checkpoint)
    if state.step > config.run.steps:
        raise ConfigError(
            f"the run in {path} has {state.step} steps already, but run.steps is"
            f" {config.run.steps}",
            where="run.steps",
            fix=f"set run.steps to at least {state.step}, or start a new run",
        )
    return checkpoint, state


def _of_step(step: int, checkpoints: Sequence[Path], path: Path) -> Path:
    found = {step_of(checkpoint): checkpoint for checkpoint in checkpoints}
    if step not in found:
        there = ", ".join(map(str, found)) or "none"
        raise DataError(
            f"the run has no complete checkpoint of step {step}",
            where=str(path),
            fix=f"choose a step that has one: {there}",
        )
    return found[step]


@contextlib.contextmanager
def offering_older(checkpoint: Path) -> Iterator[None]:
    """Context manager for code that reads a checkpoint. If the code in the `with` block raises
    DataError, the checkpoint is unusable. The context manager then searches the earlier checkpoints
    of the run for an intact checkpoint, from the newest to the oldest. The search does not read the
    tensors of the checkpoints. If the search finds an intact checkpoint, the context manager raises
    UnusableCheckpointError. The message of this error describes the unusable checkpoint, and
    suggests to continue from the intact checkpoint. If the search finds no intact checkpoint, the
    DataError is raised unchanged."""
    try:
        yield
    except DataError as error:
        run_dir = checkpoint.parent.parent
        earlier = [
            each for each in complete_checkpoints(run_dir) if step_of(each) < step_of(checkpoint)
        ]
        older = next(filter(_is_whole, reversed(earlier)), None)
        if older is None:
            raise
        raise UnusableCheckpointError(error, run_dir, step_of(older)) from error


def _is_whole(checkpoint: Path) -> bool:
    try:
        check_whole(checkpoint)
        RunState.read(checkpoint)
    except DataError:
        return False
    return True


def check_resume(
    config: Config, from_step: int | None = None
) -> tuple[Path | None, RunState | None]:
    """Finds the configured run, and returns the checkpoint and the run state from which the run
    would resume (see `resume_point`). Does not change the run.

    Raises:
        UserError: the run cannot be resumed, or another process holds the run.
    """
    path = find_run(config)
    refuse_busy(path)
    return resume_point(path, config, from_step)


def refuse_changes(old: Config, new: Config) -> None:
    """Raises ConfigError if a setting that must stay the same differs between the old and the new
    configuration. If several settings have changed, the error names only the setting that comes
    first in alphabetical order."""
    # earlier releases recorded relative paths
    before, after = (
        by_dotted_key(with_absolute_paths(config).model_dump(mode="json")) for config in (old, new)
    )
    by_micro_batch = (
        new.statistics.scope == "micro_batch"
        or after.get("algorithm.aggregation") == "micro_batch_mean"
    )
    for key in sorted(before.keys() | after.keys()):
        free = key.startswith(FREE_TO_CHANGE) and key not in NOT_FREE
        free = free and not (by_micro_batch and key.startswith(_DIVISION))
        if not free and before.get(key) != after.get(key):
            raise ConfigError(
                f"the run was started with {before.get(key)!r}, not {after.get(key)!r}",
                where=key,
                fix=(
                    "resume with the same configuration, or start a new run from the exported"
                    " policy"
                ),
            )


def _has_begun(path: Path) -> bool:
    metrics = path / METRICS_FILE
    return bool(complete_checkpoints(path)) or (metrics.exists() and metrics.stat().st_size > 0)


def prompt_inputs(config: Config, tokenizer: Any, source: PromptSource) -> dict[str, str]:
    """Returns a dict of SHA-256 digests, one for each input that affects a run's prompts or decides
    where a response ends. The keys of the returned dict are the names of the inputs.

    The inputs are the tokenizer's files, the token ids of the first prompt, the chat template if
    prompts use a chat template, and the stop tokens if responses are sampled. The first prompt
    reveals changes that do not appear in the tokenizer's files, such as a new system prompt or a
    new order of the data.

    Args:
        source: prompt source at its beginning. The position of the source is restored.
    """
    folder = Path(config.model.path)
    names = {*_FILES, *getattr(tokenizer, "vocab_files_names", {}).values(), "tokenizer.json"}
    found = {
        name: _digest((folder / name).read_bytes())
        for name in sorted(names)
        if (folder / name).is_file()
    }
    if config.data.chat_template:
        found[CHAT_TEMPLATE] = _digest(json.dumps(tokenizer.chat_template).encode())
    if not config.supervised:
        stops = stop_token_ids(config.model.path, tokenizer)
        found[STOP_TOKENS] = _digest(json.dumps(stops).encode())
    found[FIRST_PROMPT] = _digest(json.dumps(list(first_prompt(source).token_ids)).encode())
    return found


def refuse_other_inputs(saved: Mapping[str, str], now: Mapping[str, str], config: Config) -> None:
    """Raises DataError if a tokenizer file, the chat template, the stop tokens or the first prompt
    has changed since the run was started. The comparison uses the saved digests of the inputs. Runs
    of old releases are accepted: some old releases saved no digests, and others saved no digest of
    the stop tokens."""
    for name in sorted(saved.keys() | now.keys() if saved else ()):
        if saved.get(name) == now.get(name) or (name == STOP_TOKENS and name not in saved):
            continue
        how = "is gone" if name not in now else "is new" if name not in saved else "has changed"
        raise DataError(
            f"{name} {how} since the run was started, so its prompts or responses would change",
            where=config.model.path,
            fix=(
                "restore it (and the data, if the first prompt has changed), or start a new run"
                " from the exported policy"
            ),
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
