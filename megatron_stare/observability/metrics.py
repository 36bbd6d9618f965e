"""The figures of a run, step by step, on disk.

Comes from the driver loop; goes to metrics.jsonl, eval.jsonl, rollouts/ and tensorboard/ of the run directory, where
`report.py`, TensorBoard and anyone with `jq` read it. A resumed run first cuts the files back to the step it resumes
from, so that they read as if the run had never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_stare.errors import DataError
from megatron_stare.observability.jsonl import keep, read_jsonl, to_line, write_atomically

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from megatron_stare.records.trajectory import Trajectory

METRICS_FILE = "metrics.jsonl"
EVAL_FILE = "eval.jsonl"
ROLLOUTS_DIR = "rollouts"
TENSORBOARD_DIR = "tensorboard"


class MetricsWriter:
    """Appends to the files of one run directory. One writer at a time.

    Args:
        run_dir: the run directory; made if missing.
        resume_step: the last step that counts. Later records are dropped first. 0 starts over in a directory whose
            run died before its first checkpoint. None is a new run.

    Raises:
        DataError: a new run in a directory that already holds metrics.
    """

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        metrics, evals = self.run_dir / METRICS_FILE, self.run_dir / EVAL_FILE
        if resume_step is not None:
            self._cut_back(resume_step)
        elif any(path.exists() and path.stat().st_size for path in (metrics, evals)):
            raise DataError(
                "the run directory already holds the metrics of a run",
                where=str(self.run_dir),
                fix="resume that run, or choose another run.dir",
            )
        self._metrics = metrics.open("a", encoding="utf-8")
        self._evals = evals.open("a", encoding="utf-8")
        self._tensorboard = _summary_writer(self.run_dir / TENSORBOARD_DIR, resume_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the figures of one step; on disk, as far as this process goes, when it returns."""
        values = {name: float(value) for name, value in metrics.items()}
        self._metrics.write(to_line({"step": int(step), **values}))
        self._metrics.flush()
        self._scalars(step, values)

    def log_eval(self, record: Mapping[str, Any]) -> None:
        """Appends one evaluation: step, weights, pass1, greedy, problems, correct, greedy_correct, samples; of a task
        that has a name, that and how it was decoded."""
        self._evals.write(to_line(record))
        self._evals.flush()
        task = f"{record['task']}/" if "task" in record else ""
        scores = {f"eval/{task}{key}": float(record[key]) for key in ("pass1", "greedy") if record.get(key) is not None}
        self._scalars(int(record["step"]), scores)

    def log_rollouts(self, step: int, samples: Sequence[Trajectory], limit: int) -> Path | None:
        """Writes up to `limit` samples, spread evenly over the batch, to rollouts/step_<step>.jsonl.

        Returns:
            The file, or None where there is nothing to write.
        """
        count = min(limit, len(samples))
        if count <= 0:
            return None
        ordered = sorted(samples, key=lambda s: (s.prompt.cursor, s.sample_index))
        # The first of a group of 8 would always be the same prompts; a stride shows as many prompts as it can.
        chosen = [ordered[i * len(ordered) // count] for i in range(count)]
        path = self.run_dir / ROLLOUTS_DIR / f"step_{step:06d}.jsonl"
        write_atomically(path, [_rollout(step, sample) for sample in chosen])
        return path

    def close(self) -> None:
        """Flushes and closes every file."""
        self._metrics.close()
        self._evals.close()
        self._tensorboard.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _cut_back(self, step: int) -> None:
        for name in (METRICS_FILE, EVAL_FILE):
            keep(self.run_dir / name, lambda record: int(record["step"]) <= step)
        for path in (self.run_dir / ROLLOUTS_DIR).glob("step_*.jsonl"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a metrics.jsonl, oldest first; [] where there is no file. A torn last line is left out.

    "step" is an int; every other value a float, NaN where the run logged something that is not finite.
    """
    return [
        {"step": int(record["step"])}
        | {key: float("nan") if value is None else float(value) for key, value in record.items() if key != "step"}
        for record in read_jsonl(Path(path))
    ]


def evaluated_steps(run_dir: Path, task: str | None) -> set[int]:
    """The steps whose weights were evaluated on a task (None: the run's own); empty where there is no eval.jsonl."""
    return {int(record["step"]) for record in read_jsonl(run_dir / EVAL_FILE) if record.get("task") == task}


def _summary_writer(directory: Path, resume_step: int | None) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter  # seconds to import, and readers of metrics do not need it

    return SummaryWriter(str(directory), purge_step=None if resume_step is None else resume_step + 1)


def _rollout(step: int, sample: Trajectory) -> dict[str, Any]:
    prompt = sample.prompt
    return {
        "step": step,
        "cursor": prompt.cursor,
        "id": prompt.id,
        "sample": sample.sample_index,
        "prompt": prompt.text,
        "response": sample.text,
        "answer": prompt.answer,
        "reward": sample.reward,
        "reward_status": sample.reward_status,
        "finish_reason": sample.finish_reason,
        "tokens": len(sample),
    }
