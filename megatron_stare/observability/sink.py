"""Defines the interface of sinks. A sink records a run's reports in files, on a terminal or in a
service.

`monitor.py` calls the sinks. Built-in sinks are in `sinks/`. The configuration names a user's own
sink by a dotted path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError, UserError
from megatron_stare.registry import Extension, resolve, settings_of

if TYPE_CHECKING:  # imports torch, which `status` and `--help` do not need
    from megatron_stare.records.rollout_batch import RolloutBatch

WHERE = "observability.sinks"
SINKS = {
    "console": "megatron_stare.observability.sinks.console.Console",
    "jsonl": "megatron_stare.observability.sinks.jsonl_files.JsonlFiles",
    "tensorboard": "megatron_stare.observability.sinks.tensorboard.TensorBoard",
    "report": "megatron_stare.observability.sinks.report_page.ReportPage",
    "wandb": "megatron_stare.observability.sinks.weights_and_biases.WeightsAndBiases",
    "mlflow": "megatron_stare.observability.sinks.mlflow_runs.MlflowRuns",
    "prometheus": "megatron_stare.observability.sinks.prometheus_endpoint.PrometheusEndpoint",
    "webhook": "megatron_stare.observability.sinks.webhook.Webhook",
}


@dataclass(frozen=True)
class Alert:
    """A problem that the user should look into.

    `name`: the problem, in words that do not depend on the measured values.
    `text`: a sentence with the values that were measured in step `last_step`.
    `metric`, `value`: the metric that shows the problem most directly, and the metric's value in
        step `last_step`. If no single metric shows the problem, `metric` is "" and `value` is NaN.
    """

    name: str
    text: str
    first_step: int
    last_step: int
    over: bool = False
    metric: str = ""
    value: float = math.nan

    def announce(self) -> str:
        """Returns a log line that says that the alert began or ended."""
        if not self.over:
            return f"step {self.first_step}: {self.text}"
        once = self.last_step == self.first_step
        steps = (
            f"step {self.first_step}" if once else f"steps {self.first_step} to {self.last_step}"
        )
        return f"over: {self.name} ({steps})"


@dataclass(frozen=True)
class RunOutline:
    """Identifies a run. `dir` is the run directory, and `config` is the resolved configuration."""

    dir: Path
    config: Config


class Sink:
    """Records what a run reports. Subclasses override only the methods that they need.

    Sinks are constructed whenever a run is checked, even with `--dry-run`, so a constructor must
    not open any file or connection. A sink opens its files and connections in `start` or `resume`.
    A sink's settings are the keyword-only parameters of the sink's constructor. All calls come from
    the driver's thread.

    The attribute `essential` marks a sink as essential. An error in any call of an essential sink
    ends the run.

    For a sink that is not essential, the consequence of an error depends on the call. An error in
    `start` ends the run before training begins. An error in `resume` ends the run before training
    begins, if a user resumed the run. A run can also resume automatically, after the loss of a
    process or after a rollback. In this case, an error in `resume` does not end the run: the
    monitor reports the error, and the run continues without the sink. An error in any other call is
    reported once, and the run continues. Even after the error, the sink receives later calls,
    because the cause of the error, such as a full disk or a lost network connection, may be gone by
    then.
    """

    essential: ClassVar[bool] = False  # its errors end the run

    def start(self, run: RunOutline) -> None:
        """Opens the sink for a new run."""

    def resume(self, run: RunOutline, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        """Opens the sink for a run that resumes after step `step`. A resumed run calls `resume`
        instead of `start`. The sink must drop all records of steps and evaluations after `step`,
        because the run repeats these steps and evaluations. A resumed run opens an essential sink
        only after the run has loaded its checkpoint. A failed load of the checkpoint therefore
        drops no records.

        Args:
            step: last step that the run keeps; 0 if the run ended before its first checkpoint.
            rows: metrics of the steps up to `step`, oldest first. The key "step" of a row contains
                the step's number.
        """
        self.start(run)

    def step(self, step: int, metrics: Mapping[str, float], batch: RolloutBatch) -> None:
        """Receives the metrics of a finished step, and the step's training data including
        `batch.trajectories`."""

    def alerts(self, changed: Sequence[Alert], active: Sequence[Alert]) -> None:
        """Receives the alerts after every step. `changed` contains the alerts that began or ended
        in the finished step. `active` contains all active alerts with their newest values."""

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Receives the record of a finished evaluation. evaluation/evaluate.py defines the
        record."""

    def note(self, text: str) -> None:
        """Receives a remark for the user."""

    def begin_phase(self, name: str) -> None:
        """Is called when the phase `name` begins. The phases are start, rollout, log_probs, update,
        sync, eval, checkpoint and, in supervised fine-tuning, data and held_out. A phase can begin
        inside another phase."""

    def end_phase(self, name: str) -> None:
        """Is called when the phase `name` ends, even if the phase failed. Of nested phases, the
        innermost phase ends first."""

    def progress(self, done: int, total: int) -> None:
        """Receives how many responses of the current phase are finished, and how many responses the
        phase needs."""

    def finish(self, run: RunOutline) -> None:
        """Is called when the run has made all its steps. If a finished run is started again with
        `--resume`, the sink receives no other call than `finish`."""

    def close(self) -> None:
        """Closes the sink. Is called at the end of every run, even after an error or a failed
        `start`."""


def make_sinks(listed: Sequence[Extension | str]) -> dict[str, Sink]:
    """Makes the listed sinks with their settings. A list entry names a built-in sink, or contains
    the dotted path of a user's own sink.

    Raises:
        ConfigError: a sink does not exist, is no Sink, cannot be constructed, has a wrong setting,
            or needs a package that is not installed; or no sink in the list writes the record that
            resume and report read.
    """
    sinks: dict[str, Sink] = {}
    for extension in map(Extension.read, listed):
        name = extension.name
        kind = resolve(name, SINKS, WHERE)
        if not (isinstance(kind, type) and issubclass(kind, Sink)):
            raise ConfigError(f"{name!r} is not a subclass of {Sink.__module__}.Sink", where=WHERE)
        settings = settings_of(extension, kind, f"{WHERE}[{name}]")
        try:
            sinks[name] = kind(**settings)
        except UserError:
            raise
        except Exception as error:  # any error of a user's class
            raise ConfigError(
                f"{name!r} cannot be made: {type(error).__name__}: {error}", where=WHERE
            ) from error
    if not any(sink.essential for sink in sinks.values()):
        raise ConfigError(
            "none of these sinks writes the record that resume and report read",
            where=WHERE,
            fix="add jsonl",
        )
    return sinks
