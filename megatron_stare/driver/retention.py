"""Which checkpoints of a run are kept: the newest, every so many-th, and the best by a metric."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_stare.config.schema import Config
from megatron_stare.run_dir.json_lines import read_jsonl
from megatron_stare.run_dir.run_files import EVAL_FILE, METRICS_FILE, evaluation_figures, read_metrics


@dataclass(frozen=True)
class Retention:
    """The rule. `newest` is at least 1, so that the newest checkpoint always stays.

    every: steps that it divides are kept; None: none are.
    best: how many are kept for their scores, and whether `higher` ones are better.
    """

    newest: int
    every: int | None = None
    best: int = 0
    higher: bool = True

    @classmethod
    def of(cls, config: Config) -> Retention:
        kept = config.checkpoint
        return cls(config.run.keep_checkpoints, kept.keep_every, kept.keep_best, kept.best_is == "highest")

    def leaves(self, steps: Collection[int], scores: Mapping[int, float]) -> set[int]:
        """The steps whose checkpoints are no longer wanted.

        Args:
            steps: of all checkpoints.
            scores: of some of them; one that is missing or NaN is not among the best. Of two alike the newer is better.
        """
        kept = set(sorted(steps)[-max(self.newest, 1) :])
        if self.every is not None:
            kept |= {step for step in steps if step % self.every == 0}
        known = [step for step in steps if not math.isnan(scores.get(step, math.nan))]
        sign = 1 if self.higher else -1
        kept |= set(
            sorted(known, key=lambda step: (sign * scores[step], step))[len(known) - min(self.best, len(known)) :]
        )
        return set(steps) - kept


def scores(run_dir: Path, metric: str | None) -> dict[int, float]:
    """What a run's record says of a metric, by step: of steps, or of the evaluations after them."""
    if metric is None:
        return {}
    if not metric.startswith("eval/"):
        return {row["step"]: row[metric] for row in read_metrics(run_dir / METRICS_FILE) if metric in row}
    found = {}
    for record in read_jsonl(run_dir / EVAL_FILE):
        task = f"{record['task']}/" if "task" in record else ""
        figures = {f"eval/{task}{name}": value for name, value in evaluation_figures(record).items()}
        if metric in figures:
            found[int(record["step"])] = figures[metric]
    return found
