"""Reports steps and evaluations as an MLflow run, on a tracking server or in a folder."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from megatron_stare.config.layers import by_dotted_key
from megatron_stare.observability.sink import RunOutline
from megatron_stare.observability.sinks.delivery import Delivered
from megatron_stare.observability.sinks.service import Service

_BATCH = 1000  # metrics per request that a tracking server accepts
_PARAMS = 100
_VALUE = 6000  # characters per parameter


class MlflowRuns(Service):
    """Logs metrics by step. A metric keeps its name, except for characters that MLflow rejects. A
    resumed run continues the same MLflow run.

    Args:
        uri: address of a tracking server, or file:/folder. None: MLFLOW_TRACKING_URI if it is set,
            else the folder mlflow in the run directory.
        experiment: name of the MLflow experiment.
    """

    name, package = "mlflow", "mlflow"

    def __init__(
        self,
        *,
        uri: str | None = None,
        experiment: Annotated[str, Field(min_length=1)] = "megatron_stare",
    ) -> None:
        super().__init__()
        self._uri, self._experiment = uri, experiment

    def open(self, run: RunOutline, delivered: Delivered) -> None:
        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI")
        uri = uri or (run.dir / "mlflow").resolve().as_uri()
        if "://" not in uri or uri.startswith("file:"):
            # MLflow's newer stores need a database
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import RunTag
        from mlflow.tracking import MlflowClient  # takes seconds

        self._client = MlflowClient(tracking_uri=uri)
        name = self._experiment
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        mine = self._client.search_runs([experiment], f"tags.megatron_stare_run = '{delivered.id}'")
        if mine:
            self._id = mine[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {"megatron_stare_run": delivered.id, "run_dir": str(run.dir)}
            self._id = self._client.create_run(
                experiment, tags=tags, run_name=run.config.run.name
            ).info.run_id
            self._parameters(by_dotted_key(run.config.model_dump(mode="json")))
        if delivered.redone:
            redone = ", ".join(f"{first} to {last}" for first, last in delivered.redone)
            self._client.log_batch(self._id, tags=[RunTag("redone", redone)])

    def send(self, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        metrics = [Metric(_named(name), value, now, step) for name, value in figures.items()]
        for at in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._id, metrics=metrics[at : at + _BATCH])

    def end(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")

    def _parameters(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(key, str(value)[:_VALUE]) for key, value in settings.items()]
        for at in range(0, len(params), _PARAMS):
            self._client.log_batch(self._id, params=params[at : at + _PARAMS])


def _named(metric: str) -> str:
    """Renames a metric for MLflow. The character `@` becomes `_at_`, so that pass@4 becomes
    pass_at_4. All other characters that MLflow rejects in a metric's name become `_`."""
    return re.sub(r"[^\w\-. :/]", "_", metric.replace("@", "_at_"), flags=re.ASCII)
