"""Manages the folder in which `megatron-stare eval` stores an evaluation. The folder contains the
description of the evaluation, the responses and the results.

    evaluation.json   checkpoint, tasks, decoding and seeds
    config.yaml       the resolved configuration
    responses.jsonl   one line per verified response, written when the response arrives
    problems.jsonl    one line per problem
    results.json      the record of every finished task
    heartbeat.json    progress of the evaluation
    blackbox/         bundle written if the evaluation hangs (docs/black_box.md)

If the command is killed, the same command resumes the evaluation from the folder. The folder
contains only complete responses.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from megatron_stare.config.layers import by_dotted_key
from megatron_stare.errors import DataError, UserError
from megatron_stare.evaluation.evaluate import Evaluated
from megatron_stare.evaluation.response import Response
from megatron_stare.run_dir.json_lines import read_jsonl, to_line, write_atomically

EVALUATION, RESPONSES, PROBLEMS, RESULTS, CONFIG = (
    *("evaluation.json", "responses.jsonl", "problems.jsonl", "results.json", "config.yaml"),
)
FORMAT = 1
Key = tuple[int, int]  # cursor of the prompt, number of the sample


class EvaluationFolder:
    """The folder of an evaluation. Only one process at a time can lock the folder.

    Args:
        what: the values that responses depend on, by name. The entry `tasks` has one entry per
            task. A folder accepts only responses that were sampled with equal values. A later
            evaluation may add tasks.
        config: the resolved configuration as YAML.

    Raises:
        UserError: the folder cannot be written, is locked or damaged, or belongs to another
            evaluation.
    """

    def __init__(self, path: Path, what: Mapping[str, Any], config: str) -> None:
        self.path = path
        self._file: IO[str] | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("w")
        except OSError as error:
            raise UserError(
                f"cannot be written ({error.strerror})", where=str(path), fix="name another --out"
            ) from error
        try:
            self._hold()
            written = self._written(what)
            self._responses: dict[tuple[str, bool], dict[Key, Response]] = {}
            rows = {self._note(row): row for row in read_jsonl(path / RESPONSES)}
            if (path / RESPONSES).exists():
                # drops an incomplete last line, and responses that were sampled again
                write_atomically(path / RESPONSES, list(rows.values()))
            self._store(EVALUATION, written)
            (path / CONFIG).write_text(config)
            self._file = (path / RESPONSES).open("a", encoding="utf-8")
        except BaseException:
            self.close()
            raise

    def _hold(self) -> None:
        try:
            # the kernel frees the lock however the process ends
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                "another process is evaluating into this folder", where=str(self.path)
            ) from error

    def _written(self, what: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the dict that is to be stored in evaluation.json. If evaluation.json already
        exists, the dict contains the stored entries and an entry for each new task. If
        evaluation.json does not exist, the dict contains the format number and all entries of the
        argument `what`.

        Raises UserError if the folder contains files that do not belong to an evaluation, or
        responses that were sampled with other settings.
        """
        now = {"format": FORMAT, **json.loads(json.dumps(what))}
        if not (self.path / EVALUATION).exists():
            if any(entry.name != ".lock" for entry in self.path.iterdir()):
                raise UserError(
                    "this folder has files that do not belong to an evaluation",
                    where=str(self.path),
                    fix="name another --out",
                )
            return now
        before = self._read(EVALUATION)
        # files of earlier releases, whose servers had no other cache and weights
        engine = before.setdefault("engine", {})
        engine.setdefault("kv_cache_dtype", None)
        engine.setdefault("quantization", None)
        added = {
            name: task for name, task in now["tasks"].items() if name not in before.get("tasks", {})
        }
        for key, old in by_dotted_key(before).items():
            new = by_dotted_key(now).get(key)
            # a resumed evaluation may leave out tasks
            if new != old and not (new is None and key.startswith("tasks.")):
                raise UserError(
                    f"its responses were sampled with {key} {old}, not {new}",
                    where=str(self.path),
                    fix="name another --out, or remove this folder",
                )
        return {**before, "tasks": {**before["tasks"], **added}}

    def _read(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.path / name).read_text())
        except (OSError, ValueError) as error:
            raise DataError(
                f"cannot be read: {error}", where=str(self.path / name), fix="name another --out"
            ) from error
        return found

    def _note(self, row: Mapping[str, Any]) -> tuple[str, bool, Key]:
        """Stores the response of a row. If a response with the same key is already stored, the new
        response replaces the stored response. Returns three values: the name of the response's
        task, True if the response was decoded greedily, and the response's key.

        Some verifiers judge all responses to a prompt at once. If the folder lacks one of these
        responses, a resumed evaluation samples all responses to the prompt again, and two rows have
        the same key.
        """
        try:
            response, task = Response.read(row), (str(row["task"]), bool(row["greedy"]))
        except KeyError as error:
            raise DataError(
                f"a response lacks {error}", where=str(self.path / RESPONSES)
            ) from error
        key = response.prompt, response.sample
        self._responses.setdefault(task, {})[key] = response
        return *task, key

    def task(self, name: str) -> KeptResponses:
        """Returns the stored responses of a task; see evaluator.Kept."""
        return KeptResponses(self, name)

    def known(self, task: str, greedy: bool) -> dict[Key, Response]:
        """Returns the stored responses of a task, keyed by prompt and sample."""
        return self._responses.setdefault((task, greedy), {})

    def add(self, task: str, greedy: bool, response: Response) -> None:
        """Appends a response and flushes it to the kernel, so that the response is kept even if
        this process is killed."""
        row = {"task": task, "greedy": greedy, **response.record()}
        assert self._file is not None
        try:
            self._file.write(to_line(row))
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"a response could not be written ({error.strerror})",
                where=str(self.path),
                fix="make room, and give the same command again",
            ) from error
        self._note(row)

    def finish(self, name: str, found: Evaluated) -> None:
        """Writes the results of a task, and replaces any earlier results of this task."""
        rows = [{"task": name, **row} for row in found.problems]
        others = [row for row in read_jsonl(self.path / PROBLEMS) if row.get("task") != name]
        write_atomically(self.path / PROBLEMS, [*others, *rows])
        results = self._read(RESULTS) if (self.path / RESULTS).exists() else {}
        self._store(RESULTS, {**results, name: found.record})

    def _store(self, name: str, tree: Mapping[str, Any]) -> None:
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(
            json.dumps(json.loads(to_line(tree)), indent=2, ensure_ascii=False) + "\n"
        )
        os.replace(temporary, self.path / name)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._lock.close()


class KeptResponses:
    """The stored responses of one task in a folder."""

    def __init__(self, folder: EvaluationFolder, task: str) -> None:
        self._folder, self._task = folder, task

    def known(self, greedy: bool) -> Mapping[Key, Response]:
        return dict(self._folder.known(self._task, greedy))

    def add(self, response: Response, greedy: bool) -> None:
        self._folder.add(self._task, greedy, response)
