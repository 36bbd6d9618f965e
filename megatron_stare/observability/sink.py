"""Interface of the sinks, which take down what a run reports: files, terminals, services.

`monitor.py` calls them; ours are in `sinks/`, a user's own is named by its dotted path.
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

if TYPE_CHECKING:  # imports torch, which `status` and `--help` need not
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
    """Something the person should look into.

    name: what it is, in words that hold while its values change.
    text: what was measured, at the step it was last seen.
    metric, value: the figure that tells it most directly, at that step; "" and NaN where no single
    one does.
    """

    name: str
    text: str
    first_step: int
    last_step: int
    over: bool = False
    metric: str = ""
    value: float = math.nan

    def announce(self) -> str:
        """The line for a log: that it began, or that it is over."""
        if not self.over:
            return f"step {self.first_step}: {self.text}"
        once = self.last_step == self.first_step
        steps = (
            f"step {self.first_step}" if once else f"steps {self.first_step} to {self.last_step}"
        )
        return f"over: {self.name} ({steps})"


@dataclass(frozen=True)
class RunOutline:
    """Which run it is. `dir` is the run directory, `config` the resolved configuration."""

    dir: Path
    config: Config


class Sink:
    """Takes down what a run reports; every method but those that are wanted may be left as it is.

    Made with its settings alone, the keyword-only parameters of its constructor, as a run is
    checked, and so by `--dry-run` too: nothing is opened before `start`. All calls come from the
    driver's one thread. What `start` and `resume` raise ends the run before it costs anything.
    Later, an error is told once and the run goes on, and so do the calls, since a full disk or a
    lost network may pass; only if the sink is `essential` does it end the run.
    """

    essential: ClassVar[bool] = False  # the run stops rather than go on without it

    def start(self, run: RunOutline) -> None:
        """A new run begins."""

    def resume(self, run: RunOutline, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        """In the place of `start`: a run is continued after `step`. Whatever was taken down of
        later steps, and of evaluations after them, is to be dropped, for they are made again.

        Args:
            step: 0 for a run that ended before its first checkpoint.
            rows: the metrics of the steps that count, oldest first, each with its number under
                "step".
        """
        self.start(run)

    def step(self, step: int, metrics: Mapping[str, float], batch: RolloutBatch) -> None:
        """A step is done: its metrics, and what it was trained on with `batch.trajectories`."""

    def alerts(self, changed: Sequence[Alert], active: Sequence[Alert]) -> None:
        """After every step: the alerts that began or are over with it, and all that hold, with
        their newest figures."""

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """An evaluation is done; see evaluation/evaluate.py for the record."""

    def note(self, text: str) -> None:
        """A remark for the person who watches."""

    def begin_phase(self, name: str) -> None:
        """A phase begins: start, rollout, log_probs, update, sync, eval or checkpoint. They may be
        nested."""

    def end_phase(self, name: str) -> None:
        """The innermost phase is over, or has failed."""

    def progress(self, done: int, total: int) -> None:
        """Responses finished, of those wanted in this phase."""

    def finish(self, run: RunOutline) -> None:
        """The run has made all its steps. The only call for a run that `--resume` finds
        finished."""

    def close(self) -> None:
        """Ends it, however the run ended and also after a `start` that failed."""


def make_sinks(listed: Sequence[Extension | str]) -> dict[str, Sink]:
    """The sinks of these names or dotted paths, with their settings.

    Raises:
        ConfigError: there is none, it is not a Sink, it cannot be made, a setting is wrong, a
            package that it needs is not installed, or none of them keeps a run's record.
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
        except Exception as error:  # whatever a user's class raises
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
