"""Manages the run directory, the state from which a run resumes, and the completion of checkpoints.

A checkpoint is a folder such as `checkpoints/step_000050`. The folder contains the ranks'
distributed checkpoint, run_state.json and the checksums of all files. A checkpoint is written under
a temporary name. The checkpoint gets its final name after all its files are on disk, so a folder
with a final name is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from megatron_stare.config.engines_alone import SYNC_FOLDER
from megatron_stare.config.formats import FIRST_WITH_CHECKSUMS, FORMAT, KEY, run_state_up_to_date
from megatron_stare.config.load import dump_yaml
from megatron_stare.config.schema import Config
from megatron_stare.errors import DataError, RollBack, UserError
from megatron_stare.run_dir.liveness import refuse_alive_elsewhere
from megatron_stare.run_dir.run_files import LOCK_FILE
from megatron_stare.weights.files import manifest
from megatron_stare.weights.files.manifest import Sum
from megatron_stare.weights.files.staging import sync_entry

CONFIG = "config.yaml"
PLACEMENT = "placement.txt"
LOGS = "logs"  # folder of what the processes print
ROLLBACKS = "rollbacks.json"
RUN_STATE = "run_state.json"  # in a checkpoint
KEPT = "kept_responses.safetensors"  # in a checkpoint, if responses were in flight

LOCK_TRIES, LOCK_WAIT_S = 5, 0.02
_NAME = re.compile(r"^step_(\d+)$")


@dataclass
class RunState:
    """State of a run after `step` steps. The version of the run's weights equals `step`."""

    step: int = 0
    data: dict[str, int] = field(default_factory=dict)  # of the prompt source
    method: dict[str, float] = field(default_factory=dict)  # of the algorithm: gate, controllers
    # consecutive updates that were skipped because loss or gradient was not finite
    skipped: int = 0
    # rollbacks of the run, oldest first; see RunDir.note_rollback
    rollbacks: list[dict[str, Any]] = field(default_factory=list)
    # digests of the prompt inputs (driver/resuming.py); {}: not known
    inputs: dict[str, str] = field(default_factory=dict)
    # special tokens that end turns of the demonstrations, in ascending order
    stops: list[int] = field(default_factory=list)
    # in-flight responses to prompts that `data` counts as taken; a separate file in a checkpoint
    kept: bytes = b""

    @property
    def left_out(self) -> frozenset[int]:
        """Cursors of the prompts that the run skips, because a rollback removed these prompts."""
        return frozenset(cursor for each in self.rollbacks for cursor in each["prompts"])

    def to_json(self) -> str:
        """Returns all fields except `kept` as JSON."""
        return json.dumps(
            {KEY: FORMAT, **{name: value for name, value in vars(self).items() if name != "kept"}},
            indent=2,
        )

    @classmethod
    def read(cls, checkpoint: Path) -> RunState:
        """Reads the state from a complete checkpoint. The state's format can be the current format
        or an earlier format.

        Raises:
            DataError: the state is damaged, or a newer release wrote the state.
        """
        file = checkpoint / RUN_STATE
        try:
            tree = run_state_up_to_date(json.loads(file.read_text()), file)
            kept = checkpoint / KEPT
            tree["kept"] = kept.read_bytes() if kept.exists() else b""
            return cls(
                **{each.name: tree.pop(each.name) for each in dataclasses.fields(cls)}, **tree
            )
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise DataError(
                f"not the state of a run: {error}",
                where=str(file),
                fix="remove this checkpoint to use the one before",
            ) from error


@dataclass(frozen=True)
class Staged:
    """A checkpoint that is being written.

    `final`: path of the completed checkpoint.
    `folder`: temporary folder that contains the unfinished checkpoint.
    `state`: run state as JSON.
    `beside`: the content of each additional file of the driver, by file name.
    """

    final: Path
    folder: Path
    state: str
    beside: Mapping[str, bytes]


