"""Writes the report of a finished run as report.html in the run directory."""

from __future__ import annotations

from megatron_stare.observability.report.page import write_report
from megatron_stare.observability.sink import RunOutline, Sink


class ReportPage(Sink):
    """Writes the report from the run's record when the run has finished."""

    def finish(self, run: RunOutline) -> None:
        write_report([run.dir], run.dir / "report.html")
