"""How often responses look back at themselves, by words that the configuration names. Pure; goes into a step's metrics
and from there to the report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_stare.metric import Metric

if TYPE_CHECKING:
    from megatron_stare.records.trajectory import Trajectory


METRICS = (
    Metric(
        "response/reflections",
        "words a response",
        "occurrences of any of observability.reflection_words; missing without them",
        "rises with response/length_mean while reward does, where thinking longer pays",
    ),
)


def reflections(samples: Sequence[Trajectory], words: Sequence[str]) -> dict[str, float]:
    """`response/reflections`: occurrences of any of the words a response, mean over the step's samples.

    Args:
        words: counted in any case, whole words alone; where several begin at one place, the longest. None: no metric.
    """
    if not words:
        return {}
    longest_first = sorted(map(re.escape, words), key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", re.IGNORECASE)
    return {"response/reflections": sum(len(pattern.findall(s.text)) for s in samples) / len(samples)}