class RunDir:
    """The directory of a run, locked by one process at a time."""

    def __init__(
        self, path: Path, lock: IO[str], made: Sequence[Path], found: Sequence[str]
    ) -> None:
        """Stores the path and the lock of the run directory, and the state of the directory before
        this start.

        Args:
            made: folders that did not exist before this start, innermost first.
            found: names of the entries that `path` contained before this start.
        """
        self.path = path
        self._lock = lock
        self._made, self._found = made, frozenset(found)

    @classmethod
    def create(cls, config: Config) -> RunDir:
        """Creates and locks the directory of a new run. Writes the resolved configuration into the
        directory.

        Raises:
            UserError: the directory cannot be written, or contains a run.
        """
        run = cls._hold(_place(config))
        try:
            refuse_taken(run.path)
            run.record(config)
        except BaseException:
            run.discard()
            run.close()
            raise
        return run

    @classmethod
    def reopen(cls, path: Path) -> RunDir:
        """Locks the directory of a run that is to resume, and removes what a killed run left
        incomplete. Raises UserError if another process holds the directory's lock, or if the run is
        alive on another machine."""
        run = cls._hold(path)
        try:
            refuse_alive_elsewhere(path)
        except BaseException:
            run.close()
            raise
        run.forget_unfinished()  # left behind if the run was killed
        return run

    @classmethod
    def _hold(cls, path: Path) -> RunDir:
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            found = [entry.name for entry in path.iterdir()] if path.exists() else []
            path.mkdir(parents=True, exist_ok=True)
            lock = (path / LOCK_FILE).open("w")
        except OSError as error:
            _remove_empty(made)
            raise _unwritable(path, error) from error
        _lock(lock, path)
        return cls(path, lock, made, found)

    def close(self) -> None:
        self._lock.close()

    def forget_unfinished(self) -> None:
        """Removes incomplete checkpoints, and weight files that a killed run wrote for its
        servers."""
        for leftover in (*(self.path / "checkpoints").glob("*.tmp"), self.path / SYNC_FOLDER):
            shutil.rmtree(leftover, ignore_errors=True)

    def discard(self, but: Collection[str] = ()) -> None:
        """Removes what a failed start added to the directory. Ignores failed removals. For example,
        NFS does not allow the removal of a folder with a file that some process still has open.

        Removes config.yaml first, because a directory without config.yaml does not count as a run.
        If this process is killed after it has removed config.yaml, the directory does not count as
        a run, even if other files remain.

        Args:
            but: names of folders that stay if they contain a file that is not empty.
        """
        if CONFIG not in self._found:
            (self.path / CONFIG).unlink(missing_ok=True)
        for entry in self.path.iterdir():
            if entry.name in self._found or (entry.name in but and _says_something(entry)):
                continue
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    entry.unlink()
        _remove_empty(self._made)

    def record(self, config: Config) -> None:
        """Writes the resolved configuration atomically. Even after a crash, readers see either the
        old file or the new file."""
        temporary = self.path / f".{CONFIG}.tmp"
        temporary.write_text(dump_yaml(config))
        sync_entry(temporary)
        os.replace(temporary, self.path / CONFIG)

    def note_rollback(self, before: Sequence[dict[str, Any]], back: RollBack) -> None:
        """Records a rollback with its step, its reason, and the cursors of the prompts to leave out
        from now on.

        A checkpoint records only the rollbacks that happened before the checkpoint was saved.
        Therefore rollbacks.json stores the new rollback until the next checkpoint.

        Args:
            before: the run's earlier rollbacks.
            back: the new rollback.

        Raises:
            UserError: the file cannot be written.
        """
        rows = [*before, {"step": back.step, "why": back.why, "prompts": list(back.prompts)}]
        temporary = self.path / f".{ROLLBACKS}.tmp"
        try:
            temporary.write_text(json.dumps(rows, indent=2))
            sync_entry(temporary)
            os.replace(temporary, self.path / ROLLBACKS)
        except OSError as error:
            raise UserError(
                f"a rollback could not be noted ({error.strerror})",
                where=str(self.path / ROLLBACKS),
            ) from error

    def rollbacks(self) -> list[dict[str, Any]]:
        """Reads the recorded rollbacks, oldest first. Raises DataError if the file is damaged."""
        file = self.path / ROLLBACKS
        try:
            return json.loads(file.read_text()) if file.exists() else []
        except ValueError as error:
            raise DataError(
                "not a record of a run's rollbacks",
                where=str(file),
                fix="remove it; the newest checkpoint may hold them",
            ) from error

    def record_placement(self, lines: Sequence[str]) -> None:
        """Writes the placement of ranks and engines. Writes no file if `lines` is empty."""
        if lines:
            (self.path / PLACEMENT).write_text("".join(f"{line}\n" for line in lines))

    def checkpoints(self) -> list[Path]:
        """Returns the complete checkpoints, oldest first."""
        return complete_checkpoints(self.path)

    def newest_step(self) -> int | None:
        """Returns the step of the newest complete checkpoint, or None if there is no complete
        checkpoint."""
        found = self.checkpoints()
        return step_of(found[-1]) if found else None

    def stage(self, state: RunState, beside: Mapping[str, bytes] = MappingProxyType({})) -> Staged:
        """Makes the temporary folder for a checkpoint of `state`. The caller may change `state`
        afterwards, because the checkpoint is written from a copy.

        Args:
            beside: further small files of the driver, by name.

        Raises:
            UserError: the disk is full or not writable.
        """
        final = self.path / "checkpoints" / f"step_{state.step:06d}"
        try:
            folder = _unfinished(final)
            folder.mkdir(parents=True)
        except OSError as error:
            raise _not_written(final, error) from error
        kept = {KEPT: state.kept} if state.kept else {}
        return Staged(final, folder.resolve(), state.to_json(), {**beside, **kept})

    def complete(self, staged: Staged, written: Mapping[str, Sum]) -> Path:
        """Completes a checkpoint after all ranks have written their parts.

        Args:
            written: length and checksum of every file that the ranks wrote.

        Raises:
            UserError: the disk is full or not writable, or a file has a wrong length. Earlier
                checkpoints are untouched.
        """
        try:
            sums = {
                **written,
                RUN_STATE: manifest.put(staged.folder / RUN_STATE, staged.state.encode()),
            }
            for name, content in staged.beside.items():
                sums[name] = manifest.put(staged.folder / name, content)
            manifest.check_lengths(staged.folder, sums)
            manifest.write_manifest(staged.folder, sums)
            _sync(staged.folder)
            if staged.final.exists():
                _forget(staged.final)
            os.replace(staged.folder, staged.final)
            sync_entry(staged.final.parent)
        except OSError as error:
            raise _not_written(staged.final, error) from error
        return staged.final

    def forget(self, steps: Collection[int]) -> None:
        """Removes the checkpoints of the given `steps`, oldest first. Even if this process is
        killed during a removal, a partly removed checkpoint does not have the name of a complete
        checkpoint."""
        for checkpoint in self.checkpoints():
            if step_of(checkpoint) in steps:
                _forget(checkpoint)

    def set_aside(self, after: int) -> list[Path]:
        """Renames the checkpoints of all steps later than `after`, so that a resumed run ignores
        these checkpoints. Returns the new paths."""
        moved = []
        for checkpoint in self.checkpoints():
            if step_of(checkpoint) > after:
                places = (
                    checkpoint.with_name(f"{checkpoint.name}.aside-{n}") for n in itertools.count(1)
                )
                moved.append(
                    checkpoint.rename(next(place for place in places if not place.exists()))
                )
        return moved


