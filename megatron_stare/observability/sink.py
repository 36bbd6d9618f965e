"""Interface of sinks, which record what a run reports: files, terminals, services.

`monitor.py` calls the sinks. Built-in sinks are in `sinks/`; a user's own sink is named by its
dotted path.
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

    name: the problem, in words that stay true while the measured values change.
    text: the measurement at the last step at which the problem was seen.
    metric, value: the metric that shows the problem most directly, and its value at the last step
        at which the problem was seen; "" and NaN if no single metric shows the problem.
    """

    name: str
    text: str
    first_step: int
    last_step: int
    over: bool = False
    metric: str = ""
    value: float = math.nan

    def announce(self) -> str:
        """Returns a line for a log about the alert's beginning or end."""
        if not self.over:
            return f"step {self.first_step}: {self.text}"
        once = self.last_step == self.first_step
        steps = (
            f"step {self.first_step}" if once else f"steps {self.first_step} to {self.last_step}"
        )
        return f"over: {self.name} ({steps})"


@dataclass(frozen=True)
class RunOutline:
    """Identifies a run. `dir` is the run directory, `config` the resolved configuration."""

    dir: Path
    config: Config


class Sink:
    """Records what a run reports. Subclasses override only the methods they need.

    A sink is constructed whenever a run is checked, so by `--dry-run` too; it must open nothing
    before `start`. A sink's settings are the keyword-only parameters of the sink's constructor. All
    calls come from the driver's thread. An error in `start` or `resume` ends the run before the run
    costs anything. An error in a later call is reported once; the run continues, and the sink is
    still called, because a full disk or a lost network may recover. If the sink is `essential`, an
    error in a later call ends the run.
    """

    essential: ClassVar[bool] = False  # its errors end the run

    def start(self, run: RunOutline) -> None:
        """Begins a new run."""

    def resume(self, run: RunOutline, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        """Replaces `start` when a run resumes after `step`. The sink must drop all records of steps
        and evaluations after `step`, because the run repeats these steps and evaluations.

        Args:
            step: 0 for a run that ended before its first checkpoint.
            rows: metrics of the steps up to `step`, oldest first, each with its number under
                "step".
        """
        self.start(run)

    def step(self, step: int, metrics: Mapping[str, float], batch: RolloutBatch) -> None:
        """Receives a finished step: its metrics, and its training data with
        `batch.trajectories`."""

    def alerts(self, changed: Sequence[Alert], active: Sequence[Alert]) -> None:
        """Receives, after every step, the alerts that began or ended with it, and all active alerts
        with their newest values."""

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Receives a finished evaluation; see evaluation/evaluate.py for the record."""

    def note(self, text: str) -> None:
        """Receives a remark for the user."""

    def begin_phase(self, name: str) -> None:
        """Begins a phase: start, rollout, log_probs, update, sync, eval or checkpoint. Phases may
        be nested."""

    def end_phase(self, name: str) -> None:
        """Ends the innermost phase, which may have failed."""

    def progress(self, done: int, total: int) -> None:
        """Receives how many responses of the current phase are finished, and how many the phase
        needs in total."""

    def finish(self, run: RunOutline) -> None:
        """Ends a run that has made all its steps. If `--resume` finds that the run has finished
        already, `finish` is the only call that the sink receives."""

    def close(self) -> None:
        """Closes the sink, however the run ended, and even after a failed `start`."""


def make_sinks(listed: Sequence[Extension | str]) -> dict[str, Sink]:
    """Makes the sinks of these names or dotted paths, with their settings.

    Raises:
        ConfigError: a sink does not exist, is no Sink, cannot be constructed, has a wrong setting,
            or needs a package that is not installed; or no sink keeps the run's record.
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
