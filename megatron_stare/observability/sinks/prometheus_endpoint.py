"""Serves the newest metrics to Prometheus as text during the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from megatron_stare.errors import UserError
from megatron_stare.observability.metrics.glossary import explained
from megatron_stare.observability.sink import WHERE, Alert, RunOutline, Sink
from megatron_stare.observability.sinks.service import need
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.run_dir.run_files import evaluation_figures

PREFIX = "megatron_stare_"


class PrometheusEndpoint(Sink):
    """Serves one gauge per metric. A gauge has the metric's name, with `_` in place of characters
    that Prometheus rejects. A gauge's description contains the metric's meaning, unit and healthy
    values from the glossary (docs/metrics.md). All values of a step are replaced at once, so a
    scrape never mixes two steps.

    Args:
        host: address to serve on. With 0.0.0.0, the metrics are reachable from every machine.
        port: port to serve on.
    """

    def __init__(
        self,
        *,
        host: Annotated[str, Field(min_length=1)] = "127.0.0.1",
        port: Annotated[int, Field(ge=1, le=65535)] = 9464,
    ) -> None:
        need("prometheus_client", "prometheus")
        self._host, self._port = host, port
        self._server: Any = None
        self._figures: Mapping[str, float] = {}
        self._evaluated: dict[tuple[str, str], float] = {}
        self._alerts: Mapping[str, float] = {}
        self._phases: tuple[str, ...] = ()

    def start(self, run: RunOutline) -> None:
        self._serve(run)

    def resume(self, run: RunOutline, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        if rows:
            self._figures = dict(rows[-1])
        self._serve(run)

    def step(self, step: int, metrics: Mapping[str, float], batch: RolloutBatch) -> None:
        self._figures = {"step": float(step), **metrics}

    def alerts(self, changed: Sequence[Alert], active: Sequence[Alert]) -> None:
        over = {alert.name: 0.0 for alert in changed if alert.over}
        self._alerts = {
            **dict.fromkeys(self._alerts, 0.0),
            **over,
            **{alert.name: 1.0 for alert in active},
        }

    def evaluation(self, record: Mapping[str, Any]) -> None:
        task = str(record.get("task") or "")
        new = {(name, task): value for name, value in evaluation_figures(record).items()}
        self._evaluated = {**self._evaluated, **new, ("step", task): float(record["step"])}

    def begin_phase(self, name: str) -> None:
        self._phases = (*self._phases, name)

    def end_phase(self, name: str) -> None:
        self._phases = self._phases[:-1]

    def close(self) -> None:
        server, self._server = self._server, None
        if server:
            server.shutdown()
            server.server_close()

    def collect(self) -> Iterator[Any]:
        """Yields the metric families of one scrape. The threads of the HTTP server call
        `collect`."""
        from prometheus_client.core import GaugeMetricFamily

        given = {"run": self._name}
        yield _family(
            GaugeMetricFamily,
            "steps",
            "training steps that the run has",
            [(given, float(self._steps))],
        )
        for name, value in sorted(self._figures.items()):
            if name == "step":
                said = "training steps that are made"
            else:
                entry = explained(name)
                said = (
                    f"{entry.meaning} [{entry.unit}]; healthy: {entry.healthy}"
                    if entry
                    else "a metric of the user's"
                )
            yield _family(GaugeMetricFamily, name, said, [(given, value)])
        for figure in sorted({name for name, _ in self._evaluated}):
            values = [
                ({**given, "task": t}, v)
                for (name, t), v in sorted(self._evaluated.items())
                if name == figure
            ]
            yield _family(
                GaugeMetricFamily, f"eval_{figure}", "of the newest evaluation of a task", values
            )
        alerts = [({**given, "alert": name}, value) for name, value in sorted(self._alerts.items())]
        yield _family(GaugeMetricFamily, "alert", "1: the alert holds", alerts)
        phase = self._phases[-1] if self._phases else ""
        yield _family(
            GaugeMetricFamily, "phase", "1: what the run is at", [({**given, "phase": phase}, 1.0)]
        )

    def _serve(self, run: RunOutline) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._name, self._steps = run.config.run.name, run.config.run.steps
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, _ = start_http_server(self._port, self._host, registry)
        except OSError as error:
            raise UserError(
                f"{self._host} port {self._port} cannot be listened on ({error.strerror})",
                where=f"{WHERE}[prometheus].port",
                fix="give another, or leave the sink prometheus out",
            ) from error


def _family(
    kind: Any, name: str, said: str, values: Sequence[tuple[Mapping[str, str], float]]
) -> Any:
    labels = list(dict.fromkeys(label for given, _ in values for label in given))
    family = kind(PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name), said, labels=labels)
    for given, value in values:
        family.add_metric([given[label] for label in labels], value)
    return family
