"""The run directory, and all a run needs to continue: one object, written as one.

A checkpoint is a folder `checkpoints/step_000050` that holds the ranks' distributed checkpoint and run_state.json. It
is written under another name and renamed when everything in it is on disk, so one that has this name is complete.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from megatron_stare.config.load import dump_yaml, load_config
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError, DataError, UserError
from megatron_stare.weights.staging import sync_entry
from megatron_stare.weights.torch_dist import check_files

_NAME = re.compile(r"step_(\d+)$")

# what may differ between a run and its continuation; everything else changes what is trained
FREE_TO_CHANGE = (
    "run.",
    "parallel.",
    "eval.",
    "observability.",
    "runtime.",
    "reward.workers",
    "reward.timeout_s",
    "rollout.threads",
)
NOT_FREE = ("run.seed",)


@dataclass
class RunState:
    """Where a run stands after `step` steps. The weight version is the step: each step makes one."""

    step: int = 0
    data: dict[str, int] = field(default_factory=dict)  # of the prompt source
    method: dict[str, float] = field(default_factory=dict)  # of the algorithm: gate, controllers
    skipped: int = 0  # consecutive updates that were not taken, because the gradient was not finite

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> RunState:
        return cls(**json.loads(text))


class RunDir:
    """One run's directory, held by one process at a time."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, config: Config) -> RunDir:
        """A new run's directory, with the resolved configuration in it.

        Raises:
            UserError: it cannot be written, or a run is in it.
        """
        path = Path(config.run.dir or f"runs/{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        run = cls._hold(path)
        if (path / "config.yaml").exists():
            raise UserError(
                "there is a run in this directory already",
                where=str(path),
                fix="continue it with --resume, or give another run.dir",
            )
        (path / "config.yaml").write_text(dump_yaml(config))
        return run

    @classmethod
    def reopen(cls, config: Config) -> RunDir:
        """The directory of a run to be continued: run.dir, or the newest of this name under runs/.

        Raises:
            UserError: there is none, another process holds it, or its configuration does not fit.
        """
        if config.run.dir:
            path = Path(config.run.dir)
        else:
            candidates = sorted(Path("runs").glob(f"{config.run.name}-*/config.yaml"))
            path = candidates[-1].parent if candidates else Path("runs") / config.run.name
        if not (path / "config.yaml").exists():
            raise UserError("there is no run to resume", where=str(path), fix="give its directory as run.dir=...")
        run = cls._hold(path)
        refuse_changes(load_config(path / "config.yaml"), config)
        return run

    @classmethod
    def _hold(cls, path: Path) -> RunDir:
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = (path / ".lock").open("w")
        except OSError as error:
            raise UserError(
                f"the run directory cannot be written ({error.strerror})", where=str(path), fix="set run.dir"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed by the kernel when the process ends, however
        except OSError as error:
            raise UserError("another process is running in this directory", where=str(path)) from error
        return cls(path, lock)

    def close(self) -> None:
        self._lock.close()

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = [p for p in (self.path / "checkpoints").glob("step_*") if _NAME.search(p.name)]
        return sorted(found, key=lambda p: p.name)

    def newest_step(self) -> int | None:
        """The step of the newest complete checkpoint; None where there is none."""
        found = self.checkpoints()
        return int(found[-1].name.removeprefix("step_")) if found else None

    def save(self, state: RunState, write_shards: Callable[[str], None], keep: int) -> Path:
        """Writes a checkpoint of everything and forgets all but the newest `keep`.

        Args:
            write_shards: fills an empty folder with the ranks' part.

        Raises:
            UserError: the disk is full or not writable; earlier checkpoints are untouched.
        """
        final = self.path / "checkpoints" / f"step_{state.step:06d}"
        staging = final.with_suffix(".tmp")
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            write_shards(str(staging.resolve()))
            (staging / "run_state.json").write_text(state.to_json())
            _sync(staging)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(staging, final)
            sync_entry(final.parent)
        except OSError as error:
            raise UserError(f"the checkpoint could not be written ({error.strerror})", where=str(final)) from error
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(old)
        return final

    def newest(self) -> tuple[Path, RunState]:
        """The newest complete checkpoint. Raises DataError where there is none, or where a file of it was cut since."""
        for leftover in (self.path / "checkpoints").glob("*.tmp"):
            shutil.rmtree(leftover)  # of a save that was killed
        checkpoints = self.checkpoints()
        if not checkpoints:
            raise DataError(
                "the run has no complete checkpoint", where=str(self.path), fix="start it anew in another run.dir"
            )
        check_files(checkpoints[-1])
        return checkpoints[-1], RunState.from_json((checkpoints[-1] / "run_state.json").read_text())


def refuse_changes(old: Config, new: Config) -> None:
    """Raises ConfigError naming the first setting that differs and must not."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    for key in sorted(before.keys() | after.keys()):
        free = key.startswith(FREE_TO_CHANGE) and key not in NOT_FREE
        if not free and before.get(key) != after.get(key):
            raise ConfigError(
                f"the run was started with {before.get(key)!r}, now it is {after.get(key)!r}",
                where=key,
                fix="resume with the same configuration, or start a new run from the exported policy",
            )


def _flat(tree: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _sync(folder: Path) -> None:
    """Everything below `folder` is on disk when this returns."""
    for file in folder.rglob("*"):
        if file.is_file():
            sync_entry(file)
    sync_entry(folder)