def _forget(checkpoint: Path) -> None:
    """Removes a checkpoint. Renames the checkpoint before removing its files. A checkpoint whose
    files are partly removed therefore never has the name of a complete checkpoint."""
    unnamed = _unfinished(checkpoint)
    checkpoint.rename(unnamed)
    # what another process still reads, and NFS therefore keeps, goes at the next start
    shutil.rmtree(unnamed, ignore_errors=True)


def _unfinished(final: Path) -> Path:
    """Returns a unique temporary name for an incomplete checkpoint. The name is unique, so that a
    writer process that is left over from an earlier run cannot write into the incomplete
    checkpoint."""
    return final.with_name(f"{final.name}.{secrets.token_hex(4)}.tmp")


def _not_written(final: Path, error: OSError) -> UserError:
    return UserError(f"the checkpoint could not be written ({error.strerror})", where=str(final))


def check_place(config: Config) -> None:
    """Raises UserError if the directory of a new run cannot be created, contains a run, or is in
    use. The check leaves no files."""
    path = _place(config)
    refuse_taken(path)
    refuse_busy(path)
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        Path(tempfile.mkdtemp(prefix=".probe-", dir=existing)).rmdir()
    except OSError as error:
        raise _unwritable(path, error) from error


def refuse_taken(path: Path) -> None:
    """Raises UserError if the directory contains a run."""
    if (path / CONFIG).exists():
        raise UserError(
            "there is a run in this directory already",
            where=str(path),
            fix="continue it with --resume, or give another run.dir",
        )


