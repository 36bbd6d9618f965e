"""Decides before anything is started which run is continued, from where, and whether it may be.

What must not have changed since: most settings, and what the run's prompts are made with beside its
configuration - tokenizer, chat template, system prompt. Of these digests are saved with the run's
state: a file that was replaced would change what every prompt says, and no error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_stare.config.load import load_recorded, with_absolute_paths
from megatron_stare.config.schema import Config
from megatron_stare.data.prompt_source import PromptSource
from megatron_stare.errors import ConfigError, DataError, UnusableCheckpointError, UserError
from megatron_stare.run_dir.run_files import METRICS_FILE, read_metrics
from megatron_stare.run_dir.run_state import (
    CONFIG,
    RunState,
    check_whole,
    complete_checkpoints,
    refuse_busy,
    step_of,
)

# what may differ between a run and its continuation; everything else changes what is trained
FREE_TO_CHANGE = (
    "run.",
    "parallel.",
    "checkpoint.",
    "eval.",
    "observability.",
    "runtime.",
    "faults.",
    "reward.workers",
    "reward.timeout_s",
    "rollout.threads",
    "performance.share_prompts",
)
NOT_FREE = ("run.seed",)
# names of what prompts are made with
FIRST_PROMPT = "first prompt"
CHAT_TEMPLATE = "chat template"
_FILES = (  # of tokenizers
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def find_run(config: Config) -> Path:
    """The directory of a run to be continued: run.dir, or the newest of this name under runs/ that
    has made a step.

    Raises:
        UserError: there is none.
    """
    if config.run.dir:
        path = Path(config.run.dir)
    else:
        runs = sorted(file.parent for file in Path("runs").glob(f"{config.run.name}-*/{CONFIG}"))
        begun = [run for run in runs if _has_begun(run)]  # a start that was killed is no run
        path = (begun or runs or [Path("runs") / config.run.name])[-1]
    if not (path / CONFIG).exists():
        raise UserError(
            "there is no run to resume", where=str(path), fix="give its directory as run.dir=..."
        )
    return path


def resume_point(
    path: Path, config: Config, from_step: int | None = None
) -> tuple[Path | None, RunState | None]:
    """The newest complete checkpoint of a run, which this configuration may continue, and the state
    in it.

    Args:
        from_step: that of an earlier checkpoint to take instead.

    Returns:
        (None, None) for a run that ended before its first checkpoint was complete: it begins anew.

    Raises:
        UserError: a setting that must not differ does, checkpoints are gone, the one that is taken
            is damaged, or it is past run.steps.
    """
    old = load_recorded(path / CONFIG)
    refuse_changes(old, config)
    checkpoints = complete_checkpoints(path)
    if not checkpoints:
        made = max((row["step"] for row in read_metrics(path / METRICS_FILE)), default=0)
        # written in the background, the first checkpoint is whole before the second is begun
        due = (old.run.checkpoint_every or old.run.steps) * (2 if old.checkpoint.background else 1)
        if made > min(due, old.run.steps):  # its metrics would be cut back to nothing
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
    """Around whatever a checkpoint is opened with: where it cannot be used, the error names the
    newest before it that is whole as far as can be seen without reading its tensors."""
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
    """Finds where a run would be continued; see resume_point. Changes nothing.

    Raises:
        UserError: it could not be.
    """
    path = find_run(config)
    refuse_busy(path)
    return resume_point(path, config, from_step)


def refuse_changes(old: Config, new: Config) -> None:
    """Raises ConfigError naming the first setting that differs and must not."""
    # runs of earlier releases hold paths as they were given
    before, after = (
        _flat(with_absolute_paths(config).model_dump(mode="json")) for config in (old, new)
    )
    for key in sorted(before.keys() | after.keys()):
        free = key.startswith(FREE_TO_CHANGE) and key not in NOT_FREE
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


def _flat(tree: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


def prompt_inputs(config: Config, tokenizer: Any, source: PromptSource) -> dict[str, str]:
    """SHA-256 by name: of the tokenizer's files, of its chat template where prompts go through one,
    and of the token ids of the stream's first prompt, in which whatever else makes prompts shows: a
    system prompt of the data, say, or another order of it.

    Args:
        source: at its beginning; it is left there.
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
    before = dict(source.state())
    (prompt,) = source.take(1)
    source.restore(before)
    found[FIRST_PROMPT] = _digest(json.dumps(list(prompt.token_ids)).encode())
    return found


def refuse_other_inputs(saved: Mapping[str, str], now: Mapping[str, str], config: Config) -> None:
    """Raises DataError naming the first that is not what the run was begun with. Releases that
    saved none say nothing of them."""
    for name in sorted(saved.keys() | now.keys() if saved else ()):
        if saved.get(name) == now.get(name):
            continue
        how = "is gone" if name not in now else "is new" if name not in saved else "has changed"
        raise DataError(
            f"{name} {how} since the run was started, so its prompts would change",
            where=config.model.path,
            fix=(
                "restore it (and the data, if the first prompt has changed), or start a new run"
                " from the exported policy"
            ),
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
