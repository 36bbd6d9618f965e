"""The section `checkpoint`: how checkpoints are written, which are kept, and what is looked at before one is used."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_stare.config.performance_section import Section


class CheckpointConfig(Section):
    """How checkpoints are written, kept and checked; run.checkpoint_every says when, and run.keep_checkpoints how many
    of the newest are kept beside what is asked for here. See docs/checkpoints.md."""

    background: bool = Field(
        True, description="training goes on while a checkpoint is written; it counts once all ranks have written"
    )
    writers: int = Field(2, ge=1, description="files, and processes that write them, a trainer rank")
    verify: bool = Field(
        True,
        description="the ranks read all tensor files before they are loaded, and compare checksums; false: lengths "
        "alone are looked at. Other files are always read",
    )
    self_test: bool = Field(
        True,
        description="a few responses of the newest step, and their log-probs, are saved with the weights; a resume "
        "computes them again before it trains",
    )
    grace_s: float = Field(
        20.0,
        gt=0,
        description="seconds after SIGTERM in which an update under way may end and its state be saved; the rest of "
        "the 30 s that Slurm and Kubernetes leave is for closing",
    )
    keep_every: int | None = Field(
        None, ge=1, description="checkpoints of steps that this divides are kept for good; null: none are"
    )
    keep_best: int = Field(0, ge=0, description="checkpoints kept because `best_by` is best there; 0: none")
    best_by: str | None = Field(
        None,
        description="metric that `keep_best` goes by: of the step, such as reward/mean, or of its evaluation, such as "
        "eval/pass1, of a task eval/TASK/pass1",
    )
    best_is: Literal["highest", "lowest"] = Field("highest", description="which values of `best_by` are the best")

    @model_validator(mode="after")
    def _best_by_something(self) -> CheckpointConfig:
        if bool(self.keep_best) != (self.best_by is not None):
            given, missing = ("keep_best", "best_by") if self.keep_best else ("best_by", "keep_best")
            raise ValueError(f"{given} is set, and without {missing} nothing is kept for it")
        return self
