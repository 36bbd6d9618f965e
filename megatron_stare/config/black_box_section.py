"""The section `black_box`: when a phase counts as one that hangs, and what is done about it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import Field

from megatron_stare.config.performance_section import Section

SLOW = 5.0  # a phase may take so many times as long as usual, whatever the cap


class BlackBoxConfig(Section):
    """What is written where a phase does not end, and after how long; see docs/black_box.md."""

    enabled: bool = Field(
        True, description="a process beside the run watches its phases, and keeps heartbeat.json in the run directory"
    )
    first_s: float = Field(
        900.0, gt=0, description="limit of a phase that this process has not ended yet, such as the first step's"
    )
    factor: float = Field(10.0, ge=2, description="limit of a phase, in medians of the newest of its name")
    floor_s: float = Field(60.0, gt=0, description="no such limit is shorter, seconds")
    cap_s: float = Field(
        1800.0, gt=0, description="nor longer, seconds, but where a phase usually takes more than a fifth of this"
    )
    end_run: bool = Field(
        False,
        description="processes that are found to hold the run up are killed, and the driver where that does not help",
    )

    def limit_s(self, recent: Sequence[float]) -> float:
        """Seconds that a phase may take without getting on.

        Args:
            recent: seconds that the newest phases of its name took.
        """
        if not recent:
            return self.first_s
        median = statistics.median(recent)
        return min(max(self.factor * median, self.floor_s), max(self.cap_s, self.floor_s, SLOW * median))