def step_of(checkpoint: Path) -> int:
    """Returns the step in the name of a complete checkpoint."""
    return int(checkpoint.name.removeprefix("step_"))


def check_whole(checkpoint: Path) -> None:
    """Checks names and lengths of a checkpoint's files. Checks the checksums of all files except
    the tensor files. The ranks check the checksums of the tensor files.

    Raises:
        DataError: a file differs from the file that was written. The error names the first such
            file.
    """
    sums = manifest.read_manifest(checkpoint)
    if sums is None:
        _refuse_without_sums(checkpoint)
    else:
        manifest.check_lengths(checkpoint, sums)
        tensors = manifest.tensors_of(sums)
        manifest.check_bytes(
            checkpoint, {name: each for name, each in sums.items() if name not in tensors}
        )
    # imported here, since it imports torch, which inspecting a run does not need
    from megatron_stare.weights.files.torch_dist import check_files

    check_files(checkpoint)


def _refuse_without_sums(checkpoint: Path) -> None:
    """Raises DataError for a checkpoint without checksums, unless an earlier release wrote the
    checkpoint.

    Ignores a checkpoint whose run state is damaged or was written by a newer release. RunState.read
    raises DataError if a run state is damaged or was written by a newer release.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        if (
            FIRST_WITH_CHECKSUMS
            <= int(json.loads((checkpoint / RUN_STATE).read_text()).get(KEY, 1))
            <= FORMAT
        ):
            raise DataError(
                "the list of checksums is missing",
                where=str(checkpoint / manifest.MANIFEST),
                fix=manifest.FIX,
            )


def complete_checkpoints(path: Path) -> list[Path]:
    """Returns the complete checkpoints of a run directory, oldest first."""
    found = [p for p in (path / "checkpoints").glob("step_*") if _NAME.search(p.name)]
    return sorted(found, key=step_of)


def _place(config: Config) -> Path:
    return Path(config.run.dir or f"runs/{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}")


def _lock(lock: IO[str], path: Path, kind: int = fcntl.LOCK_EX) -> None:
    for left in reversed(range(LOCK_TRIES)):
        try:
            # the kernel frees the lock however the process ends
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if not left:
                lock.close()
                raise UserError(
                    f"another process is running in this directory{_holder(path)}",
                    where=str(path),
                    fix=(
                        f"megatron-stare status {path} shows its status; end it, or give another"
                        " run.dir"
                    ),
                ) from error
            time.sleep(LOCK_WAIT_S)  # `megatron-stare status` may hold the lock for microseconds
        except OSError as error:
            lock.close()
            raise UserError(
                f"the run directory's file system cannot lock files ({error.strerror})",
                where=str(path),
                fix="mount it with locks (Lustre: -o flock), or set run.dir to another file system",
            ) from error


def _holder(path: Path) -> str:
    """Returns " (pid N)" with the pid of the process that holds the lock. Returns "" if no process
    on this machine holds the lock."""
    try:
        inode = (path / LOCK_FILE).stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return ""
    fields = (line.replace("-> ", "").split() for line in lines)
    pids = [
        each[4] for each in fields if len(each) > 5 and each[5].rpartition(":")[2] == str(inode)
    ]
    return f" (pid {pids[0]})" if pids and pids[0] != "-1" else ""


def refuse_busy(path: Path) -> None:
    """Raises UserError if another process holds the lock of the run directory `path`. Also raises
    UserError if the driver of the run in this directory is alive on another machine. The function
    changes nothing in the directory."""
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        (path / LOCK_FILE).open() as lock,
    ):
        # NFS refuses an exclusive lock of a file that is open for reading only
        _lock(lock, path, fcntl.LOCK_SH)
    refuse_alive_elsewhere(path)  # after the lock is free again: this may take seconds


def _says_something(folder: Path) -> bool:
    return any(file.is_file() and file.stat().st_size for file in folder.rglob("*"))


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # contains others' files by now
            folder.rmdir()


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"the run directory cannot be written ({error.strerror})",
        where=str(path),
        fix="set run.dir to a folder that can be written",
    )


def _sync(folder: Path) -> None:
    """Flushes to disk `folder` with all its files and subfolders."""
    for path in (*folder.rglob("*"), folder):
        sync_entry(path)
