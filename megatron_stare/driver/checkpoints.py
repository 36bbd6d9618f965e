"""Saves and removes a run's checkpoints, and exports the policy as a Hugging Face folder.

All ranks write their parts of a checkpoint while training continues. The driver completes the
checkpoint after all ranks have finished. A run keeps the newest checkpoints, the checkpoints of
every n-th step, and the checkpoints with the best values of a metric. When the policy is exported,
this module creates the files, and then the ranks write the policy's tensors into these files.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megatron_stare.cluster.trainer_group import TrainerGroup
from megatron_stare.config.schema import Config
from megatron_stare.driver.checkpoint_proof import FILE as SELF_TEST
from megatron_stare.driver.checkpoint_proof import SelfTest
from megatron_stare.errors import DataError
from megatron_stare.observability.metrics.paired import difference
from megatron_stare.process.interruption import uninterrupted
from megatron_stare.records.metric import Metric
from megatron_stare.rollout.sources.calls import CALLS, forget_calls
from megatron_stare.rollout.sources.kept import from_bytes
from megatron_stare.run_dir.json_lines import Record, read_jsonl
from megatron_stare.run_dir.run_files import (
    EVAL_FILE,
    METRICS_FILE,
    evaluation_figures,
    read_metrics,
)
from megatron_stare.run_dir.run_state import RunDir, RunState, Staged, step_of
from megatron_stare.weights.files.hf_folder import (
    SHARD_BYTES,
    add_stops,
    copy_companions,
    create_shards,
    dtype_name,
    main_dtype,
)
from megatron_stare.weights.files.staging import staging

METRICS = (
    Metric(
        "perf/save_s",
        "s",
        "time that training waited for a save since the previous step: to begin the save, and to"
        " complete it once it was written",
        "0 except after a step that is saved; with a save every 20 steps below 0.6 of time/step_s,"
        " which is 3 %",
    ),
)

LOOK_S = 10.0  # between two looks at a save during a rollout or an evaluation


class Checkpoints:
    """Checkpoints of a run. At most one checkpoint is being written at a time. The previous
    checkpoint remains the newest checkpoint on disk until the new checkpoint is complete.

    Args:
        note: receives one message if no step logs the metric `checkpoint.best_by`.
    """

    def __init__(
        self,
        config: Config,
        ranks: TrainerGroup,
        run_dir: RunDir,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._config, self._ranks, self._dir, self._note = config, ranks, run_dir, note
        self._under_way: Staged | None = None
        self._completed = False  # a checkpoint was completed, and no older one removed since
        self._begun = 0.0
        self._told = False
        self.longest_s = 0.0  # longest time from begin to completion of a save
        self._waited_s = 0.0  # time that training waited since `metrics` was last called

    @property
    def newest(self) -> int | None:
        """Step of the newest checkpoint, or None if the run has no checkpoint. A checkpoint that is
        still being written counts as the newest checkpoint."""
        return (
            step_of(self._under_way.final)
            if self._under_way is not None
            else self._dir.newest_step()
        )

    def load(self, checkpoint: Path) -> None:
        """Loads a checkpoint into the ranks. Raises DataError if a file is damaged, or if the
        loaded state differs from the saved state."""
        folder = str(checkpoint.resolve())
        if self._config.checkpoint.verify:
            self._ranks.verify(folder)
        self._ranks.load(folder)
        if self._config.checkpoint.self_test and (test := SelfTest.read(checkpoint)) is not None:
            test.check(self._ranks, self._config, folder)

    def save(self, state: RunState, timeout_s: float | None = None) -> None:
        """Completes the checkpoint that is being written, if any, and begins a checkpoint of
        `state`. Returns when training may continue.

        Args:
            timeout_s: timeout of each wait, seconds; None: the timeout of any call to the ranks.

        Raises:
            UserError: one of the two checkpoints cannot be written, or is not written within the
                timeout.
        """
        with self._waited_for():
            self.finish(timeout_s)
            self._begun = time.monotonic()
            beside = {}
            if self._config.checkpoint.self_test and (last := self._ranks.last_batch) is not None:
                beside[SELF_TEST] = SelfTest.make(self._ranks, self._config, last).to_bytes()
            staged = self._dir.stage(state, beside)
            self._ranks.save(str(staged.folder), timeout_s)
            self._under_way = staged
            if not self._config.checkpoint.background:
                self.finish(timeout_s)

    def look(self) -> None:
        """Completes the checkpoint that is being written, if all ranks have finished writing their
        parts. Raises UserError if a rank could not write its part."""
        if self._under_way is not None or self._completed:
            with self._waited_for():
                if self._under_way is None or self._ranks.saved():
                    self.finish()

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Context manager that completes a checkpoint in a time in which the caller makes no calls
        to the ranks, for example during a rollout or an evaluation. Inside the `with` block, a
        thread asks the ranks every LOOK_S seconds whether the ranks have finished writing their
        parts of a checkpoint. When all ranks have finished, the thread completes the checkpoint. If
        the run loses a process later in the block, the run can resume from the completed
        checkpoint.

        Completing the checkpoint in the caller's own thread would block the event loop of this
        thread, and calls to servers and tools would exceed their time limits. With the inline
        runner, no thread is started, because the ranks and engines of this process are not
        thread-safe.

        Raises:
            UserError: the checkpoint cannot be written. The error is raised at the end of the
                block, and only if the block itself raised no error.
        """
        if self._under_way is None or self._config.runtime.runner == "inline":
            yield
            return
        left, failed = threading.Event(), list[Exception]()

        def run() -> None:
            try:
                while not (written := self._ranks.saved()) and not left.wait(LOOK_S):
                    pass
                if written:
                    self._complete()
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            with uninterrupted():
                thread.join()  # the ranks must be free for the caller
        if failed:
            raise failed[0]

    def metrics(self) -> dict[str, float]:
        """Returns `perf/save_s` (see METRICS): the seconds that training has waited for saves since
        the previous call of `metrics`."""
        waited, self._waited_s = self._waited_s, 0.0
        return {"perf/save_s": waited}

    def finish(self, timeout_s: float | None = None) -> None:
        """Waits until the checkpoint in progress is written, and completes this checkpoint. Then
        removes the checkpoints that the retention rule (`Retention`) does not keep. Does nothing if
        no checkpoint is in progress and no checkpoint was completed since the last removal.

        Args:
            timeout_s: timeout of the wait, seconds; None: the timeout of any call to the ranks.

        Raises:
            UserError: the checkpoint cannot be written, or is not written within the timeout.
        """
        if self._under_way is not None:
            self._ranks.wait_saved(timeout_s)
        with uninterrupted():  # completion cannot be repeated halfway
            if self._under_way is not None:
                self._complete()
            if self._completed:
                self._retire()
                self._completed = False

    def _complete(self) -> None:
        assert self._under_way is not None
        staged, self._under_way = self._under_way, None
        self._dir.complete(staged, self._ranks.finish_save())
        self._completed = True
        self.longest_s = max(self.longest_s, time.monotonic() - self._begun)

    @contextlib.contextmanager
    def _waited_for(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self._waited_s += time.monotonic() - begun

    def _retire(self) -> None:
        """Removes the checkpoints that the retention rule does not keep."""
        metric = self._config.checkpoint.best_by
        found = scores(self._dir.path, metric)
        if metric is not None and not found and not self._told:
            self._told = True
            self._note(
                f"checkpoint.best_by: nothing was logged as {metric} so far, so no checkpoint is"
                " kept for it"
            )
        steps = [step_of(checkpoint) for checkpoint in self._dir.checkpoints()]
        rule = Retention.of(self._config)
        # the best of each kind of evaluation stay: a kind says nothing about another's checkpoints
        self._dir.forget(set.intersection(*(rule.leaves(steps, each) for each in found or [{}])))
        journal, left = self._dir.path / CALLS, self._dir.checkpoints()
        if journal.is_dir() and left:
            with contextlib.suppress(DataError):  # a damaged checkpoint: keep the journal
                forget_calls(journal, first_step_asked(left[0]))


def first_step_asked(checkpoint: Path) -> int:
    """Returns the first step whose recorded tool calls must be kept. A run that resumes from the
    checkpoint does not need the tool calls of steps before the returned step. If the checkpoint
    contains unfinished responses that began before the checkpoint's own step, the function returns
    the step in which the oldest of these responses began. Otherwise, the function returns the
    checkpoint's own step. Raises DataError if the checkpoint's state cannot be read."""
    kept = from_bytes(RunState.read(checkpoint).kept)
    begun = [response.step for group in kept for response in group]
    return min([step_of(checkpoint), *begun])


@dataclass(frozen=True)
class Retention:
    """Rule that decides which checkpoints are kept.

    `newest`: number of newest checkpoints to keep. At least one checkpoint is always kept.
    `every`: checkpoints of steps divisible by `every` are kept. If `every` is None, this rule is
        off.
    `best`: number of checkpoints to keep because they have the best scores.
    `higher`: True if higher scores are better.
    """

    newest: int
    every: int | None = None
    best: int = 0
    higher: bool = True

    @classmethod
    def of(cls, config: Config) -> Retention:
        kept = config.checkpoint
        return cls(
            config.run.keep_checkpoints, kept.keep_every, kept.keep_best, kept.best_is == "highest"
        )

    def leaves(self, steps: Collection[int], scores: Mapping[int, float]) -> set[int]:
        """Returns the steps whose checkpoints are to be removed.

        Args:
            steps: steps of all checkpoints.
            scores: scores by step. A checkpoint whose score is missing or NaN is not among the
                best. If two scores are equal, the newer checkpoint is better.
        """
        kept = set(sorted(steps)[-max(self.newest, 1) :])
        if self.every is not None:
            kept |= {step for step in steps if step % self.every == 0}
        known = [step for step in steps if not math.isnan(scores.get(step, math.nan))]
        sign = 1 if self.higher else -1
        kept |= set(
            sorted(known, key=lambda step: (sign * scores[step], step))[
                len(known) - min(self.best, len(known)) :
            ]
        )
        return set(steps) - kept


def scores(run_dir: Path, metric: str | None) -> list[dict[int, float]]:
    """Reads a metric from the files of a run. Metrics named `eval/...` come from the run's
    evaluation results. Metrics with other names come from the metrics that the run logged for each
    step.

    Returns:
        Values by step that can be compared with each other, in one dict. If a resume changed an
            evaluation, later values are in a dict of their own. The list is empty if the metric has
            no values.
    """
    if metric is None:
        return []
    if not metric.startswith("eval/"):
        logged = {
            row["step"]: row[metric]
            for row in read_metrics(run_dir / METRICS_FILE)
            if metric in row
        }
        return [logged] if logged else []
    results = "greedy_correct" if metric.endswith("/greedy") else "correct"
    kinds: list[list[tuple[Record, float]]] = []
    for record in read_jsonl(run_dir / EVAL_FILE):
        task = f"{record['task']}/" if "task" in record else ""
        figures = {
            f"eval/{task}{name}": value for name, value in evaluation_figures(record).items()
        }
        if metric not in figures:
            continue
        kind = next((each for each in kinds if not difference(each[-1][0], record, results)), None)
        if kind is None:
            kinds.append(kind := [])
        kind.append((record, figures[metric]))
    return [{int(record["step"]): value for record, value in kind} for kind in kinds]


def export_policy(
    ranks: TrainerGroup,
    target: Path,
    companions_from: Path,
    step: int,
    shard_bytes: int = SHARD_BYTES,
    stops: Collection[int] = (),
) -> None:
    """Writes the policy to the folder `target`, and copies config and tokenizer from the folder
    `companions_from`. If `target` already exists, the new folder replaces `target` when the new
    folder is complete.

    Args:
        stops: ids of tokens that end a response, in addition to the stop tokens of the generation
            config.

    Raises:
        UserError: the policy cannot be written.
    """
    parts = [part for part in ranks.own_tensors() if part]
    dtype, others = main_dtype({name: dtype for part in parts for name, (_, dtype) in part.items()})
    shapes = [{name: shape for name, (shape, _) in part.items()} for part in parts]
    nbytes = sum(prod(shape) * dtype.itemsize for part in parts for shape, dtype in part.values())
    with staging(target.resolve(), nbytes, replace=True) as folder:
        ranks.write_tensors(create_shards(folder, shapes, dtype, shard_bytes, step, others))
        copy_companions(companions_from, folder, dtype_name(dtype))
        add_stops(folder, stops)
