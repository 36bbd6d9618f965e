"""The report of a finished run, report.html of its directory."""

from __future__ import annotations

from megatron_stare.observability.report.page import write_report
from megatron_stare.observability.sink import RunOutline, Sink


class ReportPage(Sink):
    """Written once, from what the run's record says."""

    def finish(self, run: RunOutline) -> None:
        write_report([run.dir], run.dir / "report.html")
